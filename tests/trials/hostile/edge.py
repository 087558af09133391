"""Floods of a few addresses at the proxy in front of a cluster, which neither a quiet tenant nor memory may notice."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx2

from loraplex.cli.local import LocalCluster
from loraplex.runtime.rpc.server import channel_options
from tests.edge_proxy import edge_proxy, listening
from tests.free_ports import free_port
from tests.rpc.half_sent import HalfSent
from tests.rpc.raw_http2 import UnreadingClient
from tests.trials.hostile.cases import INFERENCE, TENANT
from tests.trials.hostile.run import Outcome, send_case
from tests.trials.hostile.uploads import bad_uploads

# Time in seconds after a flood, after which its memory must be free again: clients that left are noticed by then.
SETTLE_S = 5.0
# Pause in seconds of a client that the proxy has refused.
_REFUSED_S = 0.1
# Processor time in seconds that router, gateway, engine and I/O process use for a long echo.
_OF_AN_ECHO_S = (0.35, 0.4, 0.25, 0.2)
_GENERATE = INFERENCE + "Generate"
_LOST = (OSError, asyncio.IncompleteReadError, httpx2.HTTPError)


async def _reset_streams(port: int) -> None:
    """Open calls without a credential, and reset each at once."""
    async with UnreadingClient(port, host="127.0.0.2") as client:
        for stream in range(1, 300_000, 2):
            client.call(stream, _GENERATE)
            client.reset(stream)
            if stream % 20 == 1:
                await client.drain()


async def _half_sent_messages(port: int) -> None:
    """Send all of 4 MB but the last byte, in a thousand calls, of which the proxy takes half."""
    async with AsyncExitStack() as open_:
        for _ in range(100):
            client = await open_.enter_async_context(HalfSent(port, _GENERATE, 4_000_000, "127.0.0.3"))
            for _ in range(10):
                client.call()
        await asyncio.sleep(10)


async def _idle_connections(port: int) -> None:
    """Open connections that send half of their headers."""
    async with AsyncExitStack() as open_:
        for _ in range(2_000):
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.4", 0))
            open_.callback(writer.close)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        await asyncio.sleep(10)


async def _long_echoes(port: int) -> None:
    """Ask for all log probabilities of a long prompt, one after the other."""
    transport = httpx2.AsyncHTTPTransport(local_address="127.0.0.5")
    body = {"model": "hash", "prompt": "echo " * 6_000, "echo": True, "logprobs": 5, "max_tokens": 1}
    async with httpx2.AsyncClient(transport=transport, headers={"x-loraplex-tenant": TENANT}, timeout=60) as client:
        while True:
            await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            await asyncio.sleep(2)


async def processor_time(port: int) -> None:
    """Use as much processor time as long echoes do, in processes that have nothing to do with the cluster.

    What it does to the quiet tenant is the machine's lack of processors alone; more than that is the cluster's.
    """
    burn = "import sys, time\nwhile time.process_time() < float(sys.argv[1]): pass"
    commands = [(sys.executable, "-S", "-c", burn, str(part)) for part in _OF_AN_ECHO_S]
    burning = [await asyncio.create_subprocess_exec(*command) for command in commands]
    await asyncio.gather(*(process.wait() for process in burning))
    await asyncio.sleep(2)


async def _bad_uploads(port: int) -> None:
    """Upload adapters whose files are hostile, ten a second."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        for case in bad_uploads():
            await send_case(channel, case, Outcome())
            await asyncio.sleep(0.1)


FLOODS: Mapping[str, Callable[[int], Awaitable[None]]] = {
    "streams that are reset": _reset_streams,
    "half-sent messages": _half_sent_messages,
    "idle connections": _idle_connections,
    "long echoes": _long_echoes,
    "bad uploads": _bad_uploads,
}


@asynccontextmanager
async def flooded(port: int, flood: Callable[[int], Awaitable[None]]) -> AsyncIterator[None]:
    """Send a flood meanwhile, again and again; refusals are part of it."""

    async def send() -> None:
        while True:
            with suppress(*_LOST):
                await flood(port)
            await asyncio.sleep(_REFUSED_S)

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


@asynccontextmanager
async def behind_edge(cluster: LocalCluster) -> AsyncIterator[tuple[int, Callable[[], dict[str, float]]]]:
    """Run the proxy; yields its port, and what tells the memory of each process in MiB."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    services = {"ROUTERS": cluster.router, "STORES": cluster.store} | (
        {"GATEWAYS": cluster.http} if cluster.http else {}
    )
    async with edge_proxy(EDGE_ADDRESS=address, **services) as proxy:
        await listening(port)
        pids = {"proxy": proxy.pid} | {name: process.pid for name, process in cluster.processes.items()}

        def memory() -> dict[str, float]:
            pages = {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for name, pid in pids.items()}
            return {name: count * 4096 / 2**20 for name, count in pages.items()}

        yield port, memory
