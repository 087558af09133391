"""Operators' commands to an incarnation of a worker, over a list of its own, and the adapters that all workers keep.

Commands are not acknowledged. An entry of the list is the verb; if it concerns an adapter, a space and the bytes of a
queue.v1 Wanted follow. With credentials all of that is sealed for the one list: the entry is `sealed`, a space, and the
bytes of a queue.v1 Sealed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from msgspec import DecodeError
from redis.asyncio import Redis

from loraplex.contracts.broker.functions import LIBRARY
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import (
    SEALED,
    AdapterRef,
    AdapterRequest,
    SealKind,
    decode_record,
    encode_record,
)

if TYPE_CHECKING:  # seals load cryptography
    from loraplex.contracts.broker.seals import Seals

log = logging.getLogger(__name__)

# Time in ms that a command waits for its worker, and maximum number of commands that wait for one.
COMMAND_TTL_MS = 30_000
COMMANDS_LIMIT = 256


class Verb(StrEnum):
    """An operator's command; all but the first concern an adapter."""

    DRAIN = "drain"
    # Load the adapter onto the device.
    WARM = "warm"
    # Load the adapter onto the device and keep it there.
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its adapter, None for a drain."""

    verb: Verb
    request: AdapterRequest | None = None


DRAIN = Command(Verb.DRAIN)


def encode_command(command: Command) -> bytes:
    """Encode a command."""
    verb = command.verb.value.encode()
    return verb if command.request is None else verb + b" " + encode_record(command.request)


def decode_command(data: bytes) -> Command | None:
    """Decode a command; None if another version wrote it."""
    name, _, about = data.partition(b" ")
    try:
        verb = Verb(name.decode())
        if verb is Verb.DRAIN:
            return DRAIN
        return Command(verb, decode_record(AdapterRequest, about)) if about else None
    except (ValueError, DecodeError):
        return None


class CommandQueue:
    """Commands to the workers of a cell."""

    def __init__(self, redis: Redis, keys: Keys, seals: Seals | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._seals = seals

    async def send(self, incarnation: str, command: Command) -> None:
        """Send a command; a live worker receives it at once. Of more than COMMANDS_LIMIT the oldest are dropped."""
        key = self._keys.commands(incarnation)
        if self._seals is None:
            entry = encode_command(command)
        else:
            if command.request is not None:
                command = replace(command, request=self._seals.granted_request(command.request))
            entry = SEALED + encode_record(self._seals.seal(SealKind.COMMAND, key, encode_command(command)))
        await LIBRARY.function(self._redis, "send_command")(key, [entry, COMMANDS_LIMIT, COMMAND_TTL_MS])

    async def next(self, incarnation: str, timeout_s: float) -> Command | None:
        """Return the next command; None if none came in that time, or its version or signature is unknown."""
        key = self._keys.commands(incarnation)
        if self._seals is not None:
            self._seals.look()
        answer: Any = await self._redis.blpop([key], timeout=timeout_s)
        if answer is None:
            return None
        data: bytes = answer[1]
        if self._seals is None:
            return decode_command(data)
        sealed = data.removeprefix(SEALED) if data.startswith(SEALED) else None
        content = self._seals.open_or_refuse(SealKind.COMMAND, key, sealed)
        return None if content is None else decode_command(content)


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

    async def pin(self, request: AdapterRequest) -> None:
        """Pin an adapter for a tenant."""
        field = f"{request.adapter.digest} {request.tenant}"
        await self._redis.hset(self._key, field, self._encode(field, request))

    async def unpin(self, ref: AdapterRef) -> None:
        """Unpin all revisions of an adapter; does nothing if none is pinned."""
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
        from loraplex.runtime.tenancy.signatures import GRANT_S, left_s

        renew, made_with = LIBRARY.function(self._redis, "renew_pin"), self._seals.made_with()
        for field, request in await self._records():
            if made_with != self._made_with or left_s(request.adapter.grant, now()) < GRANT_S / 2:
                await renew(self._key, [field, self._encode(field, request)])
        self._made_with = made_with

    async def list(self) -> list[AdapterRequest]:
        """Return all pinned adapters, for each tenant that has pinned it."""
        return [request for _, request in await self._records()]

    async def _records(self) -> Sequence[tuple[str, AdapterRequest]]:
        """Return the fields that can be read, and their pins."""
        records: list[tuple[str, AdapterRequest]] = []
        if self._seals is not None:
            self._seals.look()
        entries = cast(dict[bytes, bytes], await self._redis.hgetall(self._key))  # connect() makes clients of bytes
        for name, data in entries.items():
            field = name.decode(errors="replace")
            content: bytes | None = data
            if self._seals is not None:
                content = self._seals.open_or_refuse(SealKind.PIN, self._place(field), data)
            if content is None:
                continue
            try:
                records.append((field, decode_record(AdapterRequest, content)))
            except DecodeError:  # another version wrote it
                log.warning("cannot read a pin of %d bytes", len(data))
        return records

    def _encode(self, field: str, request: AdapterRequest) -> bytes:
        if self._seals is None:
            return encode_record(request)
        content = encode_record(self._seals.granted_request(request))
        return encode_record(self._seals.seal(SealKind.PIN, self._place(field), content))

    def _place(self, field: str) -> str:
        return f"{self._key} {field}"
