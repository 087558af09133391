"""An empty streaming call over grpc.aio, to a server in its own process: the unit that bench.relay compares with.

python -m bench.empty_call      serves until its standard input closes; prints its port
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvloop

METHOD = "/bench.EmptyCall/Stream"


class EmptyCalls:
    """A client of the server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = channel.unary_stream(METHOD)

    async def first_message_ms(self) -> float:
        """Return the milliseconds from a call to its one, empty message."""
        start = time.perf_counter()
        took = [time.perf_counter() - start async for _ in self._call(b"")]
        return took[0] * 1e3


@asynccontextmanager
async def empty_calls() -> AsyncIterator[EmptyCalls]:
    """Start the server, and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.empty_call"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield EmptyCalls(channel)
    finally:
        process.stdin.close()
        await process.wait()


async def _stream(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    yield b""


async def _serve() -> None:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Stream": grpc.unary_stream_rpc_method_handler(_stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.EmptyCall", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(_serve())
