"""The load of bench.gateway: streams of OpenAI's completions, read by a client that does as little as it can."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping

from loraplex_client import AsyncClient

from bench.relay_load import PROMPT, Load, Setup

# Ends of an answer's headers, of its last event, and of its chunks.
_HEAD_END, _DONE, _END = b"\r\n\r\n", b"data: [DONE]\n\n", b"0\r\n\r\n"


class HttpLoad(Load):
    """Streams over HTTP. Tokens are counted as the brackets around their ids: all but one of 125 have them."""

    def __init__(
        self, setup: Setup, step_ms: float, client: AsyncClient, pids: Mapping[str, int], address: str
    ) -> None:
        super().__init__(setup, step_ms, client, pids)
        self._host, _, self._port = address.rpartition(":")
        self._tokens = setup.tokens
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ttfts_ms(self, count: int, pause_ms: float) -> list[float]:
        """Return the milliseconds to the first token of requests in sequence, on one connection."""
        if self._kept is None:
            self._kept = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._kept
        times = []
        for _ in range(count):
            start = time.perf_counter()
            writer.write(_request(1))
            _check(await reader.readuntil(_HEAD_END))
            await reader.readuntil(b"data: ")
            times.append((time.perf_counter() - start) * 1e3)
            await reader.readuntil(_DONE)
            await reader.readuntil(_END)
        return times

    def close(self) -> None:
        """Close the connection of the requests in sequence."""
        if self._kept is not None:
            self._kept[1].close()

    async def _read(self, started: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            while True:
                writer.write(_request(self._tokens))
                _check(await reader.readuntil(_HEAD_END))
                tail = b""
                while not tail.endswith(_END):
                    data = await reader.read(1 << 16)
                    if not data:
                        raise RuntimeError("the gateway closed the connection")
                    self.received += data.count(b"<")
                    started.set()
                    tail = (tail + data)[-len(_END) :]
        finally:
            writer.close()


def _request(tokens: int) -> bytes:
    body = {"model": "hash", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-loraplex-tenant: bench\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _check(head: bytes) -> None:
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the gateway answered {head[:40]!r}")
