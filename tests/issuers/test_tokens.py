"""JSON Web Tokens: what is accepted, every way to forge or misuse one, rules of issuers, and keys that change."""

from __future__ import annotations

import asyncio
import base64
import hmac
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from loraplex.issuers import signing_keys
from loraplex.issuers.signing_keys import SigningKeys
from loraplex.issuers.tokens import SKEW_S, JwtReader
from loraplex.runtime.rpc.errors import CallError, Unavailable
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role
from loraplex.runtime.rpc.timed_http import timed_call

# Tokens are made with the real time, which the library checks them against.
NOW = float(int(time.time()))
ISSUER, AUDIENCE = "https://issuer.example", "loraplex"
RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()


def jwk(key: Any, kid: str, algorithm: Any, **fields: str) -> dict[str, Any]:
    """Return a public key as a JWK."""
    made: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": kid, **fields}


KEYS = [
    jwk(RSA_KEY, "rsa", jwt.algorithms.RSAAlgorithm, use="sig"),
    jwk(EC_KEY, "ec", jwt.algorithms.ECAlgorithm, alg="ES256"),
    jwk(ED_KEY, "ed", jwt.algorithms.OKPAlgorithm),
    {"kty": "oct", "kid": "shared", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"},
    jwk(RSA_KEY, "encryption", jwt.algorithms.RSAAlgorithm, use="enc"),
]


@pytest.fixture
def jwks(tmp_path: Path) -> Path:
    """A file with the issuer's keys."""
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": KEYS}))
    return path


def reader_of(jwks: Path, *issuers: dict[str, Any], **options: Any) -> JwtReader:
    """Return a reader of a file of issuers, each with these fields."""
    usual = {"issuer": ISSUER, "audience": AUDIENCE, "jwks": str(jwks)}
    file = jwks.with_name("issuers.json")
    file.write_text(json.dumps({"issuers": [usual | fields for fields in issuers]}))
    return JwtReader(str(file), **options)


@pytest.fixture
def reader(jwks: Path) -> JwtReader:
    """A reader of the issuer's tokens."""
    return reader_of(jwks, {})


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "rsa", **claims: Any) -> str:
    """Return a signed token; a claim that is None is left out."""
    given = {"iss": ISSUER, "aud": AUDIENCE, "exp": NOW + 86_400, "sub": "ann", "tenant": "acme", **claims}
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode({name: value for name, value in given.items() if value is not None}, key, algorithm, headers)


def read(reader: JwtReader, text: str) -> Principal:
    found = reader.read((("authorization", f"Bearer {text}"),), {})
    assert found is not None
    return found


def refusal(reader: JwtReader, text: str) -> str:
    with pytest.raises(CallError) as caught:
        read(reader, text)
    return caught.value.reason


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"),
    [(RSA_KEY, "RS256", "rsa"), (RSA_KEY, "PS256", "rsa"), (EC_KEY, "ES256", "ec"), (ED_KEY, "EdDSA", "ed")],
)
def test_a_token_of_the_issuer_is_its_tenant(reader: JwtReader, key: Any, algorithm: str, kid: str) -> None:
    found = read(reader, token(key, algorithm, kid))
    assert (found.tenant, found.roles, found.kind) == ("acme", frozenset({Role.TENANT_USER}), CredentialKind.JWT)
    assert found.expires_at == NOW + 86_400 + SKEW_S
    assert read(reader, token(key, algorithm, kid)).tenant == "acme"


def test_a_subject_is_whole_and_its_issuers(jwks: Path) -> None:
    """Two subjects are two callers, so that neither pauses the other; a token without a subject has none."""
    reader = reader_of(jwks, {}, {"issuer": "https://partner.example"})
    subjects = [read(reader, token(sub=sub)).subject for sub in ("ann", "ann of", "a" * 150 + "1", "a" * 150 + "2")]
    subjects.append(read(reader, token(iss="https://partner.example")).subject)
    assert len(set(subjects)) == 5
    assert subjects[0] == read(reader, token(exp=NOW + 9_000)).subject == f"'ann' of {ISSUER}"
    assert read(reader, token(sub=None)).subject == read(reader, token(sub="")).subject == ""


def test_roles_and_scopes_are_claims(reader: JwtReader) -> None:
    assert read(reader, token(roles=["tenant-admin"])).roles == frozenset({Role.TENANT_ADMIN})
    operator = read(reader, token(roles=["operator"], tenant=None))
    assert (operator.tenant, operator.roles) == ("", frozenset({Role.OPERATOR}))
    assert read(reader, token(scope="openid loraplex:generate email")).scopes == frozenset({"generate"})
    assert read(reader, token(scope="openid email")).scopes == frozenset()


def unsigned() -> str:
    return jwt.encode({"iss": ISSUER, "aud": AUDIENCE, "exp": NOW + 86_400, "tenant": "acme"}, "", "none")


def signed_with_the_public_key() -> str:
    public = RSA_KEY.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    head, body, _ = token().split(".")
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa","typ":"JWT"}').decode().rstrip("=")
    mac = hmac.digest(public, f"{head}.{body}".encode(), "sha256")
    return f"{head}.{body}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


FORGED = {
    "no signature": unsigned(),
    "HS256 with the public key": signed_with_the_public_key(),
    "HS256 with a key of the set": token(b"secretsecretsecretsecretsecretsecret", "HS256", "shared"),
    "another key": token(rsa.generate_private_key(65537, 2048)),
    "another algorithm than the key's": token(ec.generate_private_key(ec.SECP384R1()), "ES384", "ec"),
    "unknown key": token(kid="unknown"),
    "no key named": token(kid=None),
    "a key for encryption": token(kid="encryption"),
    "wrong audience": token(aud="another"),
    "no audience": token(aud=None),
    "wrong issuer": token(iss="https://evil.example"),
    "no issuer": token(iss=None),
    "no end": token(exp=None),
    "not yet": token(nbf=NOW + 86_000),
    "made in the future": token(iat=NOW + 86_000),
    "no tenant": token(tenant=None),
    "the shared tenant": token(tenant="shared"),
    "a tenant of another type": token(tenant=["acme"]),
    "an unknown role": token(roles=["root"]),
    "a part of the cluster": token(roles=["router"], tenant=None),
    "a text of roles": token(roles="operator"),
    "no roles": token(roles=[]),
    "a tenant's operator": token(roles=["operator", "tenant-user"]),
    "an operator of a tenant": token(roles=["operator"]),
    "an unknown scope": token(scope="loraplex:everything"),
    "scopes that are no texts": token(scope={"loraplex:generate": True}),
    "a scope in a list": token(scope=[["loraplex:generate"]]),
    "an end that no clock shows": token(exp=10**400),
    "cut": token()[:-8],
    "no token": "a.b.c",
    "nothing like it": "é" * 10,
    "too long": token(pad="x" * 10_000),
    "deep": "W1tbW1tb" * 900 + ".e30.e30",
}


@pytest.mark.parametrize("how", FORGED)
def test_what_the_issuer_did_not_make_so_is_refused(reader: JwtReader, how: str) -> None:
    assert refusal(reader, FORGED[how]) == "CREDENTIAL_INVALID"


@pytest.mark.parametrize("claim", ["aud", "iss", "exp", "tenant"])
def test_a_claim_that_is_missing_is_named(reader: JwtReader, claim: str) -> None:
    claims: dict[str, Any] = {claim: None}
    with pytest.raises(CallError, match=f"the token has no claim `{claim}`"):
        read(reader, token(**claims))


def test_a_token_expires_after_the_skew(reader: JwtReader) -> None:
    assert read(reader, token(exp=time.time() - SKEW_S + 20)).tenant == "acme"
    assert refusal(reader, token(exp=NOW - SKEW_S - 1)) == "CREDENTIAL_EXPIRED"


def test_a_token_that_was_checked_before_expires_too(jwks: Path) -> None:
    now = [time.time()]
    reader = reader_of(jwks, {}, now=lambda: now[0])
    text = token(exp=now[0] + 60)
    assert read(reader, text).tenant == "acme"
    now[0] += 60 + SKEW_S
    assert refusal(reader, text) == "CREDENTIAL_EXPIRED"


def test_several_issuers_each_with_its_own_keys_and_audiences(jwks: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"keys": KEYS[1:2]}))
    partner = {"issuer": "https://partner.example", "audience": ["page", "api"], "jwks": str(other)}
    reader = reader_of(jwks, {}, partner)
    for audience in ("page", "api"):
        made = token(EC_KEY, "ES256", "ec", iss=partner["issuer"], aud=audience, tenant="globex")
        assert read(reader, made).tenant == "globex"
    assert read(reader, token()).tenant == "acme"
    # The keys and the audience of one are not the other's.
    assert refusal(reader, token(iss=partner["issuer"], aud="page")) == "CREDENTIAL_INVALID"
    assert refusal(reader, token(EC_KEY, "ES256", "ec", iss=partner["issuer"])) == "CREDENTIAL_INVALID"


def test_claims_are_named_by_their_path(jwks: Path) -> None:
    paths = {"roles": "resource_access.lora.plex.roles", "tenant": ["https://acme.example/claims", "tenant"]}
    claims: dict[str, Any] = {
        "tenant": "globex",
        "resource_access": {"lora": {"plex": {"roles": ["tenant-admin"]}}},
        "https://acme.example/claims": {"tenant": "acme"},
    }
    found = read(reader_of(jwks, paths), token(**claims))
    assert (found.tenant, found.roles) == ("acme", frozenset({Role.TENANT_ADMIN}))
    # A name that has dots itself is one entry of a list.
    paths["roles"] = ["resource_access", "lora.plex", "roles"]
    with_dots = {**claims, "resource_access": {"lora.plex": {"roles": ["tenant-admin"]}}}
    assert read(reader_of(jwks, paths), token(**with_dots)).roles == frozenset({Role.TENANT_ADMIN})
    assert read(reader_of(jwks, paths), token(**claims)).roles == frozenset({Role.TENANT_USER})
    nothing: dict[str, Any] = {"https://acme.example/claims": {}}
    with pytest.raises(CallError, match=r"claim `https://acme.example/claims.tenant`, the name"):
        read(reader_of(jwks, paths), token(**nothing))
    wrong = {**claims, "resource_access": {"lora.plex": {"roles": "tenant-admin"}}}
    with pytest.raises(CallError, match=r"claim `resource_access.lora.plex.roles` is not a list of roles"):
        read(reader_of(jwks, paths), token(**wrong))


RULES = [
    {"group": "acme-staff", "role": "tenant-user", "tenant": "acme"},
    {"group": "acme-leads", "role": "tenant-admin", "tenant": "acme"},
    {"group": "globex", "role": "tenant-user", "tenant": "globex"},
    {"group": "platform", "role": "operator"},
]


def test_rules_give_groups_roles_and_a_tenant(jwks: Path) -> None:
    reader = reader_of(jwks, {"groups": "realm.groups", "rules": RULES})

    def member(*groups: object) -> str:
        return token(tenant="initech", roles=["operator"], realm={"groups": list(groups)})

    both = read(reader, member("acme-staff", "acme-leads", "chess"))
    assert (both.tenant, both.roles) == ("acme", frozenset({Role.TENANT_USER, Role.TENANT_ADMIN}))
    operator = read(reader, member("platform"))
    assert (operator.tenant, operator.roles) == ("", frozenset({Role.OPERATOR}))
    for groups, why in (
        (("acme-staff", "globex"), "the token's groups are of several tenants, or of a tenant and the cluster"),
        (("acme-staff", "platform"), "the token's groups are of several tenants, or of a tenant and the cluster"),
        (("chess",), "no rule has a group of the token's claim `realm.groups`"),
        ((), "the token's claim `realm.groups` is not a list of groups"),
        ((7,), "the token's claim `realm.groups` is not a list of groups"),
    ):
        with pytest.raises(CallError) as caught:
            read(reader, member(*groups))
        assert caught.value.message == why
    assert refusal(reader_of(jwks, {"rules": []}), token(groups=["acme-staff"])) == "CREDENTIAL_INVALID"


def _rule(**fields: object) -> dict[str, Any]:
    return {"rules": [{"group": "staff", "role": "tenant-user", "tenant": "acme", **fields}]}


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "two tenants": (
        _rule(tenant=["acme", "globex"]),
        "Expected `str`, got `array` - at `$.issuers[0].rules[0].tenant`",
    ),
    "no tenant": (_rule(tenant=""), "the role tenant-user needs the name of a tenant - at `$.issuers[0].rules[0]`"),
    "all tenants' own": (_rule(tenant="shared"), "needs the name of a tenant - at `$.issuers[0].rules[0]`"),
    "an operator's tenant": (_rule(role="operator"), "tenant 'acme': the role operator is of no tenant"),
    "unknown role": (_rule(role="root"), "Invalid enum value 'root' - at `$.issuers[0].rules[0].role`"),
    "a part's role": (_rule(role="worker", tenant=""), "role worker: parts of the cluster have certificates"),
    "no role": ({"rules": [{"group": "staff"}]}, "missing required field `role` - at `$.issuers[0].rules[0]`"),
    "a group twice": ({"rules": [RULES[0], RULES[0]]}, "rules: the group 'acme-staff' has two"),
    "unknown field": ({"rule": []}, "unknown field `rule` - at `$.issuers[0]`"),
    "no audience": ({"audience": None}, "got `null` - at `$.issuers[0].audience`"),
    "keys in clear": ({"jwks": "http://issuer.example/keys"}, "jwks http://issuer.example/keys: write https://"),
}


@pytest.mark.parametrize("how", BAD_FILES)
def test_a_bad_file_is_refused_naming_the_field(jwks: Path, how: str) -> None:
    fields, why = BAD_FILES[how]
    with pytest.raises(ValueError, match=r"^--jwt-issuers .*issuers\.json: ") as caught:
        reader_of(jwks, fields)
    assert why in str(caught.value)


def test_a_file_names_issuers_and_each_once(jwks: Path) -> None:
    with pytest.raises(ValueError, match="one is given twice"):
        reader_of(jwks, {}, {"audience": "api"})
    with pytest.raises(ValueError, match="length >= 1"):
        reader_of(jwks)
    with pytest.raises(ValueError, match="No such file"):
        JwtReader(str(jwks.with_name("none.json")))


def test_changed_rules_hold_for_tokens_that_were_checked_and_bad_ones_are_not_taken(jwks: Path) -> None:
    reader = reader_of(jwks, {"rules": RULES})
    made = token(groups=["globex"])
    assert read(reader, made).tenant == "globex"
    file = jwks.with_name("issuers.json")
    good = file.read_text()
    for content in ("{", good.replace('"tenant": "globex"', '"tenant": "initech"')):
        assert read(reader, made).tenant == "globex"
        file.write_text(content)
        asyncio.run(_looked(reader))
    assert read(reader, made).tenant == "initech"


async def _looked(reader: JwtReader) -> None:
    """Let the reader look at its file once."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await reader.follow()


def test_api_keys_and_calls_without_a_token_are_left_to_others(reader: JwtReader) -> None:
    assert reader.read((), {}) is None
    assert reader.read((("authorization", "Bearer lpx_a_b"),), {}) is None


def test_a_file_is_read_again_and_a_bad_one_is_not_taken(jwks: Path) -> None:
    keys = SigningKeys(str(jwks))
    assert keys.find("rsa") is not None
    jwks.write_text("{")
    asyncio.run(keys.look())
    assert keys.find("rsa") is not None
    at = jwks.stat().st_mtime_ns
    jwks.write_text(json.dumps({"keys": KEYS[1:2]}))
    os.utime(jwks, ns=(at, at))  # the clock of files has ticks of some ms
    asyncio.run(keys.look())
    assert keys.find("rsa") is None
    assert keys.find("ec") is not None
    assert keys.find(None) is not None


def test_a_file_that_becomes_readable_is_read(
    jwks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = SigningKeys(str(jwks))
    jwks.write_text(json.dumps({"keys": KEYS[1:2]}))
    with monkeypatch.context() as patched:  # whoever runs the tests may read every file

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        patched.setattr(Path, "read_bytes", refuse)
        for _ in range(2):
            asyncio.run(keys.look())
    assert caplog.text.count("Permission denied") == 1
    assert keys.find("rsa") is not None
    jwks.chmod(0o400)
    asyncio.run(keys.look())
    assert keys.find("rsa") is None


def test_a_key_that_is_gone_ends_tokens_that_were_checked(reader: JwtReader, jwks: Path) -> None:
    text = token()
    assert read(reader, text).tenant == "acme"
    jwks.write_text(json.dumps({"keys": KEYS[1:2]}))
    asyncio.run(reader._keys[str(jwks)].look())
    assert refusal(reader, text) == "CREDENTIAL_INVALID"


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"keys": 1}', '{"keys": []}', json.dumps({"keys": KEYS[3:4]}), '{"keys": [{"kty": "RSA"}]}'),
        f'{{"keys": [], "keys": {json.dumps(KEYS[1:2])}}}',
    ],
)
def test_a_file_without_usable_keys_does_not_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "jwks.json").write_text(content)
    with pytest.raises(ValueError, match="jwks"):
        SigningKeys(str(tmp_path / "jwks.json"))


def test_a_key_that_cannot_be_used_does_not_keep_others_out(tmp_path: Path) -> None:
    weak = jwk(rsa.generate_private_key(65537, 1024), "weak", jwt.algorithms.RSAAlgorithm)
    broken = {"kty": "EC", "crv": "P-256", "kid": "broken", "x": "AA", "y": "AA"}
    encrypts = {**KEYS[0], "kid": "encrypts", "use": "sig", "key_ops": ["encrypt"]}
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [weak, broken, encrypts, *KEYS]}))
    keys = SigningKeys(str(path))
    found = {kid for kid in ("weak", "broken", "encrypts", "rsa", "ec", "ed") if keys.find(kid) is not None}
    assert found == {"rsa", "ec", "ed"}


def test_a_url_must_be_safe() -> None:
    for url in ("http://issuer.example/jwks", "ftp://issuer.example/jwks", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="https"):
            SigningKeys(url)


@pytest.fixture
def issuer() -> Iterator[tuple[str, dict[str, Any]]]:
    """An issuer on this machine: its URL, and what it answers by path."""
    answers: dict[str, Any] = {"/jwks": {"keys": KEYS[:1]}}

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers with JSON, or a redirect to a text."""

        def do_GET(self) -> None:
            """Answer."""
            found = answers.get(self.path)
            self.send_response(302 if isinstance(found, str) else 200 if found else 404)
            if isinstance(found, str):
                self.send_header("Location", found)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()
    thread.join()


async def test_keys_come_from_a_url(issuer: tuple[str, dict[str, Any]]) -> None:
    url, answers = issuer
    keys = SigningKeys(f"{url}/jwks")
    with pytest.raises(Unavailable):
        keys.find("rsa")
    await keys.look()
    assert keys.find("rsa") is not None
    answers["/jwks"] = None
    await keys.look()
    assert keys.find("rsa") is not None
    answers["/jwks"] = {"keys": KEYS[1:2]}
    await keys.look()
    assert keys.find("rsa") is None


async def test_redirects_are_not_followed(issuer: tuple[str, dict[str, Any]]) -> None:
    url, answers = issuer
    answers["/moved"] = f"{url}/jwks"
    keys = SigningKeys(f"{url}/moved")
    await keys.look()
    assert not keys.loaded


@pytest.mark.parametrize("drips", [b"X-Header: 1", b"\r\n\r\n", b""], ids=["headers", "body", "handshake"])
async def test_an_answer_that_drips_ends(monkeypatch: pytest.MonkeyPatch, drips: bytes) -> None:
    monkeypatch.setattr(signing_keys, "FETCH_S", 0.2)
    ended = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + drips if drips else b"\x16\x03\x03\x40\x00")
        with suppress(ConnectionError):
            while not ended.is_set():
                writer.write(b" ")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.02)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    scheme = "http" if drips else "https"
    keys = SigningKeys(f"{scheme}://localhost:{server.sockets[0].getsockname()[1]}/jwks")
    async with asyncio.timeout(60):
        await keys.look()
    assert not keys.loaded
    ended.set()
    server.close()


def test_an_ipv6_address_without_a_port_is_called_at_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], *_: object) -> socket.socket:
        called.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    for scheme in ("https", "http"):
        with suppress(OSError):
            timed_call(5.0, "GET", urlsplit(f"{scheme}://[fd00::1]/keys"))
    assert called == [("fd00::1", 443), ("fd00::1", 80)]
