"""Operators' commands to an incarnation of a worker, over a list of its own. Commands are not acknowledged.

An entry of the list is the verb; if it concerns an adapter, a space and the bytes of a queue.v1 Wanted follow. With
credentials all of that is sealed for the one list: the entry is `sealed`, a space, and the bytes of a queue.v1 Sealed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from loraplex.queue.v1 import queue_pb2
from redis.asyncio import Redis

from broker.codec import decode_adapter_request, encode_adapter_request
from broker.keys import Keys
from broker.messages import AdapterRequest
from broker.scripts import SCRIPTS
from broker.seal_kinds import SealError, SealKind

if TYPE_CHECKING:
    from broker.seals import Seals

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
_SEALED = b"sealed "


def encode_command(command: Command) -> bytes:
    """Encode a command."""
    verb = command.verb.value.encode()
    return verb if command.request is None else verb + b" " + encode_adapter_request(command.request)


def decode_command(data: bytes) -> Command | None:
    """Decode a command; None if another version wrote it."""
    name, _, about = data.partition(b" ")
    try:
        verb = Verb(name.decode())
        if verb is Verb.DRAIN:
            return DRAIN
        return Command(verb, decode_adapter_request(about)) if about else None
    except (ValueError, DecodeError):
        return None


class CommandQueue:
    """Commands to the workers of a cell."""

    def __init__(self, redis: Redis, keys: Keys, seals: Seals | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._seals = seals
        self._send = SCRIPTS.register(redis, "send_command")

    async def send(self, incarnation: str, command: Command) -> None:
        """Send a command; a live worker receives it at once. Of more than COMMANDS_LIMIT the oldest are dropped."""
        key = self._keys.commands(incarnation)
        entry = encode_command(command) if self._seals is None else _seal(self._seals, key, command)
        arguments: list[bytes | int] = [entry, COMMANDS_LIMIT, COMMAND_TTL_MS]
        await self._send(key, arguments)

    async def next(self, incarnation: str, timeout_s: float) -> Command | None:
        """Return the next command; None if none came in that time, or one that another version or nobody has sent."""
        key = self._keys.commands(incarnation)
        if self._seals is not None:
            self._seals.look()
        answer = await self._redis.blpop([key], timeout=timeout_s)
        if answer is None:
            return None
        data = answer[1]
        assert isinstance(data, bytes), "connect() makes clients of bytes"
        return decode_command(data) if self._seals is None else _open(self._seals, key, data)


def _seal(seals: Seals, key: str, command: Command) -> bytes:
    if command.request is not None:
        command = replace(command, request=seals.granted_request(command.request))
    return _SEALED + seals.seal(SealKind.COMMAND, key, encode_command(command)).SerializeToString()


def _open(seals: Seals, key: str, data: bytes) -> Command | None:
    try:
        if not data.startswith(_SEALED):
            raise SealError("UNSEALED", "a command without a seal")
        sealed = queue_pb2.Sealed.FromString(data.removeprefix(_SEALED))
        return decode_command(seals.open(SealKind.COMMAND, key, sealed))
    except SealError as error:
        seals.on_refused(SealKind.COMMAND, error)
    except DecodeError:
        seals.on_refused(SealKind.COMMAND, SealError("UNSEALED", "a command that is no message"))
    return None
