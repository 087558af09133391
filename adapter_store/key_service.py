"""KeyService over gRPC: operators make, rotate and revoke API keys, routers read what has changed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from loraplex.admin.v1 import keys_pb2 as pb
from loraplex.admin.v1 import keys_pb2_grpc

from adapter_store.api_keys import ApiKey, ApiKeys
from adapter_store.convert import refusals, seconds_of, timestamp
from adapter_store.pages import decode_token, encode_token, page_size
from artifacts.names import SHARED, check_tenant
from rpc.errors import InvalidField
from rpc.identity.api_keys import KEY_ROLES, HashedSecret
from rpc.identity.permissions import SCOPES
from rpc.identity.principal import TENANT_ROLES, Role, caller

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
# Time in seconds for which a rotated key's former secret stays valid by default.
GRACE_S = 86_400.0
_LABEL_CHARACTERS = 100
# Maximum number of keys in an answer to a router.
_CHANGES = 1_000


class KeyService(keys_pb2_grpc.KeyServiceServicer):
    """Serves loraplex.admin.v1.KeyService."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        """Make a key for a tenant, an operator or an auditor."""
        role = _role(request.role)
        tenant = _tenant(request.tenant, role)
        unknown = sorted(set(request.scopes) - SCOPES)
        if unknown:
            raise InvalidField("scopes", f"{unknown[0]!r} is not one of {', '.join(sorted(SCOPES))}")
        if len(request.label) > _LABEL_CHARACTERS or not request.label.isprintable():
            raise InvalidField("label", f"at most {_LABEL_CHARACTERS} printable characters")
        ttl_s = seconds_of("ttl", request.ttl, least=0.001) if request.HasField("ttl") else None
        scopes = frozenset(request.scopes)
        key, text = await asyncio.to_thread(self._keys.create, tenant, role, scopes, request.label, ttl_s)
        _note("made", key)
        return pb.CreateKeyResponse(key=_to_pb(key), api_key=text)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        """Return a page of keys, in order of id, without their secrets."""
        size = page_size(request.page_size)
        after = decode_token(request.page_token, first=("",))[0]
        found = await asyncio.to_thread(self._keys.page, request.tenant, after, size + 1)
        token = encode_token((found[size - 1].key_id,)) if len(found) > size else ""
        return pb.ListKeysResponse(keys=map(_to_pb, found[:size]), next_page_token=token)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        """End a key for good."""
        key = await asyncio.to_thread(self._keys.revoke, request.key_id)
        _note("revoked", key)
        return pb.RevokeKeyResponse(key=_to_pb(key))

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        """Make another secret of a key; its present one stays valid for the grace."""
        grace_s = seconds_of("grace", request.grace, least=0) if request.HasField("grace") else GRACE_S
        key, text = await asyncio.to_thread(self._keys.rotate, request.key_id, grace_s)
        _note("rotated", key)
        return pb.RotateKeyResponse(key=_to_pb(key), api_key=text)

    async def ListKeyChanges(self, request: pb.ListKeyChangesRequest, context: Context) -> pb.ListKeyChangesResponse:
        """Return the keys that have changed since the last call, hashed."""
        epoch = self._keys.epoch  # a purge may begin another one meanwhile, of which this answer is not
        after = request.after if request.epoch == epoch else 0
        found = await asyncio.to_thread(self._keys.changes, after, _CHANGES + 1)
        keys = found[:_CHANGES]
        return pb.ListKeyChangesResponse(
            epoch=epoch,
            latest=keys[-1].change if keys else after,
            more=len(found) > _CHANGES,
            keys=map(_hashed_to_pb, keys),
        )


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
        former_expire_time=_end_of(key.secrets[1]) if len(key.secrets) > 1 else None,
    )


def _hashed_to_pb(key: ApiKey) -> pb.HashedKey:
    return pb.HashedKey(
        key=_to_pb(key),
        secrets=[pb.HashedSecret(sha256=one.sha256, expire_time=_end_of(one)) for one in key.secrets],
    )
