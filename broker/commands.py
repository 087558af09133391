"""Operators' commands to one incarnation of a worker, over a list of its own; not known to be obeyed.

On the list: the verb, and where it is about an adapter a space and the bytes of a queue.v1 Wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_adapter_request, encode_adapter_request
from broker.keys import Keys
from broker.messages import AdapterRequest

# So long a command waits for its worker.
COMMAND_TTL_MS = 30_000


class Verb(StrEnum):
    """What an operator asks of a worker; all but the first are about an adapter."""

    DRAIN = "drain"
    # Bring it to the device.
    WARM = "warm"
    # The same, and keep it there.
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Command:
    """One command; `request` names its adapter, None for a drain."""

    verb: Verb
    request: AdapterRequest | None = None


DRAIN = Command(Verb.DRAIN)


def encode_command(command: Command) -> bytes:
    """A command's bytes."""
    verb = command.verb.value.encode()
    return verb if command.request is None else verb + b" " + encode_adapter_request(command.request)


def decode_command(data: bytes) -> Command | None:
    """What `encode_command` wrote; None where it is another version's."""
    name, _, about = data.partition(b" ")
    try:
        verb = Verb(name.decode())
        if verb is Verb.DRAIN:
            return DRAIN
        return Command(verb, decode_adapter_request(about)) if about else None
    except (ValueError, DecodeError):
        return None


class CommandQueue:
    """The commands of one cell's workers."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def send(self, incarnation: str, command: Command) -> None:
        """Tell a worker; it hears of it at once while it lives."""
        key = self._keys.commands(incarnation)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(key, encode_command(command))
            pipe.pexpire(key, COMMAND_TTL_MS)
            await pipe.execute()

    async def next(self, incarnation: str, timeout_s: float) -> Command | None:
        """The next command, or None when none came in that time or it is another version's."""
        answer = await self._redis.blpop([self._keys.commands(incarnation)], timeout=timeout_s)
        if answer is None:
            return None
        data = answer[1]
        assert isinstance(data, bytes), "connect() makes clients of bytes"
        return decode_command(data)
