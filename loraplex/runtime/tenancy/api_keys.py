"""API keys `lpx_KEYID_SECRET`: how they are made and checked.

The secret is 256 bits from `secrets`. Only its SHA-256 is kept: nobody guesses a random secret, so that a slow hash,
which passwords need, would only slow down every call.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from loraplex.runtime.rpc.errors import Unavailable
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, Unauthenticated
from loraplex.runtime.tenancy.guard import AuthContext, Metadata, RunningCalls

PREFIX = "lpx_"
AUTHORIZATION = "authorization"
_SECRET_BYTES = 32
_KEY = re.compile(r"lpx_([a-z0-9]{16})_([A-Za-z0-9_-]{43})")
# Default of the maximum age in seconds of the copy of the keys with which callers are admitted. A router that the store
# has not answered for so long cannot know which keys are revoked: longer than a store's restart or move takes.
STALE_S = 900.0
# Maximum number of used keys that a router names to the store in one call.
USED_AT_ONCE = 1_000
# Roles that a key may have; parts of the cluster have certificates.
KEY_ROLES = (Role.TENANT_USER, Role.TENANT_ADMIN, Role.TRAINER, Role.OPERATOR, Role.AUDITOR)


@dataclass(frozen=True, slots=True)
class HashedSecret:
    """A secret's SHA-256, and until when it is valid in seconds since 1970; None: as long as its key."""

    sha256: bytes
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class HashedKey:
    """A key as processes keep it."""

    key_id: str
    tenant: str
    role: Role
    scopes: frozenset[str]
    expires_at: float | None
    revoked: bool
    secrets: tuple[HashedSecret, ...]

    def ends_at(self, sha256: bytes) -> float | None:
        """Return when a secret of the key ends, or has ended; None: never. Without one: when the key does."""
        same = [secret.expires_at for secret in self.secrets if secret.sha256 == sha256]
        return min((end for end in (self.expires_at, *(same or [0.0] * bool(sha256))) if end is not None), default=None)


def new_api_key(key_id: str = "") -> tuple[str, str, bytes]:
    """Make a key, or another secret of a key; return its id, the whole key, and the secret's SHA-256."""
    key_id, secret = key_id or secrets.token_hex(8), secrets.token_urlsafe(_SECRET_BYTES)
    return key_id, f"{PREFIX}{key_id}_{secret}", hash_of(secret)


def hash_of(secret: str) -> bytes:
    """Return a secret's SHA-256."""
    return hashlib.sha256(secret.encode()).digest()


def split_api_key(text: str) -> tuple[str, str] | None:
    """Return a key's id and secret; None where the text is no key."""
    match = _KEY.fullmatch(text)
    return None if match is None else (match[1], match[2])


def bearer(metadata: Metadata) -> str:
    """Return the key or token of a call; empty for none. Raises Unauthenticated."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if not values:
        return ""
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) != 1 or scheme.lower() != "bearer" or not token.strip():
        raise bad_credential("write the credential once: authorization: Bearer KEY")
    return token.strip()


def bad_credential(
    message: str, reason: str = "CREDENTIAL_INVALID", holder: Principal | None = None
) -> Unauthenticated:
    """Return the error of a credential that is not accepted; `holder` is whose it was."""
    return Unauthenticated(message, reason=reason, holder=holder)


class KeyDirectory:
    """The keys that a process admits callers with. `read_at` is the monotonic time of the last look at the store."""

    def __init__(self, now: Callable[[], float] = time.monotonic, stale_s: float = STALE_S) -> None:
        self._keys: dict[str, HashedKey] = {}
        self._stale_s = stale_s
        self.calls = RunningCalls()
        self._now = now
        self._read_at = -math.inf
        self._follows = False
        # The keys that callers were admitted with since they were taken.
        self._used = dict[str, None]()

    def follow(self) -> None:
        """Require from now on that `look_done` is called at least every `stale_s` seconds."""
        self._follows = True

    def put(self, keys: Sequence[HashedKey], *, clear: bool = False) -> None:
        """Add keys or replace them, and end calls of revoked keys and secrets; with `clear` forget all others."""
        if clear:
            former, self._keys = self._keys, {key.key_id: key for key in keys}  # at no time a caller finds none
            for key_id in former.keys() - self._keys.keys():
                self.calls.end(key_id, _unknown)
        else:
            self._keys.update((key.key_id, key) for key in keys)
        for key in keys:
            if key.revoked:
                self.calls.end(key.key_id, _revoked)
            else:
                self.calls.change(key.key_id, key.ends_at)

    def note_used(self, key_ids: Iterable[str]) -> None:
        """Note that callers were admitted with these keys."""
        self._used.update(dict.fromkeys(key_ids))

    def take_used(self, at_most: int) -> list[str]:
        """Return keys that callers were admitted with since the last call, `at_most`; the others come later."""
        taken = list(islice(self._used, at_most))
        for key_id in taken:
            del self._used[key_id]
        return taken

    def look_done(self, age_s: float = 0.0) -> None:
        """Record a successful look: the store's own copy of the keys is `age_s` old."""
        self._read_at = self._now() - age_s

    def age_s(self) -> float:
        """Return the copy's age in seconds: infinite before the store's first answer, 0 in the store itself."""
        return self._now() - self._read_at if self._follows else 0.0

    def find(self, key_id: str) -> HashedKey | None:
        """Return a key. Raises Unavailable where the copy is too old."""
        if self.age_s() > self._stale_s:
            raise Unavailable("API keys unknown: the adapter store does not answer", reason="KEYS_STALE")
        return self._keys.get(key_id)

    def is_valid(self, key_id: str) -> bool:
        """Tell whether a key is there, not revoked and not expired. Raises Unavailable as `find`."""
        key = self.find(key_id)
        return key is not None and not key.revoked and (key.expires_at is None or time.time() < key.expires_at)


def _unknown() -> Unauthenticated:
    return bad_credential("the API key is not valid")


def _revoked(holder: Principal | None = None) -> Unauthenticated:
    return bad_credential("the API key is revoked", "CREDENTIAL_REVOKED", holder)


_NO_SECRET = HashedSecret(bytes(32))


class ApiKeyReader:
    """Reads API keys."""

    def __init__(self, keys: KeyDirectory, now: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._now = now

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal | None:
        """Return the caller; None where the call has no API key. Raises Unauthenticated or Unavailable.

        An unknown key and a wrong secret are the same to the caller, and take the same time.
        """
        text = bearer(metadata)
        if not text.startswith(PREFIX):
            return None
        parts = split_api_key(text)
        if parts is None:
            raise _unknown()
        key, sha256, now = self._keys.find(parts[0]), hash_of(parts[1]), self._now()
        secrets = key.secrets if key is not None else (_NO_SECRET,)
        same = [secret for secret in secrets if hmac.compare_digest(secret.sha256, sha256)]
        if key is None or not same:
            raise _unknown()
        expires_at = key.ends_at(sha256)
        principal = Principal(
            name=f"key {key.key_id}",
            roles=frozenset({key.role}),
            kind=CredentialKind.API_KEY,
            tenant=key.tenant,
            key_id=key.key_id,
            scopes=key.scopes,
            expires_at=expires_at,
            secret_sha256=sha256,
            subject=f"key {key.key_id}",
        )
        if key.revoked:
            raise _revoked(principal)
        if expires_at is not None and now >= expires_at:
            raise bad_credential("the API key has expired", "CREDENTIAL_EXPIRED", principal)
        self._keys.note_used((key.key_id,))
        return principal
