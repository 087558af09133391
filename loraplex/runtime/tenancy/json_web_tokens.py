"""JSON Web Tokens as credentials: an issuer and an audience that the settings pin, and keys from a JWKS.

Claims: `exp`, `iss` and `aud` must be there. `tenant` is the tenant; `roles`, a list, has roles that API keys may have
too (tenant-user where it is missing). Entries of `scope` that begin with `loraplex:` restrict it to these scopes. The
JWKS is in a file or at a URL, and read again when it changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import logging
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from loraplex.runtime.files import FollowedFiles
from loraplex.runtime.json_object import parse_object
from loraplex.runtime.rpc.errors import Unavailable
from loraplex.runtime.rpc.principal import TENANT_ROLES, CredentialKind, Principal, Role
from loraplex.runtime.rpc.timed_http import timed_call
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.tenancy.api_keys import KEY_ROLES, PREFIX, bad_credential, bearer
from loraplex.runtime.tenancy.certificates import RESERVED_TENANTS
from loraplex.runtime.tenancy.guard import AuthContext, Metadata, is_loopback, is_tenant
from loraplex.runtime.tenancy.permissions import SCOPES

log = logging.getLogger(__name__)

# Algorithms by type of key, and by curve. All have a private and a public key: whoever can check a token must not be
# able to make one.
ALGORITHMS: Mapping[str, frozenset[str]] = {
    "RSA": frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
    "P-256": frozenset({"ES256"}),
    "P-384": frozenset({"ES384"}),
    "P-521": frozenset({"ES512"}),
    "Ed25519": frozenset({"EdDSA"}),
}
# Interval in seconds between looks at a JWKS, by URL and in a file; and after a token with an unknown key by URL.
LOOK_URL_S, LOOK_FILE_S, UNKNOWN_KEY_S = 60.0, 1.0, 10.0
# Timeout in seconds of a download, and its maximum bytes.
FETCH_S = 5.0
_JWKS_BYTES = 1 << 20
# Minimum bits of an RSA key: shorter ones can be broken.
_RSA_BITS = 2_048


@dataclass(frozen=True, slots=True)
class _Key:
    """A public key, and the algorithms that it may be used with."""

    key: Any
    algorithms: frozenset[str]


class SigningKeys:
    """The keys of a JWKS in a file or at a URL. Raises ValueError on a source that cannot be one, or a bad file."""

    def __init__(self, source: str) -> None:
        self._url = source if "://" in source else ""
        self._file: FollowedFiles[dict[str, _Key]] | None = None
        self._keys: dict[str, _Key] = {}
        self._missing_key = asyncio.Event()
        self._once = LogOnce(log)
        self.loaded = False
        # Grows with every change, so that checks of before it are forgotten.
        self.version = 0
        if self._url:
            parts = urllib.parse.urlsplit(self._url)
            if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
                raise ValueError(f"--jwt-jwks {source}: write https://..., or a file")
        else:
            path = Path(source)
            self._file = FollowedFiles(f"--jwt-jwks {path}", [path], lambda: _read_keys(path.read_bytes(), source))
            self._take(self._file.content)

    def find(self, key_id: str | None) -> _Key | None:
        """Return a key; without an id the only one. Raises Unavailable before the first answer of the URL."""
        if not self.loaded:
            raise Unavailable("the keys that sign tokens cannot be read yet", reason="JWKS_MISSING")
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        key = self._keys.get(key_id)
        if key is None:
            self._missing_key.set()
        return key

    async def follow(self) -> None:
        """Read the keys again when they change; never returns."""
        while True:
            await self.look()
            self._missing_key.clear()
            if not self._url:
                await asyncio.sleep(LOOK_FILE_S)
                continue
            await asyncio.sleep(UNKNOWN_KEY_S if self.loaded else LOOK_FILE_S)
            try:
                async with asyncio.timeout(LOOK_URL_S - UNKNOWN_KEY_S if self.loaded else 0):
                    await self._missing_key.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Read the keys; where that fails, keep the former ones."""
        if self._file is not None:
            if self._file.look():
                self._take(self._file.content)
            return
        try:
            self._take(_read_keys(await asyncio.to_thread(_fetch, self._url), self._url))
            self._once.reset()
        except (ValueError, OSError, http.client.HTTPException) as error:
            self._once(f"keeps the former keys: {error}")

    def _take(self, keys: dict[str, _Key]) -> None:
        if set(keys) != set(self._keys) or not self.loaded:
            log.info("has %d keys of %s", len(keys), self._url or "the file")
        self._keys = keys
        self.loaded = True
        self.version += 1


def _read_keys(content: bytes, source: str) -> dict[str, _Key]:
    """Return the keys of a JWKS for signatures, by id. Raises ValueError."""
    try:
        listed = parse_object(content)["keys"]
        keys: dict[str, _Key] = {}
        for one in listed:
            if (algorithms := _algorithms_of(one)) and (key := _read_key(one, min(algorithms), source)) is not None:
                keys[str(one.get("kid", ""))] = _Key(key, algorithms)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--jwt-jwks {source}: not a JWKS: {error}") from error
    if not keys:
        raise ValueError(f"--jwt-jwks {source}: no key for signatures among {len(listed)}")
    return keys


def _algorithms_of(listed: Mapping[str, Any]) -> frozenset[str]:
    """Return the algorithms that a key of a JWKS checks signatures with; none for other keys."""
    if listed.get("use", "sig") != "sig" or "verify" not in listed.get("key_ops", ["verify"]):
        return frozenset()
    algorithms = ALGORITHMS.get(listed.get("crv", listed.get("kty")), frozenset())
    return algorithms & {listed["alg"]} if "alg" in listed else algorithms


def _read_key(listed: Mapping[str, Any], algorithm: str, source: str) -> Any:
    """Return the public key; None for one that cannot be used, which must not keep the others from being taken."""
    try:
        key: Any = jwt.PyJWK(dict(listed), algorithm=algorithm).key
        if algorithm in ALGORITHMS["RSA"] and key.key_size < _RSA_BITS:
            raise ValueError(f"{key.key_size} bits; RSA keys need {_RSA_BITS}")
    except (ValueError, TypeError, jwt.PyJWTError) as error:
        log.warning("--jwt-jwks %s: key %r is not used: %s", source, listed.get("kid"), error)
        return None
    return key


def _fetch(url: str) -> bytes:
    """Download a JWKS; blocks. Raises OSError, HTTPException or ValueError."""
    status, content = timed_call(FETCH_S, "GET", urllib.parse.urlsplit(url), most_bytes=_JWKS_BYTES + 1)
    if status != http.client.OK:  # a redirect too: the settings name the one place that keys come from
        raise ValueError(f"--jwt-jwks {url}: it answers {status}")
    if len(content) > _JWKS_BYTES:
        raise ValueError(f"--jwt-jwks {url}: more than {_JWKS_BYTES} bytes")
    return content


# Difference in seconds that this machine's clock and the issuer's may have.
SKEW_S = 30.0
# Maximum length of a token, and maximum number of tokens whose check is remembered.
_TOKEN_CHARACTERS = 8_192
_CHECKED_TOKENS = 10_000
_SCOPE_PREFIX = "loraplex:"


class JwtReader:
    """Reads tokens of one issuer for one audience."""

    def __init__(self, keys: SigningKeys, issuer: str, audience: str, now: Callable[[], float] = time.time) -> None:
        self._keys, self._issuer, self._audience = keys, issuer, audience
        self._now = now
        # Callers by the SHA-256 of their token: a check costs about 0.1 ms.
        self._checked: dict[bytes, Principal] = {}
        self._version = 0

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal | None:
        """Return the caller; None where the call has no token. Raises Unauthenticated or Unavailable."""
        token = bearer(metadata)
        if not token or token.startswith(PREFIX):
            return None
        if self._version != self._keys.version:
            self._checked, self._version = {}, self._keys.version
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        principal = self._checked.get(digest)
        if principal is None:
            principal = self._check(token)
            if len(self._checked) >= _CHECKED_TOKENS:
                self._checked.clear()
            self._checked[digest] = principal
        if principal.expires_at is None or self._now() >= principal.expires_at:
            raise bad_credential("the token has expired", "CREDENTIAL_EXPIRED", principal)
        return principal

    def _check(self, token: str) -> Principal:
        try:
            if len(token) > _TOKEN_CHARACTERS:
                raise bad_credential("the token is not valid")
            header = jwt.get_unverified_header(token)
            key = self._keys.find(header.get("kid"))
            algorithm = header.get("alg")
            if key is None or algorithm not in key.algorithms:
                raise bad_credential("the token is not signed by a key of its issuer")
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=SKEW_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            return _principal(claims)
        except jwt.ExpiredSignatureError:
            raise bad_credential("the token has expired", "CREDENTIAL_EXPIRED") from None
        except jwt.MissingRequiredClaimError as error:
            raise bad_credential(f"the token has no claim `{error.claim}`") from None
        except (jwt.PyJWTError, ArithmeticError, RecursionError, TypeError, ValueError):
            raise bad_credential("the token is not valid") from None


def _principal(claims: Mapping[str, Any]) -> Principal:
    allowed = {role.value: role for role in KEY_ROLES}
    named = claims.get("roles", [Role.TENANT_USER.value])
    if not isinstance(named, list) or not named or not all(isinstance(one, str) and one in allowed for one in named):
        raise bad_credential("the token's claim `roles` is not a list of roles")
    roles = frozenset(allowed[one] for one in named)
    tenant = claims.get("tenant", "")
    if roles <= TENANT_ROLES:
        if "tenant" not in claims:
            raise bad_credential("the token has no claim `tenant`, the name of its holder's tenant")
        if not isinstance(tenant, str) or not is_tenant(tenant) or tenant in RESERVED_TENANTS:
            raise bad_credential("the token's claim `tenant` is not a tenant")
    elif roles & TENANT_ROLES or tenant:
        raise bad_credential("the token is a tenant's and the cluster's")
    return Principal(
        name=f"token of {str(claims.get('sub', ''))[:100]!a}",
        roles=roles,
        kind=CredentialKind.JWT,
        tenant=tenant,
        scopes=_scopes(claims.get("scope")),
        expires_at=float(claims["exp"]) + SKEW_S,
    )


def _scopes(claim: Any) -> frozenset[str]:
    words = (claim or "").split() if isinstance(claim, str | None) else claim
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad_credential("the token's claim `scope` is not a text or a list of texts")
    ours = {word.removeprefix(_SCOPE_PREFIX) for word in words if word.startswith(_SCOPE_PREFIX)}
    if ours - SCOPES:
        raise bad_credential(f"the token's claim `scope` has an unknown scope {min(ours - SCOPES)!a}")
    return frozenset(ours)
