"""A client in HTTP/2 by hand, for what gRPC's own never sends: messages whose end does not come."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.rpc.raw_http2 import DATA, HEADERS, RESET, SETTINGS, WINDOW_UPDATE, frame, headers

_WINDOW = 65_535
_PIECE = 16_384


class HalfSent:
    """A connection from `address` whose calls of `path` send all of a message of `size` bytes but its last."""

    def __init__(self, port: int, path: str, size: int, address: str = "127.0.0.1") -> None:
        self._port, self._path, self._size, self._address = port, path, size, address
        self._first = _WINDOW
        self._windows: defaultdict[int, int] = defaultdict(lambda: self._first)
        # Bytes of each call's message, and how many of them were sent, by stream; streams that the server has answered.
        self._lengths: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.answered: set[int] = set()
        self.came = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, local_addr=(self._address, 0)
        )
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, b""))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reading.cancel()
        self._writer.close()

    def call(self) -> int:
        """Begin a call; return its stream."""
        stream = 2 * len(self.sent) + 1
        self._writer.write(frame(HEADERS, headers(self._path), stream, flags=4))
        self._lengths[stream], self.sent[stream] = self._size + 4, 0
        self._push(stream)
        return stream

    def end(self, stream: int) -> None:
        """Send the last byte of a call's message."""
        self._lengths[stream] += 1
        self._push(stream)

    def _push(self, stream: int) -> None:
        while (
            count := min(self._lengths[stream] - self.sent[stream], self._windows[stream], self._windows[0], _PIECE)
        ) > 0:
            length = struct.pack(">BI", 0, self._size)[self.sent[stream] :]
            self._writer.write(frame(DATA, length[:count].ljust(count, b"\0"), stream))
            self.sent[stream] += count
            self._windows[stream] -= count
            self._windows[0] -= count

    async def _read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == SETTINGS and not flags:
                for at in range(0, len(body), 6):
                    name, value = struct.unpack(">HI", body[at : at + 6])
                    self._first = value if name == 4 else self._first
                self._writer.write(frame(SETTINGS, b"", flags=1))
            elif kind == WINDOW_UPDATE:
                self._windows[stream] += int.from_bytes(body, "big")
            elif kind in {HEADERS, RESET}:
                self.answered.add(stream)
            for one in self.unanswered:
                self._push(one)
            self.came.set()

    @property
    def unanswered(self) -> dict[int, int]:
        """Return what was sent of each call that the server has not answered."""
        return {stream: sent for stream, sent in self.sent.items() if stream not in self.answered}

    @property
    def whole(self) -> list[int]:
        """Return these calls of whose messages the last byte alone is missing."""
        return [stream for stream, sent in self.unanswered.items() if sent == self._size + 4]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so, which changes with a frame of the server."""
        async with asyncio.timeout(60):
            while not condition():
                self.came.clear()
                await self.came.wait()
