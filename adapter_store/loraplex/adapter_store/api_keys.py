"""API keys: operators make, rotate and revoke them in the catalog, routers read what has changed.

A tenant's administrator makes, lists and revokes those of its tenant, with no more scopes than it has itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from loraplex.adapter_store import removals
from loraplex.adapter_store.convert import list_page, refusals, seconds_of, timestamp
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Row, Rows
from loraplex.admin.v1 import keys_pb2 as pb
from loraplex.admin.v1 import keys_pb2_grpc
from loraplex.contracts.artifacts.names import SHARED, check_tenant
from loraplex.runtime.rpc.errors import AlreadyExists, Exhausted, InvalidField, Mismatch, NotFound, PermissionDenied
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import TENANT_ROLES, Role, caller, own_tenant
from loraplex.runtime.tenancy.api_keys import (
    KEY_ROLES,
    USED_AT_ONCE,
    HashedKey,
    HashedSecret,
    hash_of,
    new_api_key,
    split_api_key,
)
from loraplex.runtime.tenancy.permissions import SCOPES, Permission

_SECOND_NS = 1_000_000_000
log = logging.getLogger(__name__)

# Time in seconds for which a rotated key's former secret stays valid by default.
GRACE_S = 86_400.0
_LABEL_CHARACTERS = 100
# Maximum number of keys in an answer to a router.
_CHANGES = 1_000
# Maximum number of a tenant's keys that are valid, or ended within a day, when its administrator makes another: routers
# hold all keys, and the catalog keeps those that have ended, so that it grows by no more than this a day.
OWN_KEYS_LIMIT = 1_000
_DAY_NS = 86_400 * _SECOND_NS
_COUNTED = (
    "SELECT count(*) FROM api_keys WHERE tenant = :tenant "
    "AND coalesce(expire_ns, :since + 1) > :since AND coalesce(revoke_ns, :since + 1) > :since"
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the catalog has it. Times are nanoseconds since 1970; None: never, or not yet."""

    key_id: str
    tenant: str
    role: Role
    scopes: frozenset[str]
    label: str
    create_ns: int
    expire_ns: int | None
    revoke_ns: int | None
    change: int
    # The newest first.
    secrets: tuple[HashedSecret, ...]
    last_use_ns: int | None = None

    @property
    def asked(self) -> tuple[object, ...]:
        """Return what its maker asked for, which a request that is repeated has in common with it."""
        life_ns = self.expire_ns and self.expire_ns - self.create_ns
        return self.role, self.scopes, self.label, life_ns, self.revoke_ns, self.secrets[-1].sha256

    @property
    def hashed(self) -> HashedKey:
        """Return what processes need that admit callers with it."""
        expires_at = None if self.expire_ns is None else self.expire_ns / _SECOND_NS
        revoked = self.revoke_ns is not None
        return HashedKey(self.key_id, self.tenant, self.role, self.scopes, expires_at, revoked, self.secrets)


class ApiKeys:
    """The API keys of all tenants. Its calls block: make them in a thread.

    `changed` is called with every new or changed key, before the next one changes.
    """

    def __init__(
        self, database: Database, changed: Callable[[ApiKey], None], now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._database = database
        self._changed = changed
        self._now_ns = now_ns
        # Changes are numbered within an epoch: after a restart, perhaps with an older catalog, readers begin anew.
        self.begin_epoch()
        # When keys were used last, in nanoseconds since 1970, as far as the catalog does not know it yet.
        self._uses = dict[str, int]()

    def begin_epoch(self) -> None:
        """Let readers begin anew, since keys are gone, or are others."""
        self.epoch = secrets.token_hex(8)

    def age_ms(self) -> int:
        """Return the maximum time in milliseconds for which changes at other stores may have been missed."""
        return math.ceil(self._database.age_s() * 1e3)

    def create(
        self,
        tenant: str,
        role: Role,
        scopes: frozenset[str],
        label: str,
        ttl_s: float | None,
        most: int | None = None,
        drawn: tuple[str, bytes] | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; return it, and the whole key with its secret. Raises Exhausted where its tenant has `most`.

        With `drawn`, an id and a secret's SHA-256, a key that is there already is returned, or AlreadyExists raised.
        """
        key_id, text, sha256 = (drawn[0], "", drawn[1]) if drawn else new_api_key()
        now = self._now_ns()
        expire_ns = None if ttl_s is None else now + int(ttl_s * _SECOND_NS)
        key = ApiKey(key_id, tenant, role, scopes, label, now, expire_ns, None, 0, (HashedSecret(sha256),))
        with self._changing() as (rows, changed):
            if (found := _find(rows, key_id)) is None:
                count = rows.execute(_COUNTED, {"tenant": tenant, "since": now - _DAY_NS}).fetchone()[0]
                if most is not None and count >= most:
                    message = f"{tenant} has {count} keys that are valid or ended within a day: ask an operator"
                    raise Exhausted(f"tenants/{tenant}/keys", message, retry_after_s=None, reason="KEYS_FULL")
                rows.execute(
                    "INSERT INTO api_keys (key_id, tenant, role, scopes, label, create_ns, expire_ns, change) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(change), 0) + 1 FROM api_keys))",
                    (key_id, tenant, role.value, " ".join(sorted(scopes)), label, now, expire_ns),
                )
                rows.execute("INSERT INTO api_key_secrets VALUES (?, ?, ?, NULL)", (key_id, sha256, now))
            elif found.asked != key.asked:
                raise AlreadyExists(f"request_id: key {key_id} is of another request, or has changed; draw another id")
            changed.append(found or _get(rows, key_id))
        return changed[0], text

    def bootstrap(self, text: str) -> ApiKey | None:
        """Keep the operator's key of a file; None where it is known. Raises ValueError where the text is no key."""
        parts = split_api_key(text)
        if parts is None:
            raise ValueError("holds no API key; `loraplex keys bootstrap FILE` makes one")
        with self._database.reading() as rows:
            if _find(rows, parts[0]) is not None:
                return None
        drawn = parts[0], hash_of(parts[1])
        return self.create("", Role.OPERATOR, frozenset(), "bootstrap", None, drawn=drawn)[0]

    def rotate(self, key_id: str, grace_s: float, drawn: bytes = b"") -> tuple[ApiKey, str]:
        """Make another secret; the present one stays valid for `grace_s`, those before it end. Raises NotFound.

        Nothing changes where the present one has the SHA-256 `drawn`.
        """
        now = self._now_ns()
        with self._changing() as (rows, changed):
            key = _get(rows, key_id)
            if key.revoke_ns is not None:
                raise Mismatch(f"keys/{key_id}", "is revoked; make another key", reason="KEY_REVOKED")
            if drawn == key.secrets[0].sha256:
                changed.append(key)  # a store that lost the answer of its database has not told of it
                return key, ""
            text, sha256 = ("", drawn) if drawn else new_api_key(key_id)[1:]
            rows.execute(
                "DELETE FROM api_key_secrets WHERE key_id = ? AND sha256 != ?", (key_id, key.secrets[0].sha256)
            )
            rows.execute(
                "UPDATE api_key_secrets SET expire_ns = ? WHERE key_id = ?", (now + int(grace_s * _SECOND_NS), key_id)
            )
            # Later than the former one, though the clock may have been set back: the newest is the present one.
            rows.execute(
                "INSERT INTO api_key_secrets SELECT ?, ?, max(?, max(create_ns) + 1), NULL FROM api_key_secrets "
                "WHERE key_id = ?",
                (key_id, sha256, now, key_id),
            )
            changed.append(_touched(rows, key_id))
        return changed[0], text

    def revoke(self, key_id: str, tenant: str = "") -> ApiKey:
        """End a key, of the tenant if one is given; a revoked one stays as it is. Raises NotFound."""
        with self._changing() as (rows, changed):
            key = _get(rows, key_id)
            if tenant and key.tenant != tenant:
                raise NotFound("key", key_id)
            if key.revoke_ns is not None:
                return key
            rows.execute("UPDATE api_keys SET revoke_ns = ? WHERE key_id = ?", (self._now_ns(), key_id))
            removals.record(rows, removals.KEY, key_id)
            changed.append(_touched(rows, key_id))
        return changed[0]

    def note_used(self, key_ids: Iterable[str]) -> None:
        """Note that callers were admitted with these keys just now; as `save_uses`, on the event loop."""
        self._uses |= dict.fromkeys(key_ids, self._now_ns())

    async def save_uses(self) -> None:
        """Write when keys were used last into the catalog. Raises Exhausted on a full disk."""
        uses = dict(self._uses)
        if uses:
            await asyncio.to_thread(self._write_uses, [(ns, key_id) for key_id, ns in uses.items()])
        self._uses = {key_id: ns for key_id, ns in self._uses.items() if uses.get(key_id) != ns}

    def _write_uses(self, uses: Sequence[tuple[int, str]]) -> None:
        with self._database.transaction() as rows:
            rows.executemany("UPDATE api_keys SET last_use_ns = ? WHERE key_id = ?", uses)

    def purge(self, tenant: str) -> list[str]:
        """Forget the keys of a tenant; returns their ids. Readers begin anew, and so do not have them any more."""
        with self._database.transaction() as rows:
            gone = [row[0] for row in rows.execute("SELECT key_id FROM api_keys WHERE tenant = ?", (tenant,))]
            rows.execute("DELETE FROM api_keys WHERE tenant = ?", (tenant,))
        if gone:
            self.begin_epoch()
        return gone

    def page(self, tenant: str, after: str, limit: int) -> list[ApiKey]:
        """Return keys in order of id, from the first after `after`; of one tenant, if it is given."""
        with self._database.reading() as rows:
            selected = rows.execute(
                "SELECT * FROM api_keys WHERE key_id > ? AND (? = '' OR tenant = ?) ORDER BY key_id LIMIT ?",
                (after, tenant, tenant, limit),
            )
            keys = [_to_key(rows, row) for row in selected.fetchall()]
        uses = self._uses
        return [replace(key, last_use_ns=uses.get(key.key_id, key.last_use_ns)) for key in keys]

    def changes(self, after: int, limit: int) -> list[ApiKey]:
        """Return keys in order of their last change, from the first after that number."""
        with self._database.reading() as rows:
            selected = rows.execute("SELECT * FROM api_keys WHERE change > ? ORDER BY change LIMIT ?", (after, limit))
            return [_to_key(rows, row) for row in selected.fetchall()]

    @contextmanager
    def _changing(self) -> Iterator[tuple[Rows, list[ApiKey]]]:
        """Run a transaction, and tell of the keys that it puts into the list, in the order of the transactions."""
        changed: list[ApiKey] = []
        with self._database.lock:
            with self._database.transaction() as rows:
                yield rows, changed
            for key in changed:
                self._changed(key)


def _touched(rows: Rows, key_id: str) -> ApiKey:
    rows.execute(
        "UPDATE api_keys SET change = (SELECT max(change) + 1 FROM api_keys) WHERE key_id = ?",
        (key_id,),
    )
    return _get(rows, key_id)


def _get(rows: Rows, key_id: str) -> ApiKey:
    key = _find(rows, key_id)
    if key is None:
        raise NotFound("key", key_id)
    return key


def _find(rows: Rows, key_id: str) -> ApiKey | None:
    row = rows.execute("SELECT * FROM api_keys WHERE key_id = ?", (key_id,)).fetchone()
    return None if row is None else _to_key(rows, row)


def _to_key(rows: Rows, row: Row) -> ApiKey:
    secrets = rows.execute(
        "SELECT sha256, expire_ns FROM api_key_secrets WHERE key_id = ? ORDER BY create_ns DESC", (row["key_id"],)
    )
    return ApiKey(
        key_id=row["key_id"],
        tenant=row["tenant"],
        role=Role(row["role"]),
        scopes=frozenset(row["scopes"].split()),
        label=row["label"],
        create_ns=row["create_ns"],
        expire_ns=row["expire_ns"],
        revoke_ns=row["revoke_ns"],
        change=row["change"],
        secrets=tuple(
            HashedSecret(one["sha256"], None if one["expire_ns"] is None else one["expire_ns"] / _SECOND_NS)
            for one in secrets
        ),
        last_use_ns=row["last_use_ns"],
    )


class KeyService(keys_pb2_grpc.KeyServiceServicer):
    """Serves loraplex.admin.v1.KeyService."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        """Make a key for a tenant, an operator or an auditor."""
        role, own = _role(request.role), _own_tenant(request.tenant)
        tenant = own or _tenant(request.tenant, role)
        unknown = sorted(set(request.scopes) - SCOPES)
        if unknown:
            raise InvalidField("scopes", f"{unknown[0]!r} is not one of {', '.join(sorted(SCOPES))}")
        if len(request.label) > _LABEL_CHARACTERS or not request.label.isprintable():
            raise InvalidField("label", f"at most {_LABEL_CHARACTERS} printable characters")
        ttl_s = seconds_of("ttl", request.ttl, least=0.001) if request.HasField("ttl") else None
        scopes = frozenset(request.scopes)
        if own:
            _check_own(role, scopes)
        most = OWN_KEYS_LIMIT if own else None
        # The caller draws the secret of a request that it may repeat: the store has digests alone, and a secret derived
        # from a key of the store and the request's id would be known to whoever reads a backup and a log.
        sha256 = _drawn(request)
        if bool(sha256) != bool(request.request_id) or len(request.request_id) > _LABEL_CHARACTERS:
            raise InvalidField("request_id", f"1 to {_LABEL_CHARACTERS} characters, with secret_sha256")
        drawn = (hash_of(f"{tenant}/{request.request_id}").hex()[:16], sha256) if sha256 else None
        key, text = await asyncio.to_thread(self._keys.create, tenant, role, scopes, request.label, ttl_s, most, drawn)
        _note("made", key)
        return pb.CreateKeyResponse(key=_to_pb(key), api_key=text)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        """Return a page of keys, in order of id, without their secrets."""
        fetch = partial(self._keys.page, _own_tenant(request.tenant) or request.tenant)
        keys, token = await list_page(request, fetch, _to_pb, attrgetter("key_id"))
        return pb.ListKeysResponse(keys=keys, next_page_token=token)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        """End a key for good."""
        key = await asyncio.to_thread(self._keys.revoke, request.key_id, own_tenant())
        _note("revoked", key)
        return pb.RevokeKeyResponse(key=_to_pb(key))

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        """Make another secret of a key; its present one stays valid for the grace."""
        grace_s = seconds_of("grace", request.grace, least=0) if request.HasField("grace") else GRACE_S
        key, text = await asyncio.to_thread(self._keys.rotate, request.key_id, grace_s, _drawn(request))
        _note("rotated", key)
        return pb.RotateKeyResponse(key=_to_pb(key), api_key=text)

    async def ListKeyChanges(self, request: pb.ListKeyChangesRequest, context: Context) -> pb.ListKeyChangesResponse:
        """Return the keys that have changed since the last call, hashed."""
        self._keys.note_used(request.used_key_ids[:USED_AT_ONCE])
        age = Duration()
        age.FromMilliseconds(self._keys.age_ms())  # before the keys are read
        epoch = self._keys.epoch  # a purge may begin another one meanwhile, of which this answer is not
        after = request.after if request.epoch == epoch else 0
        changes = await asyncio.to_thread(self._keys.changes, after, _CHANGES + 1)
        keys = changes[:_CHANGES]
        return pb.ListKeyChangesResponse(
            epoch=epoch,
            latest=keys[-1].change if keys else after,
            more=len(changes) > _CHANGES,
            keys=map(_hashed_to_pb, keys),
            age=age,
        )


def _drawn(request: pb.CreateKeyRequest | pb.RotateKeyRequest) -> bytes:
    if len(request.secret_sha256) not in {0, 32}:
        raise InvalidField("secret_sha256", "32 bytes, the SHA-256 of a secret that you have drawn")
    return request.secret_sha256


def _role(text: str) -> Role:
    role = text or Role.TENANT_USER
    if role not in KEY_ROLES:
        raise InvalidField("role", f"{text!r} is not one of {', '.join(KEY_ROLES)}")
    return Role(role)


def _tenant(tenant: str, role: Role) -> str:
    if role not in TENANT_ROLES:
        if tenant:
            raise InvalidField("tenant", f"leave it out: a key of role {role} belongs to no tenant")
        return ""
    with refusals("tenant"):
        check_tenant(tenant)
    if tenant == SHARED:
        raise InvalidField("tenant", f"{SHARED!r} is reserved: operators change the shared adapters")
    return tenant


def _own_tenant(named: str) -> str:
    """Return the tenant whose keys alone the caller sees, or nothing. Raises PermissionDenied if it names another."""
    if (own := own_tenant()) and named not in {"", own}:
        raise PermissionDenied(f"tenant: the credential is of tenant {own}, not of {named!r}", "OTHER_TENANT")
    return own


def _check_own(role: Role, scopes: frozenset[str]) -> None:
    """Check that a tenant's administrator may make a key of its tenant. Raises PermissionDenied."""
    if role not in TENANT_ROLES:
        raise PermissionDenied(f"role: only operators make keys of role {role}", "ROLE_NOT_PERMITTED")
    own = caller().scopes
    beyond = [scope for scope in sorted(scopes) if not Permission(scope).is_within(own)]
    if beyond or (own and not scopes):
        raise PermissionDenied(f"scopes: give some of your own, {', '.join(sorted(own))}", "SCOPE_NOT_GRANTED")


def _note(what: str, key: ApiKey) -> None:
    """Log who changed which key; never a secret."""
    log.info("%s: %s key %s, %s of %s", caller().name, what, key.key_id, key.role, key.tenant or "the cluster")


def _end_of(secret: HashedSecret) -> Timestamp | None:
    return timestamp(None if secret.expires_at is None else int(secret.expires_at * 1e9))


def _to_pb(key: ApiKey) -> pb.Key:
    return pb.Key(
        key_id=key.key_id,
        tenant=key.tenant,
        role=key.role.value,
        scopes=sorted(key.scopes),
        label=key.label,
        create_time=timestamp(key.create_ns),
        expire_time=timestamp(key.expire_ns),
        revoke_time=timestamp(key.revoke_ns),
        last_use_time=timestamp(key.last_use_ns),
        former_expire_time=_end_of(key.secrets[1]) if len(key.secrets) > 1 else None,
    )


def _hashed_to_pb(key: ApiKey) -> pb.HashedKey:
    return pb.HashedKey(
        key=_to_pb(key),
        secrets=[pb.HashedSecret(sha256=one.sha256, expire_time=_end_of(one)) for one in key.secrets],
    )
