"""People sign in to the page at a provider, over HTTP with a browser's cookies, and call a store as who they are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from starlette.datastructures import Headers

from bench.devtools import Page, browser_page
from bench.screenshots import NoBrowserError, find_browser
from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.cli.development_ca import write_private
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.sessions import Attempt, Cookies
from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.rpc.settings import SettingsError
from tests.clients.gateway.oidc_provider import CLIENT, SECRET, Provider, running
from tests.credentials_files import write_tls_files

RULES = [
    {"group": "acme-staff", "role": "tenant-user", "tenant": "acme"},
    {"group": "acme-leads", "role": "tenant-admin", "tenant": "acme"},
    {"group": "globex-staff", "role": "tenant-user", "tenant": "globex"},
]
PEOPLE: dict[str, dict[str, Any]] = {
    "ann": {"name": "Ann <b>", "realm": {"groups": ["acme-staff", "chess"]}},
    "lee": {"realm": {"groups": ["acme-leads"]}},
    "guest": {"realm": {"groups": ["chess"]}},
    "both": {"realm": {"groups": ["acme-staff", "globex-staff"]}},
}
# What a browser says of requests that the page itself makes.
OWN = {"sec-fetch-site": "same-origin"}
Http = httpx2.AsyncClient


@pytest.fixture
def provider() -> Iterator[Provider]:
    with running(Provider(deepcopy(PEOPLE))) as serving_one:
        yield serving_one


@pytest.fixture
def other() -> Iterator[Provider]:
    """Another issuer, whose people are all of globex."""
    with running(Provider({"gil": {}})) as serving_one:
        yield serving_one


@pytest.fixture
def issuers(tmp_path: Path, provider: Provider, other: Provider) -> Path:
    """The file of both issuers, which have different rules."""
    write_private(tmp_path / "secret", f"{SECRET}\n".encode())
    sign_in = {"client_id": CLIENT, "client_secret_file": str(tmp_path / "secret"), "scope": "openid groups"}
    listed: list[dict[str, Any]] = []
    for name, one in (("first", provider), ("second", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one.keys()))
        common = {"issuer": one.issuer, "jwks": str(tmp_path / f"{name}.json"), "sign_in": sign_in | {"name": name}}
        listed.append(common | {"audience": [CLIENT, "loraplex"]})
    listed[0] |= {"groups": "realm.groups", "rules": RULES}
    listed[1] |= {"tenant": ["https://partner.example/tenant"]}
    (tmp_path / "issuers.json").write_text(json.dumps({"issuers": listed}))
    return tmp_path / "issuers.json"


@pytest.fixture
async def store(tmp_path: Path, issuers: Path) -> AsyncIterator[Store]:
    """A store that checks credentials and keeps an audit log."""
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://store/s"))
    files: dict[str, Any] = {"tls_cert": cert, "tls_key": key, "tls_ca": ca, "audit": str(tmp_path / "audit.jsonl")}
    made = Store(StoreSettings(tmp_path / "data", port=0, operator_mtls_port=0, jwt_issuers=str(issuers), **files))
    await made.start()
    yield made
    await made.stop(0)


@pytest.fixture
async def http(issuers: Path, store: Store, unused_tcp_port: int) -> AsyncIterator[Http]:
    """A browser before a gateway with the store."""
    address, ca = store.addresses[0], next(issuers.parent.glob("ca-*/*.pem"))
    settings = gateway_settings(issuers, unused_tcp_port, ca=str(ca), router=address, store=address)
    async with (
        serving(settings, GatewayMetrics()) as (address, _),
        Http(base_url=f"http://{address}", headers=OWN) as browser,
    ):
        yield browser


def gateway_settings(issuers: Path, port: int, **fields: Any) -> GatewaySettings:
    key = issuers.with_name("session.key")
    write_private(key, b"0123456789abcdef" * 4)
    usual: dict[str, Any] = {"port": port, "ca": "system", "jwt_issuers": str(issuers), "session_key": str(key)}
    return GatewaySettings(**{**usual, "page_url": f"http://127.0.0.1:{port}", **fields})


async def callback_of(http: Http, person: str, provider: Provider) -> str:
    """Begin to sign in, and fill in the provider's form; returns where the provider sends the browser."""
    begun = await http.get("/session/sign-in", params={"issuer": provider.issuer})
    assert (begun.status_code, begun.headers["cache-control"]) == (302, "no-store")
    async with Http() as elsewhere:
        form = begun.headers["location"]
        assert (await elsewhere.get(form)).status_code == 200
        return str((await elsewhere.post(form, data={"sub": person})).headers["location"])


async def sign_in(http: Http, person: str, provider: Provider) -> httpx2.Response:
    return await http.get(await callback_of(http, person, provider))


async def person_of(http: Http) -> Any:
    return (await http.get("/session")).json()["person"]


async def refused(http: Http, answer: httpx2.Response, why: str, status: int = 403) -> None:
    """Assert that a sign-in was refused by one sentence, and nothing is set."""
    assert answer.status_code == status, answer.text
    assert why in answer.text
    assert await person_of(http) is None
    assert not http.cookies, "nothing is set"
    assert (await http.get("/v1/adapters")).status_code == 401


async def test_a_person_signs_in_and_calls_the_store_with_her_own_rights(
    http: Http, provider: Provider, store: Store, tmp_path: Path
) -> None:
    assert (await http.get("/v1/adapters")).status_code == 401
    offered = (await http.get("/session")).json()
    assert [one["name"] for one in offered["issuers"]] == ["first", "second"]
    assert offered["person"] is None
    answer = await sign_in(http, "ann", provider)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{http.base_url}/")
    for line in answer.headers.get_list("set-cookie"):
        assert line.endswith(("; Path=/; HttpOnly; SameSite=Lax", "; Max-Age=0"))
        assert "eyJ" not in line, "the token is not in clear"
    person = await person_of(http)
    assert (person["name"], person["tenant"], person["roles"]) == ("Ann <b>", "acme", ["tenant-user"])
    assert 0 < person["expires_in"] <= 330
    assert (await http.get("/v1/adapters")).json() == {"adapters": []}
    assert (await http.delete("/v1/adapters/support")).json()["error"]["code"] == "role_not_permitted"
    await sign_in(http, "lee", provider)
    assert (await http.delete("/v1/adapters/support")).status_code == 404
    await store.stop(0)  # which writes the last records
    audited = (tmp_path / "audit.jsonl").read_text()
    assert "token of 'ann'" in audited
    assert "token of 'lee'" in audited


async def test_requests_of_other_sites_have_no_session(http: Http, provider: Provider) -> None:
    await sign_in(http, "ann", provider)
    for site in ("same-site", "cross-site", "none", ""):
        headers = {"sec-fetch-site": site}
        assert (await http.get("/v1/adapters", headers=headers)).status_code == 401
        assert (await http.get("/session", headers=headers)).json()["person"] is None
        for path in ("/session/end", "/session/renew"):
            assert (await http.post(path, headers=headers)).json()["error"]["code"] == "origin_not_allowed"
    assert (await http.get("/v1/adapters", headers={"x-api-key": "lpx_another"})).status_code == 401
    assert (await http.get("/v1/adapters")).status_code == 200


async def test_an_answer_counts_once_and_in_the_browser_that_began(http: Http, provider: Provider) -> None:
    address = await callback_of(http, "ann", provider)
    async with Http() as another:
        stolen = await another.get(address, headers=OWN)
    assert stolen.status_code == 403
    assert "did not begin this sign-in" in stolen.text
    assert (await http.get(address)).status_code == 303
    http.cookies.clear()
    await refused(http, await http.get(address), "or it was used already; sign in again")
    forged = (await callback_of(http, "ann", provider)).replace("state=", "state=x")
    await refused(http, await http.get(forged), "did not begin this sign-in")


async def test_a_code_counts_once_with_its_verifier(http: Http, provider: Provider) -> None:
    first = parse_qs(urlsplit(await callback_of(http, "ann", provider)).query)["code"][0]
    # A code that was meant for another sign-in has another challenge.
    second = await callback_of(http, "guest", provider)
    mixed = httpx2.URL(second).copy_set_param("code", first)
    await refused(http, await http.get(mixed), "gives no token: invalid_grant; sign in again")
    expired = await callback_of(http, "ann", provider)
    provider.codes.clear()
    await refused(http, await http.get(expired), "gives no token: invalid_grant; sign in again")


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ({"nonce": "another"}, "the answer is not of this sign-in (nonce); sign in again"),
        ({"nonce": None}, "the answer is not of this sign-in (nonce); sign in again"),
        ({"aud": "another client"}, "the ID token: the token is not valid"),
        ({"aud": [CLIENT, "another"], "azp": "another"}, "the ID token is of another issuer or client"),
        ({"iss": "https://evil.example"}, "tokens of the issuer"),
        ({"exp": time.time() - 300}, "the ID token: the token has expired"),
        ({"sub": None}, "the ID token names nobody (sub)"),
    ],
)
async def test_an_id_token_that_is_not_of_this_sign_in(
    http: Http, provider: Provider, faults: dict[str, Any], why: str
) -> None:
    provider.faults = faults
    await refused(http, await sign_in(http, "ann", provider), why)


async def test_an_answer_of_another_issuer(http: Http, provider: Provider, other: Provider) -> None:
    provider.names_issuer = other.issuer
    await refused(http, await sign_in(http, "ann", provider), "of another issuer than the one where you began")
    provider.names_issuer = "none"
    await refused(http, await sign_in(http, "ann", provider), "does not say which issuer it is of")
    provider.names_issuer = None
    provider.key, provider.faults = other.key, {"iss": other.issuer, "https://partner.example/tenant": "globex"}
    await refused(http, await sign_in(http, "ann", provider), "the ID token is of another issuer or client")
    assert (await http.get("/session/sign-in", params={"issuer": "https://evil.example"})).status_code == 404
    denied = await callback_of(http, "ann", provider)
    address = httpx2.URL(denied).copy_remove_param("code").copy_set_param("error", "access_denied<script>")
    answer = await http.get(address)
    assert "<script" not in answer.text
    await refused(http, answer, "did not sign you in: access_denied&lt;script&gt;")


async def test_people_whom_no_rule_or_two_tenants_have_are_told_so(http: Http, provider: Provider) -> None:
    await refused(http, await sign_in(http, "guest", provider), "no rule has a group of the token")
    await refused(http, await sign_in(http, "both", provider), "the token&#x27;s groups are of several tenants")


async def test_several_issuers_each_by_its_own_claims(http: Http, provider: Provider, other: Provider) -> None:
    other.people["gil"]["https://partner.example/tenant"] = "globex"
    assert (await sign_in(http, "gil", other)).status_code == 303
    assert (await person_of(http))["tenant"] == "globex"
    # An access token of an audience that the cluster takes is the credential; here it alone has the tenant.
    del other.people["gil"]["https://partner.example/tenant"]
    other.access_claims = {"aud": ["loraplex"], "https://partner.example/tenant": "initech"}
    assert (await sign_in(http, "gil", other)).status_code == 303
    assert (await person_of(http))["tenant"] == "initech"
    assert (await http.get("/v1/adapters")).status_code == 200


async def test_a_session_is_renewed_until_the_provider_gives_no_token(http: Http, provider: Provider) -> None:
    provider.life_s = -20  # within the skew of clocks
    await sign_in(http, "ann", provider)
    assert (await person_of(http))["expires_in"] <= 10
    provider.life_s = 600
    renewed = (await http.post("/session/renew")).json()["person"]
    assert renewed["expires_in"] > 500
    assert (await person_of(http))["expires_in"] > 500
    provider.people["ann"] = provider.people["guest"]
    ended = await http.post("/session/renew")
    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "session_ended")
    assert not http.cookies


async def test_a_session_outlives_a_provider_that_is_away(http: Http, provider: Provider, issuers: Path) -> None:
    await sign_in(http, "ann", provider)
    issuers.with_name("secret").unlink()
    assert (await http.post("/session/renew")).json()["error"]["code"] == "provider_away"
    assert (await person_of(http))["tenant"] == "acme"


async def test_sign_out_ends_the_session_here_and_at_the_provider(http: Http, provider: Provider) -> None:
    await sign_in(http, "ann", provider)
    left = (await http.post("/session/end")).json()["to"]
    assert not http.cookies
    assert await person_of(http) is None
    async with Http() as elsewhere:
        back = await elsewhere.get(left)
    assert back.headers["location"] == f"{http.base_url}/"
    (asked,) = provider.signed_out
    assert (asked["client_id"], asked["from"]) == (CLIENT, "discovery")
    assert asked["id_token_hint"].startswith("eyJ")


async def shown(page: Page, condition: str) -> None:
    """Wait for a condition, also while the browser goes to another page."""
    while True:
        try:
            await page.wait_for(condition)
        except RuntimeError as error:
            if "navigated" not in str(error) and "context" not in str(error):
                raise
        else:
            return


async def test_a_browser_signs_in_and_out_without_a_key(http: Http, provider: Provider) -> None:
    try:
        browser = find_browser()
    except NoBrowserError as error:
        pytest.skip(f"{error}; no package of pip has one")
    async with browser_page(browser) as page:
        await page.open(f"{http.base_url}/")
        await shown(page, "document.querySelectorAll('#person a').length === 2")
        assert await page.evaluate("document.getElementById('status').textContent") == "Sign in to use the page."
        await page.evaluate("document.querySelector('#person a').click()")
        await shown(page, "document.getElementById('sub')")
        await page.type("#sub", "ann")
        await page.press("Enter")
        await shown(page, "document.getElementById('person')?.textContent.startsWith('Ann <b>: acme, tenant-user')")
        for field in ("tenant-field", "key-field", "operator-key-field", "cluster"):
            assert await page.evaluate(f"document.getElementById('{field}').hidden")
        answered = "fetch('v1/adapters').then((answer) => answer.json())"
        assert await page.evaluate(answered) == {"adapters": []}
        assert await page.evaluate("document.cookie + JSON.stringify({...localStorage})") == "{}"
        await page.evaluate("document.getElementById('sign-out').click()")
        await shown(page, "document.querySelectorAll('#person a').length === 2")
        assert (await page.evaluate(answered))["error"]["code"] == "credential_missing"
        # A session that cannot be renewed any more is nobody's.
        provider.life_s = -20
        await page.evaluate("document.querySelector('#person a').click()")
        await shown(page, "document.getElementById('sub')")
        await page.type("#sub", "ann")
        await page.press("Enter")
        await shown(page, "document.getElementById('sign-out')")
        provider.refresh_tokens.clear()
        await shown(page, "document.querySelectorAll('#person a').length === 2")


async def test_another_gateway_with_the_same_keys_knows_the_session(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_private(first, b"a" * 32)
    write_private(second, b"b" * 32 + b"\n" + b"a" * 32)
    attempt = Attempt("https://login.example", "state", "nonce", "v" * 6_000)
    old, new = (Cookies(str(file), "https://llm.example.com") for file in (first, second))
    written = [line.partition(";") for _, line in old.write(attempt)]
    assert all(name.startswith("__Host-loraplex-sign-in") and "; Secure" in rest for name, _, rest in written)
    cookies = Headers({"cookie": "; ".join(pair for pair, _, rest in written if "Max-Age=0" not in rest)})
    assert new.read(Attempt, cookies) == attempt
    again = [line.partition(";")[0] for _, line in new.write(attempt)]
    assert old.read(Attempt, Headers({"cookie": "; ".join(again)})) is None, "the newest key encrypts"
    assert new.read(Attempt, Headers({"cookie": "; ".join(again[:1])})) is None


def test_bad_settings_end_the_start_with_one_line(issuers: Path) -> None:
    with pytest.raises(ValueError, match=r"--page-url, --session-key: give all three"):
        gateway_settings(issuers, 8000, session_key="")
    short = issuers.with_name("short.key")
    write_private(short, b"short")
    without = issuers.with_name("without.json")
    without.write_text(json.dumps({"issuers": [{"issuer": "https://a", "audience": "b", "jwks": "https://a/k"}]}))
    content = issuers.read_text()
    for name, changed in (
        ("scope", content.replace("openid groups", "groups")),
        ("field", content.replace("scope", "x")),
    ):
        issuers.with_name(f"{name}.json").write_text(changed)
    for fields, why in (
        ({"page_url": "https://llm.example.com/page"}, "--page-url https://llm.example.com/page: write https://HOST"),
        ({"page_url": "http://llm.example.com"}, "--page-url http://llm.example.com: write https://HOST"),
        ({"session_key": str(short)}, f"--session-key {short}: a key a line, of 32 characters or more"),
        ({"jwt_issuers": str(without)}, "no issuer has sign_in"),
        (
            {"jwt_issuers": str(issuers.with_name("scope.json"))},
            "scope 'groups': needs openid - at `$.issuers[0].sign_in`",
        ),
        ({"jwt_issuers": str(issuers.with_name("field.json"))}, "unknown field `x` - at `$.issuers[0].sign_in`"),
    ):
        with pytest.raises(SettingsError) as caught:
            asyncio.run(_start(gateway_settings(issuers, 0, **fields)))
        assert why in str(caught.value)
    issuers.with_name("secret").unlink()
    with pytest.raises(SettingsError, match=r"client_secret_file .*: No such file"):
        asyncio.run(_start(gateway_settings(issuers, 0)))


async def _start(settings: GatewaySettings) -> None:
    async with serving(settings, GatewayMetrics()):
        pass
