"""Every process but Redis is stopped and started again under load, one after the other: no request fails.

One worker gets a signal, the other is drained by `loraplex drain`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient
from tests.hash_oracle import expected_ids

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=50"
CLIENTS = 8
# Those of two clients end while their worker or router drains; of the long ones of the others some move.
SHORT, LONG = (2, 6), 60


class Load:
    """Clients that ask one request after the other until told to stop; every answer is looked at."""

    def __init__(self, client: AsyncClient, digests: Mapping[str, str]) -> None:
        self._client = client
        self._digests = digests
        self._stop = False
        self._changed = asyncio.Condition()
        self.answers = 0
        self._long_begun = 0
        self.continuations = 0
        self.tasks = [asyncio.create_task(self._ask_on_and_on(number)) for number in range(CLIENTS)]

    async def _ask_on_and_on(self, number: int) -> None:
        turn = 0
        while not self._stop:
            turn += 1
            prompt, name = f"client {number} turn {turn}", "abc"[turn % 3]
            length = SHORT[turn % 2] if number < 2 else LONG
            stream = self._client.generate_stream(prompt, adapter_id=name, max_tokens=length)
            await anext(stream)
            async with self._changed:
                self._long_begun += length == LONG
                self._changed.notify_all()
            whole = await stream.result()
            stopping = StoppingParams(max_tokens=length)
            truth = expected_ids(MODEL, list(prompt.encode()), adapter_digest=self._digests[name], stopping=stopping)
            assert list(whole.token_ids) == list(truth)
            async with self._changed:
                self.answers += 1
                self.continuations += whole.continuations
                self._changed.notify_all()

    async def more(self, count: int) -> None:
        """Wait for so many more answers. Raises what a client got instead of one."""
        target = self.answers + count
        await self._until(lambda: self.answers >= target)

    async def long_begins(self) -> None:
        """Wait for a long answer's first token. Raises as `more` does."""
        target = self._long_begun + 1
        await self._until(lambda: self._long_begun >= target)

    async def _until(self, reached: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(reached)

        waiting = asyncio.create_task(wait())
        async with asyncio.timeout(60):
            done, _ = await asyncio.wait({waiting, *self.tasks}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in done:
            task.result()

    async def end(self) -> None:
        """Let the last requests end."""
        self._stop = True
        await asyncio.gather(*self.tasks)


async def test_a_rolling_restart_of_everything_fails_no_request(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ROUTER_DRAIN_S", "0.5")
    monkeypatch.setenv("LORAPLEX_ROUTER_RESUME_KEY", "")  # the routers have the one that they keep in Redis
    flags = ("--rows", "16", "--drain-s", "0.5")
    async with start_cluster(MODEL, hash_adapters, workers=2, routers=2, worker_flags=flags) as cluster:
        local = cluster.local
        async with AsyncClient(",".join(local.routers), "acme") as client:
            load = Load(client, cluster.digests)
            await load.more(CLIENTS)
            successors = [await local.start_worker() for _ in range(2)]
            for name in ("router-1", "router-2", "store"):
                await load.long_begins()
                local.kill(name, signal.SIGTERM)
                assert await local.processes[name].exited == 0
                await local.restart(name)
                await local.wait_serving()
            assert all(local.processes[successor].is_ready for successor in successors)
            await load.long_begins()
            local.kill("worker-1", signal.SIGTERM)
            assert await local.processes["worker-1"].exited == 0
            pid = local.processes["worker-2"].pid
            (worker,) = [worker.worker_id for worker in await cluster.workers() if worker.pid == pid]
            await load.long_begins()
            drained = await asyncio.to_thread(
                CliRunner().invoke, app, ["drain", worker, "--router", cluster.local.router]
            )
            assert drained.exit_code == 0, drained.output
            assert await local.processes["worker-2"].exited == 0
            await load.more(CLIENTS)
            await load.end()
        print(f"{load.answers} answers, {load.continuations} continuations")
        assert load.continuations > 0
