"""The messages between a worker's two processes, over a socket pair: length (4 bytes, little endian), msgpack.

I/O process                        engine process
    │  Configure, then Add, Abort; Warm, Pin, Unpin, ForgetTenant, FollowBlocks  ──▶
    │  ◀── Ready | Unusable, then Begun, PromptLogprobsPart, Stepped, Refused, Loaded, TenantForgotten, Compiling,
    │      BlockChanges
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from loraplex.contracts.options import TokenLogprobs
from loraplex.worker.engine_api import (
    AdapterSource,
    CachedBlock,
    CaptureFailedError,
    EngineConfig,
    EngineLimits,
    EngineStats,
    NewSequence,
    Output,
    Removal,
)

_LENGTH = struct.Struct("<I")


class Configure(msgspec.Struct, frozen=True, tag=True):
    """Build this engine: the first message."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Take these sequences."""

    sequences: list[NewSequence]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget these sequences."""

    sequence_ids: list[str]


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter into a slot, as soon as one is free or has an adapter that no sequence waits for."""

    adapter: AdapterSource


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter into a slot, and never evict it."""

    adapter: AdapterSource


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """Allow that an adapter is evicted again; unknown digests are ignored."""

    digest: str


class ForgetTenant(msgspec.Struct, frozen=True, tag=True):
    """Remove what is cached of a tenant, and the adapters that are not kept; the answer is TenantForgotten."""

    tenant: str
    kept_adapters: frozenset[str]


class TenantForgotten(msgspec.Struct, frozen=True, tag=True):
    """The engine has carried out a ForgetTenant; the removals by place."""

    removals: dict[str, Removal]


class FollowBlocks(msgspec.Struct, frozen=True, tag=True):
    """Tell of all blocks of the prefix cache, and then of every change; or, with `on` unset, no more."""

    on: bool


class BlockChanges(msgspec.Struct, frozen=True, tag=True):
    """Changes of the prefix cache: the keys of blocks that it has lost, then blocks that it has got.

    `begins`: a list of all blocks begins with this message, in which blocks may come that were told of before.
    `complete`: all that have come until now were told of.
    """

    removed: list[int]
    stored: list[CachedBlock]
    begins: bool
    complete: bool


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A Warm or Pin has been carried out; with `error` it failed, and a pin that was `refused` is none."""

    digest: str
    error: str = ""
    refused: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; the engine takes sequences within these limits."""

    limits: EngineLimits
    stats: EngineStats


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """The model can't be served; `message` is one line that says why and what to do.

    `without_graphs`: another engine may serve it, without CUDA graphs.
    """

    message: str
    without_graphs: bool = False

    @classmethod
    def of(cls, error: Exception) -> Unusable:
        """Return what an error says."""
        return cls(str(error), isinstance(error, CaptureFailedError))


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine did not take a sequence."""

    sequence_id: str
    field: str
    message: str


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The next step is the first to compute this sequence: an engine that dies now may have died of it."""

    sequence_id: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The outputs of a step, or only stats: after an abort, and now and then from an idle engine, as a sign of life."""

    outputs: list[Output]
    stats: EngineStats


class Compiling(msgspec.Struct, frozen=True, tag=True):
    """The step compiles a kernel, for seconds: until the next message the engine is silent, and lives."""


class PromptLogprobsPart(msgspec.Struct, frozen=True, tag=True):
    """The next log probabilities of a sequence's prompt; its first output follows the last of them."""

    sequence_id: str
    tokens: tuple[TokenLogprobs, ...]


# Maximum number of prompt tokens whose log probabilities one message has. The I/O process reads each message in one
# turn of its event loop: so many, with 20 alternatives each, take it some 6 ms.
PROMPT_TOKENS = 512


def step_messages(outputs: list[Output], stats: EngineStats) -> Iterator[PromptLogprobsPart | Stepped]:
    """Yield the messages of a step; Stepped is the last, and has no log probabilities of prompts."""
    for output in outputs:
        for start in range(0, len(output.prompt_logprobs), PROMPT_TOKENS):
            yield PromptLogprobsPart(output.sequence_id, output.prompt_logprobs[start : start + PROMPT_TOKENS])
    yield Stepped(
        [replace(output, prompt_logprobs=()) if output.prompt_logprobs else output for output in outputs], stats
    )


ToEngine = Configure | Add | Abort | Warm | Pin | Unpin | ForgetTenant | FollowBlocks
FromEngine = (
    Ready
    | Unusable
    | Refused
    | Loaded
    | TenantForgotten
    | Begun
    | PromptLogprobsPart
    | Stepped
    | Compiling
    | BlockChanges
)

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return a message with its length in front."""
    return frame(_encoder.encode(message))


def frame(body: bytes) -> bytes:
    """Return a message's body with its length in front."""
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Splits a stream of bytes into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Yield the bodies that `data` completes."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


class EngineEnd:
    """The engine process's end of the socket: reads without blocking while there is work, sends whole messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._splitter = Splitter()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def receive(self, *, wait_s: float) -> list[ToEngine] | None:
        """Return the messages that have arrived; None: the other end is gone.

        Waits up to `wait_s` seconds for bytes or for `wake`.
        """
        ready = {key.fileobj for key, _ in self._selector.select(wait_s)}
        if self._woken in ready:
            self._woken.recv(1 << 12)
        if self.socket not in ready:
            return []
        data = self.socket.recv(1 << 18)
        if not data:
            return None
        return [to_engine_decoder.decode(body) for body in self._splitter.feed(data)]

    def wake(self) -> None:
        """End a `receive` that waits, or else the next one. May be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            self._waker.send(b"\0")

    def send(self, message: FromEngine) -> None:
        """Send a whole message. Raises OSError when the other end is gone."""
        self.socket.sendall(encode(message))

    def close(self) -> None:
        """Close all sockets."""
        self._selector.close()
        for sock in (self.socket, self._woken, self._waker):
            sock.close()
