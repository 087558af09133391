"""The HTTP client of benchmarks: completions of OpenAI's protocol as events, read by as little as it can."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from bench.relay_load import PROMPT, Load, Setup
from loraplex_client import AsyncClient

# Ends of an answer's headers and of its chunks.
_HEAD_END, _END = b"\r\n\r\n", b"0\r\n\r\n"


class Connection:
    """A connection to an HTTP server, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def answer(self, asked: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Send the body of a request; yield its events as they come, in parts of any length. Raises RuntimeError."""
        body = json.dumps({"stream": True, "temperature": 0, **asked}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-loraplex-tenant: bench\r\n"
        kind = "content-type: application/json\r\n"
        self._writer.write(f"{head}{kind}content-length: {len(body)}\r\n\r\n".encode() + body)
        answered = await self._reader.readuntil(_HEAD_END)
        if not answered.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {answered[:40]!r}")
        tail = b""
        while not tail.endswith(_END):
            data = await self._reader.read(1 << 16)
            if not data:
                raise RuntimeError("the server closed the connection")
            yield data
            tail = (tail + data)[-len(_END) :]

    async def first_token_ms(self, asked: Mapping[str, Any]) -> float:
        """Return the milliseconds to the first event of a request."""
        start = time.perf_counter()
        times = [time.perf_counter() - start async for _ in self.answer(asked)]
        return times[0] * 1e3

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    """Connect to a server at HOST:PORT."""
    host, _, port = address.rpartition(":")
    connection = Connection(*await asyncio.open_connection(host, int(port)))
    try:
        yield connection
    finally:
        connection.close()


class HttpLoad(Load):
    """Streams over HTTP. Tokens are counted as the brackets around their ids: all but one of 125 have them."""

    def __init__(
        self, setup: Setup, step_ms: float, client: AsyncClient, pids: Mapping[str, int], address: str, lone: Connection
    ) -> None:
        super().__init__(setup, step_ms, client, pids)
        self._address = address
        self._lone = lone
        self._asked = {"model": "hash", "prompt": PROMPT, "max_tokens": setup.tokens}

    async def ttfts_ms(self, count: int, pause_ms: float) -> list[float]:
        """Return the milliseconds to the first token of requests in sequence, on one connection."""
        return [await self._lone.first_token_ms({**self._asked, "max_tokens": 1}) for _ in range(count)]

    async def _read(self, started: asyncio.Event) -> None:
        async with connected(self._address) as connection:
            while True:
                async for data in connection.answer(self._asked):
                    self.received += data.count(b"<")
                    started.set()
