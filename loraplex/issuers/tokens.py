"""JSON Web Tokens as credentials, of the issuers that a file describes (docs/guides/security.md#issuers).

Claims: `exp`, `iss` and `aud` must be there. Either an issuer's rules give groups a role and a tenant; or `tenant` is
the tenant, and `roles`, a list, has roles that API keys may have too (tenant-user where it is missing). Entries of
`scope` that begin with `loraplex:` restrict it to these scopes. File and keys are read again when they change.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jwt
import msgspec

from loraplex.issuers.signing_keys import LOOK_FILE_S, SigningKeys, is_safe
from loraplex.runtime.files import FollowedFiles
from loraplex.runtime.json_object import parse_object
from loraplex.runtime.rpc.principal import TENANT_ROLES, CredentialKind, Principal, Role
from loraplex.runtime.tenancy.api_keys import KEY_ROLES, PREFIX, bad_credential, bearer
from loraplex.runtime.tenancy.certificates import RESERVED_TENANTS
from loraplex.runtime.tenancy.guard import AuthContext, Metadata, is_tenant
from loraplex.runtime.tenancy.permissions import SCOPES

# Path of a claim: names with dots between them, or a list, for names that have dots themselves.
ClaimPath = str | list[str]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class GroupRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The role of a group's members, and their tenant where it is a role of a tenant."""

    group: _Text
    role: Role
    tenant: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError on a role that no token may have, or without the tenant that it needs."""
        if self.role not in KEY_ROLES:
            raise ValueError(f"role {self.role}: parts of the cluster have certificates")
        if self.role in TENANT_ROLES and not _is_open(self.tenant):
            raise ValueError(f"tenant {self.tenant!r}: the role {self.role} needs the name of a tenant")
        if self.role not in TENANT_ROLES and self.tenant:
            raise ValueError(f"tenant {self.tenant!r}: the role {self.role} is of no tenant")


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings with which gateways sign people in at an issuer. The page shows `name`."""

    client_id: _Text
    client_secret_file: str = ""
    scope: str = "openid"
    name: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError on a scope for which no provider returns an ID token."""
        if "openid" not in self.scope.split():
            raise ValueError(f"scope {self.scope!r}: needs openid")


class Issuer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer, the paths of its claims, and its rules; without rules claims say role and tenant."""

    issuer: _Text
    audience: _Text | list[_Text]
    jwks: _Text
    tenant: ClaimPath = "tenant"
    roles: ClaimPath = "roles"
    scope: ClaimPath = "scope"
    groups: ClaimPath = "groups"
    rules: list[GroupRule] | None = None
    sign_in: SignIn | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where two rules are of one group, or people would sign in without TLS."""
        groups = Counter(rule.group for rule in self.rules or ())
        if twice := [group for group, count in groups.items() if count > 1]:
            raise ValueError(f"rules: the group {twice[0]!r} has two; a group has one role and one tenant")
        if self.sign_in and not is_safe(self.issuer):
            raise ValueError(f"issuer {self.issuer}: people sign in at https://... alone")


class _Issuers(msgspec.Struct, forbid_unknown_fields=True):
    issuers: Annotated[list[Issuer], msgspec.Meta(min_length=1)]


# Difference in seconds that this machine's clock and the issuer's may have.
SKEW_S = 30.0
# Maximum length of a token, and maximum number of tokens whose check is remembered.
_TOKEN_CHARACTERS = 8_192
_CHECKED_TOKENS = 10_000
_SCOPE_PREFIX = "loraplex:"


class JwtReader:
    """Reads tokens of the issuers in a file. Raises ValueError where it cannot be used."""

    def __init__(self, file: str, now: Callable[[], float] = time.time) -> None:
        self._flag, self._now = f"--jwt-issuers {file}", now
        self._keys: dict[str, SigningKeys] = {}
        self._file = FollowedFiles(self._flag, [Path(file)], lambda: self._read_issuers(Path(file)))
        # Callers by the SHA-256 of their token: a check costs about 0.1 ms.
        self._checked: dict[bytes, Principal] = {}
        self._version: tuple[int, ...] = ()

    @property
    def issuers(self) -> Mapping[str, Issuer]:
        """Return the issuers by the claim `iss` of their tokens."""
        return self._file.content

    def _read_issuers(self, path: Path) -> Mapping[str, Issuer]:
        try:
            found = msgspec.convert(parse_object(path.read_bytes()), _Issuers).issuers
            issuers = {one.issuer: one for one in found}
            if len(issuers) < len(found):
                raise ValueError("issuers: one is given twice")
            self._keys = {one.jwks: self._keys.get(one.jwks) or SigningKeys(one.jwks) for one in found}
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"{self._flag}: {error}") from error
        return issuers

    async def follow(self) -> None:
        """Read the file and the keys again when they change; never returns."""
        while True:
            self._file.look()
            await asyncio.gather(*(keys.look_if_due() for keys in self._keys.values()))
            await asyncio.sleep(LOOK_FILE_S)

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal | None:
        """Return the caller; None where the call has no token. Raises Unauthenticated or Unavailable."""
        token = bearer(metadata)
        if not token or token.startswith(PREFIX):
            return None
        if (version := (self._file.version, *(keys.version for keys in self._keys.values()))) != self._version:
            self._checked, self._version = {}, version
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        principal = self._checked.get(digest)
        if principal is None:
            principal = _principal(*self.verify(token))
            if len(self._checked) >= _CHECKED_TOKENS:
                self._checked.clear()
            self._checked[digest] = principal
        if principal.expires_at is None or self._now() >= principal.expires_at:
            raise bad_credential("the token has expired", "CREDENTIAL_EXPIRED", principal)
        return principal

    def verify(self, token: str, audience: str = "") -> tuple[Issuer, Mapping[str, Any]]:
        """Return a token's issuer and claims, of `audience` or of one of the issuer's.

        Raises Unauthenticated or Unavailable.
        """
        try:
            if len(token) > _TOKEN_CHARACTERS:
                raise bad_credential("the token is not valid")
            header = jwt.get_unverified_header(token)
            if (named := jwt.decode(token, options={"verify_signature": False}).get("iss")) is None:
                raise jwt.MissingRequiredClaimError("iss")
            issuer = self.issuers.get(named)
            if issuer is None:
                raise bad_credential(f"tokens of the issuer {str(named)[:100]!a} are not accepted")
            key = self._keys[issuer.jwks].find(header.get("kid"))
            algorithm = header.get("alg")
            if key is None or algorithm not in key.algorithms:
                raise bad_credential("the token is not signed by a key of its issuer")
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=audience or issuer.audience,
                issuer=issuer.issuer,
                leeway=SKEW_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            return issuer, {**claims, "exp": float(claims["exp"])}
        except jwt.ExpiredSignatureError:
            raise bad_credential("the token has expired", "CREDENTIAL_EXPIRED") from None
        except jwt.MissingRequiredClaimError as error:
            raise bad_credential(f"the token has no claim `{error.claim}`") from None
        except (jwt.PyJWTError, ArithmeticError, RecursionError, TypeError, ValueError):
            raise bad_credential("the token is not valid") from None


def _is_open(tenant: object) -> bool:
    """Tell whether a credential may be of a tenant of this name."""
    return isinstance(tenant, str) and is_tenant(tenant) and tenant not in RESERVED_TENANTS


def _at(claims: Mapping[str, Any], path: ClaimPath, default: Any = None) -> Any:
    """Return the claim at a path; `default` where there is none."""
    value: Any = claims
    for name in path.split(".") if isinstance(path, str) else path:
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def _texts(claims: Mapping[str, Any], path: ClaimPath, default: Any, what: str) -> list[str]:
    found = _at(claims, path, default)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise bad_credential(f"the token's claim `{_name(path)}` is not a list of {what}")
    return found


def _name(path: ClaimPath) -> str:
    return path if isinstance(path, str) else ".".join(path)


def _principal(issuer: Issuer, claims: Mapping[str, Any]) -> Principal:
    if issuer.rules is None:
        roles, tenant = _claimed(issuer, claims)
    else:
        groups = set(_texts(claims, issuer.groups, None, "groups"))
        rules = [rule for rule in issuer.rules if rule.group in groups]
        if not rules:
            raise bad_credential(f"no rule has a group of the token's claim `{_name(issuer.groups)}`")
        tenant, *others = {rule.tenant for rule in rules}
        if others:
            raise bad_credential("the token's groups are of several tenants, or of a tenant and the cluster")
        roles = frozenset(rule.role for rule in rules)
    subject = claims.get("sub")
    return Principal(
        name=f"token of {str(subject or '')[:100]!a}",
        roles=roles,
        kind=CredentialKind.JWT,
        tenant=tenant,
        scopes=_scopes(_at(claims, issuer.scope), _name(issuer.scope)),
        expires_at=claims["exp"] + SKEW_S,
        subject=f"{subject!a} of {issuer.issuer}" if subject else "",
    )


def _claimed(issuer: Issuer, claims: Mapping[str, Any]) -> tuple[frozenset[Role], str]:
    """Return the roles and the tenant that the claims themselves say."""
    allowed = {role.value: role for role in KEY_ROLES}
    named = _texts(claims, issuer.roles, [Role.TENANT_USER.value], "roles")
    if not set(named) <= set(allowed):
        raise bad_credential(f"the token's claim `{_name(issuer.roles)}` is not a list of roles")
    roles, tenant = frozenset(allowed[one] for one in named), _at(claims, issuer.tenant, "")
    if roles <= TENANT_ROLES:
        if tenant == "":
            raise bad_credential(f"the token has no claim `{_name(issuer.tenant)}`, the name of its holder's tenant")
        if not _is_open(tenant):
            raise bad_credential(f"the token's claim `{_name(issuer.tenant)}` is not a tenant")
    elif roles & TENANT_ROLES or tenant:
        raise bad_credential("the token is a tenant's and the cluster's")
    return roles, tenant


def _scopes(claim: Any, name: str) -> frozenset[str]:
    words = (claim or "").split() if isinstance(claim, str | None) else claim
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad_credential(f"the token's claim `{name}` is not a text or a list of texts")
    ours = {word.removeprefix(_SCOPE_PREFIX) for word in words if word.startswith(_SCOPE_PREFIX)}
    if ours - SCOPES:
        raise bad_credential(f"the token's claim `{name}` has an unknown scope {min(ours - SCOPES)!a}")
    return frozenset(ours)
