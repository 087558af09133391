"""Two router processes behind one port: connections reach both, a killed one is replaced, a stop drains both."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient, AsyncGenerationStream, Generation
from tests.e2e.conftest import TENANT
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=10"
# Of streams that outlive a kill, and of those that end within a drain.
LONG, SHORT = 120, 30
# Connections of which each process has one, but for one in 2**21 runs.
CLIENTS = 22


class Clients:
    """Clients with a connection and a stream each."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.clients = list[AsyncClient]()
        self.streams = list[tuple[AsyncGenerationStream, int]]()

    async def add(self, tokens: int) -> None:
        """Open another connection, and a stream that has its first token."""
        client = AsyncClient(self._address, TENANT)
        self.clients.append(client)
        stream = client.generate_stream(f"client {len(self.clients)}", max_tokens=tokens)
        self.streams.append((stream, tokens))
        await anext(stream)

    async def whole(self) -> list[Generation]:
        """The answers, which must be the oracle's."""
        answers = await asyncio.gather(*(stream.result() for stream, _ in self.streams))
        for number, (answer, (_, tokens)) in enumerate(zip(answers, self.streams, strict=True), 1):
            truth = expected_ids(MODEL, list(f"client {number}".encode()), stopping=StoppingParams(max_tokens=tokens))
            assert list(answer.token_ids) == list(truth)
        await asyncio.gather(*(client.close() for client in self.clients))
        return answers


def process_ids(log: str) -> dict[str, int]:
    """The router processes by name, as the supervisor's log has them."""
    return {name: int(pid) for name, pid in re.findall(r"router\.processes: (router-\d) starts as process (\d+)", log)}


async def test_two_processes_serve_one_port_until_the_last_drain(start_cluster: StartCluster, eventually: Any) -> None:
    flags = ("--rows", "64")
    async with start_cluster(MODEL, {}, worker_flags=flags, router_flags=("--processes", "2")) as cluster:
        local = cluster.local
        supervisor, log = local.processes["router-1"], local.data_dir / "logs" / "router-1.log"
        ready = await supervisor.wait_ready()
        assert (ready["processes"], len(ready["metrics"].split(","))) == ("2", 2)
        first = process_ids(log.read_text())
        assert first.keys() == {"router-1", "router-2"}

        clients = Clients(local.router)
        await asyncio.gather(*(clients.add(LONG) for _ in range(CLIENTS)))
        os.kill(first["router-2"], signal.SIGKILL)
        answers = await clients.whole()
        assert 0 < sum(answer.continuations > 0 for answer in answers) < len(answers)

        async def replaced() -> bool:
            return len(re.findall(r" router-2 loraplex\.router\.app: serves$", log.read_text(), re.MULTILINE)) == 2

        await eventually(replaced)
        second = process_ids(log.read_text())
        assert second["router-1"] == first["router-1"]
        assert second["router-2"] != first["router-2"]
        assert "router-2 was killed by SIGKILL; it starts again in 0.5 s" in log.read_text()

        clients = Clients(local.router)
        await asyncio.gather(*(clients.add(SHORT) for _ in range(4)))
        for pid in second.values():  # as where all processes of a service get the signal
            os.kill(pid, signal.SIGTERM)
        local.kill("router-1", signal.SIGTERM)
        assert not any(answer.continuations for answer in await clients.whole())
        assert await supervisor.exited == 0


async def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # even where its user would share it
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        flags = ("--port", port, "--processes", "2", "--store", "127.0.0.1:1", "--redis-url", "redis://127.0.0.1:1")
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loraplex.router", *flags), stderr=asyncio.subprocess.PIPE
        )
        assert router.stderr is not None
        said = await router.stderr.read()
        assert await router.wait() == 2
    assert said.decode() == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
