"""The adapters that every worker of a cell keeps on its device, also workers that start later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from loraplex.queue.v1 import queue_pb2
from redis.asyncio import Redis

from broker.codec import decode_adapter_request, encode_adapter_request
from broker.keys import Keys
from broker.messages import AdapterRef, AdapterRequest
from broker.scripts import SCRIPTS
from broker.seal_kinds import SealError, SealKind

if TYPE_CHECKING:
    from broker.seals import Seals

log = logging.getLogger(__name__)


def is_unpinned_by(pinned: AdapterRef, unpinned: AdapterRef) -> bool:
    """Return whether unpinning one revision unpins the other: the same bytes, or a revision of the same adapter."""
    return pinned.digest == unpinned.digest or _adapter(pinned) == _adapter(unpinned)


def concerns_tenant(request: AdapterRequest, tenant: str) -> bool:
    """Return whether an adapter, or a part of it, is a tenant's, or was requested for the tenant."""
    return request.tenant == tenant or any(is_of_tenant(part.revision, tenant) for part in request.adapter.summands)


def is_of_tenant(revision: str, tenant: str) -> bool:
    """Return whether a revision, by its full name, is of an adapter of a tenant."""
    return revision.startswith(f"tenants/{tenant}/")


def _adapter(ref: AdapterRef) -> str:
    return ref.revision.rpartition("/")[0]


class PinnedAdapters:
    """Pinned adapters in Redis, a hash by digest and tenant; with `seals` each is sealed for its field.

    Tenants that pin the same bytes have a record each.
    """

    def __init__(self, redis: Redis, keys: Keys, seals: Seals | None = None) -> None:
        self._redis = redis
        self._key = keys.pins
        self._seals = seals
        # Certificate and job key with which this process has renewed all pins; None: not yet.
        self._made_with: tuple[int, str] | None = None
        self._renew = SCRIPTS.register(redis, "renew_pin")

    async def pin(self, request: AdapterRequest) -> None:
        """Pin an adapter for a tenant."""
        field = f"{request.adapter.digest} {request.tenant}"
        await self._redis.hset(self._key, field, self._encode(field, request))

    async def unpin(self, ref: AdapterRef) -> None:
        """Unpin an adapter with all its revisions, whoever has pinned it; does nothing if none is pinned."""
        await self._remove(lambda request: is_unpinned_by(request.adapter, ref))

    async def forget_tenant(self, tenant: str) -> int:
        """Unpin the adapters of a tenant, and what was pinned for it alone; return the number of records."""
        return await self._remove(lambda request: concerns_tenant(request, tenant))

    async def _remove(self, goes: Callable[[AdapterRequest], bool]) -> int:
        gone = [field for field, request in await self._records() if goes(request)]
        if gone:
            await self._redis.hdel(self._key, *gone)
        return len(gone)

    async def renew_grants(self, now: Callable[[], float] = time.time) -> None:
        """Give pins new grants whose grants end soon, for workers that start later; all pins with another certificate.

        The former certificate, or the former job key, may end before the grants do.
        """
        if self._seals is None:
            return
        from tenancy.signatures import GRANT_S, left_s

        made_with = self._seals.made_with()
        for field, request in await self._records():
            if made_with != self._made_with or left_s(request.adapter.grant, now()) < GRANT_S / 2:
                await self._renew(self._key, [field, self._encode(field, request)])
        self._made_with = made_with

    async def list(self) -> list[AdapterRequest]:
        """Return all pinned adapters, for each tenant that has pinned it."""
        return [request for _, request in await self._records()]

    async def _records(self) -> Sequence[tuple[str, AdapterRequest]]:
        """Return the fields that can be read, and their pins."""
        found: list[tuple[str, AdapterRequest]] = []
        if self._seals is not None:
            self._seals.look()
        for name, data in (await self._redis.hgetall(self._key)).items():
            assert isinstance(data, bytes), "connect() makes clients of bytes"
            assert isinstance(name, bytes), "connect() makes clients of bytes"
            field = name.decode(errors="replace")
            try:
                request = self._decode(field, data)
            except DecodeError:  # another version wrote it
                log.warning("cannot read a pin of %d bytes", len(data))
                continue
            if request is not None:
                found.append((field, request))
        return found

    def _encode(self, field: str, request: AdapterRequest) -> bytes:
        if self._seals is None:
            return encode_adapter_request(request)
        content = encode_adapter_request(self._seals.granted_request(request))
        return self._seals.seal(SealKind.PIN, self._place(field), content).SerializeToString()

    def _decode(self, field: str, data: bytes) -> AdapterRequest | None:
        """Return a pin; None for one that no router has sealed. Raises DecodeError."""
        if self._seals is None:
            return decode_adapter_request(data)
        try:
            sealed = queue_pb2.Sealed.FromString(data)
            return decode_adapter_request(self._seals.open(SealKind.PIN, self._place(field), sealed))
        except SealError as error:
            self._seals.on_refused(SealKind.PIN, error)
            return None

    def _place(self, field: str) -> str:
        return f"{self._key} {field}"
