"""JSON Web Tokens as credentials: an issuer and an audience that the settings pin, and keys from a JWKS.

Claims: `exp`, `iss` and `aud` must be there. `tenant` is the tenant; `roles`, a list, has roles that API keys may have
too (tenant-user where it is missing). Entries of `scope` that begin with `loraplex:` restrict it to these scopes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt

from rpc.identity.api_keys import KEY_ROLES, PREFIX, bad_credential, bearer
from rpc.identity.certificates import RESERVED_TENANTS
from rpc.identity.permissions import SCOPES
from rpc.identity.principal import TENANT_ROLES, CredentialKind, Principal, Role
from rpc.identity.signing_keys import SigningKeys
from rpc.identity.tenant_header import AuthContext, Metadata, is_tenant

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
