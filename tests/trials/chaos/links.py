"""A TCP proxy whose connections can be cut, held up in one direction, or delayed; all of them are one link.

caller ──up──▶ Link ──▶ target, or whom the caller names with HTTP CONNECT (as gRPC does under grpc_proxy)
       ◀─down──
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import Self


class Way(StrEnum):
    """A direction, as the caller sees it."""

    UP = "up"
    DOWN = "down"


class Link:
    """`target` is HOST:PORT or the path of a Unix socket, and may be changed; None: the callers say it."""

    def __init__(self, target: str | None) -> None:
        self.target = target
        # Pieces that were held up or delayed, so far.
        self.disturbed = 0
        self._refuses = False
        # Targets to which no connection is made.
        self._refused: set[str] = set()
        self._delay_s = 0.0
        self._open = {way: asyncio.Event() for way in Way}
        for gate in self._open.values():
            gate.set()
        # Both ends of each connection, with its target.
        self._writers: dict[asyncio.StreamWriter, str] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    @property
    def address(self) -> str:
        """Return the address that callers use."""
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """End everything."""
        self._server.close()
        self.cut()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> int:
        """Break every connection and refuse new ones until `heal`; how many were broken."""
        self._refuses = True
        count = len(self._writers) // 2
        for writer in self._writers:
            writer.transport.abort()
        return count

    @property
    def targets(self) -> set[str]:
        """Return the targets of the open connections."""
        return set(self._writers.values())

    def cut_target(self, target: str) -> int:
        """Break the connections to one target and refuse new ones until `heal`; how many were broken."""
        self._refused.add(target)
        broken = [writer for writer, to in self._writers.items() if to == target]
        for writer in broken:
            writer.transport.abort()
        return len(broken) // 2

    def heal(self) -> None:
        """Let everything pass again, also what was held up."""
        self._refuses = False
        self._refused.clear()
        self._delay_s = 0.0
        for gate in self._open.values():
            gate.set()

    def hold(self, way: Way) -> None:
        """Stop this direction until `heal`; TCP repeats it then, so nothing is lost."""
        self._open[way].clear()

    def delay(self, seconds: float) -> None:
        """Each piece comes so much later."""
        self._delay_s = seconds

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            return
        target = self.target or await _named_target(reader)
        if target in self._refused:
            return
        async with self._connected(target, writer) as (other_reader, other_writer):
            if self._refuses or target in self._refused:
                return
            ends = {writer: target, other_writer: target}
            self._writers |= ends
            try:
                await asyncio.gather(
                    self._copy(reader, other_writer, Way.UP), self._copy(other_reader, writer, Way.DOWN)
                )
            finally:
                for end in ends:
                    del self._writers[end]

    @asynccontextmanager
    async def _connected(
        self, target: str, writer: asyncio.StreamWriter
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        if "/" in target:
            other_reader, other_writer = await asyncio.open_unix_connection(target)
        else:
            host, _, port = target.rpartition(":")
            other_reader, other_writer = await asyncio.open_connection(host, int(port))
        try:
            if self.target is None:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            yield other_reader, other_writer
        finally:
            other_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        with suppress(OSError, RuntimeError):  # uvloop's word for a transport that was closed
            while data := await reader.read(1 << 16):
                if not self._open[way].is_set():
                    self.disturbed += 1
                    await self._open[way].wait()
                if self._delay_s:
                    self.disturbed += 1
                    await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


async def _named_target(reader: asyncio.StreamReader) -> str:
    """Return the target that a caller names with HTTP CONNECT."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split()[1].decode()
