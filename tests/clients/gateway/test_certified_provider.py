"""People sign in at npm's oidc-provider, which OpenID has certified: its own forms, PKCE, refresh tokens, sign-out."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loraplex.cli.development_ca import write_private
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.settings import GatewaySettings
from tests.clients.gateway.oidc_provider import CLIENT, SECRET
from tests.trials.libraries.environments import InstallError, install
from tests.trials.libraries.library import ROOT

PACKAGE = "oidc-provider@9.13.3"
Http = httpx2.AsyncClient

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture
async def certified(unused_tcp_port: int) -> AsyncIterator[str]:
    """The provider's issuer; its client's page is at the port."""
    folder = ROOT / ".cache/oidc-provider"
    try:
        node = await asyncio.to_thread(install, folder, [PACKAGE], "node")
    except InstallError as error:
        pytest.skip(str(error))
    script = Path(__file__).with_name("certified_provider.mjs")
    page = f"http://127.0.0.1:{unused_tcp_port}/"
    process = await asyncio.create_subprocess_exec(node, str(script), str(folder), page, stdout=PIPE, stderr=DEVNULL)
    assert process.stdout is not None
    yield (await process.stdout.readline()).decode().strip()
    process.kill()
    await process.wait()


async def test_a_person_signs_in_is_renewed_and_signs_out(certified: str, tmp_path: Path, unused_tcp_port: int) -> None:
    write_private(tmp_path / "secret", SECRET.encode())
    write_private(tmp_path / "session.key", b"0123456789abcdef" * 4)
    sign_in = {"client_id": CLIENT, "client_secret_file": str(tmp_path / "secret"), "scope": "openid groups"}
    rules = [{"group": "ann-staff", "role": "tenant-admin", "tenant": "acme"}]
    issuer: dict[str, Any] = {"issuer": certified, "audience": CLIENT, "jwks": f"{certified}/jwks", "sign_in": sign_in}
    file = tmp_path / "issuers.json"
    file.write_text(json.dumps({"issuers": [issuer | {"groups": "realm.groups", "rules": rules}]}))
    page = f"http://127.0.0.1:{unused_tcp_port}"
    settings = GatewaySettings(
        port=unused_tcp_port,
        ca="system",
        jwt_issuers=str(file),
        page_url=page,
        session_key=str(tmp_path / "session.key"),
    )
    async with serving(settings, GatewayMetrics()), Http(headers={"sec-fetch-site": "same-origin"}) as http:
        # Somebody whom no rule has is refused; then ann comes.
        assert (await _sign_in(http, page, "bob")).status_code == 403
        http.cookies.clear()
        assert (await _sign_in(http, page, "ann")).status_code == 303
        person = (await http.get(f"{page}/session")).json()["person"]
        assert (person["name"], person["tenant"], person["roles"]) == ("ann", "acme", ["tenant-admin"])
        for _ in range(2):  # the refresh token is another one each time
            renewed = await http.post(f"{page}/session/renew")
            assert renewed.json()["person"]["tenant"] == "acme"
        left = await http.get((await http.post(f"{page}/session/end")).json()["to"])
        assert left.status_code == 200, "the provider asks whether to end its session too"
        assert (await http.get(f"{page}/session")).json()["person"] is None


async def _sign_in(http: Http, page: str, person: str) -> httpx2.Response:
    """Follow redirects and fill in the provider's forms, of a sign-in and a consent; returns the gateway's answer."""
    answer = await http.get(f"{page}/session/sign-in")
    for prompt in ("login", "consent", "end"):
        while "location" in answer.headers:
            address = answer.url.join(answer.headers["location"])
            answer = await http.get(address)
            if str(address).startswith(f"{page}/session/callback"):
                return answer
        assert answer.status_code == 200, answer.text
        answer = await http.post(answer.url, data={"prompt": prompt, "login": person, "password": "x"})
    raise AssertionError("the provider sent nobody back")
