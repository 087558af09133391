"""Workers that are told to stop while they work: whole answers, exact ids, exit code 0, and an end within the grace."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from loraplex.cluster.v1 import cluster_pb2
from typer.testing import CliRunner

from clients.cli.app import app
from worker.engine.hash_engine import expected_ids
from worker.engine_api import Stopping

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=30"


def expected(prompt: str, count: int) -> list[int]:
    return list(expected_ids(MODEL, list(prompt.encode()), stopping=Stopping(max_tokens=count)))


async def test_short_answers_end_where_they_are_and_long_ones_move(start_cluster: StartCluster) -> None:
    # More long ones than one worker has rows.
    async with start_cluster(MODEL, {}, workers=2, worker_flags=("--rows", "8", "--drain-s", "1.5")) as cluster:
        ask = cluster.client.generate_stream
        longs = [ask(f"long {number}", max_new_tokens=100) for number in range(12)]
        shorts = [ask(f"short {number}", max_new_tokens=12) for number in range(4)]
        for stream in (*longs, *shorts):
            await anext(stream)
        # To the whole group, as a terminal does: its engine must not go before it.
        worker = cluster.local.processes["worker-1"]
        cluster.local.kill("worker-1", signal.SIGTERM, group=True)
        answers = [await stream.result() for stream in shorts]
        assert sum(answer.continuations for answer in answers) == 0
        answers += [await stream.result() for stream in longs]
        assert sum(answer.continuations for answer in answers) > 0
        assert await worker.exited == 0
        for number, answer in enumerate(answers):
            prompt, count = (f"short {number}", 12) if number < 4 else (f"long {number - 4}", 100)
            assert list(answer.token_ids) == expected(prompt, count)


class Endless:
    """Streams that are read as they come, and go on through everything."""

    def __init__(self, cluster: Any, count: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self._news = asyncio.Event()
        self.tasks = [asyncio.create_task(self._read(cluster, number)) for number in range(count)]

    async def _read(self, cluster: Any, number: int) -> None:
        async with cluster.client.generate_stream(f"prompt {number}", max_new_tokens=20_000) as stream:
            async for piece in stream:
                assert piece.offset == len(self.ids[number])
                self.ids[number] += piece.token_ids
                self._news.set()

    async def go_on(self) -> None:
        """Wait until each has more than now."""
        before = [len(ids) for ids in self.ids]
        async with asyncio.timeout(30):
            while not all(len(ids) > count + 5 for ids, count in zip(self.ids, before, strict=True)):
                self._news.clear()
                await self._news.wait()
                assert not any(task.done() for task in self.tasks)

    async def leave(self) -> None:
        """Read no more, and look at what came."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for number, ids in enumerate(self.ids):
            assert ids == expected(f"prompt {number}", len(ids))


async def draining(cluster: Any, name: str) -> cluster_pb2.Worker:
    """The state of a worker once it says that it drains."""
    pid = cluster.local.processes[name].pid
    async with asyncio.timeout(30):
        while True:
            workers: list[cluster_pb2.Worker] = await cluster.workers()
            for worker in workers:
                if worker.pid == pid and worker.phase == cluster_pb2.WORKER_PHASE_DRAINING:
                    return worker
            await asyncio.sleep(0.05)


async def test_a_drain_is_over_when_its_engine_dies_or_hangs_or_when_it_is_told_again(
    start_cluster: StartCluster,
) -> None:
    flags = ("--drain-s", "600", "--stall-s", "1", "--replace-s", "1.5")
    async with start_cluster(MODEL, {}, worker_flags=flags) as cluster:
        streams = Endless(cluster, 4)
        await streams.go_on()
        holder = "worker-1"

        async def next_worker() -> str:
            name: str = await cluster.local.start_worker()
            await cluster.local.processes[name].wait_ready()
            return name

        for number in (signal.SIGKILL, signal.SIGSTOP):
            following = await next_worker()
            cluster.local.kill(holder, signal.SIGTERM)
            os.kill((await draining(cluster, holder)).engine_pid, number)
            assert await cluster.local.processes[holder].exited == 0
            await streams.go_on()
            holder = following
        await next_worker()
        cluster.local.kill(holder, signal.SIGTERM)
        await draining(cluster, holder)
        await streams.go_on()
        cluster.local.kill(holder, signal.SIGTERM)
        assert await cluster.local.processes[holder].exited == -signal.SIGTERM
        await streams.go_on()
        await streams.leave()


async def test_an_operator_drains_a_worker_and_its_answers_go_on_elsewhere(start_cluster: StartCluster) -> None:
    async with start_cluster(MODEL, {}, workers=2, worker_flags=("--rows", "4", "--drain-s", "0.5")) as cluster:
        pid = cluster.local.processes["worker-1"].pid
        (worker,) = [worker for worker in await cluster.workers() if worker.pid == pid]

        def drain(name: str) -> Any:
            return CliRunner().invoke(app, ["drain", name, "--router", cluster.local.router])

        # Also imports what the command needs: the drain must come while the answers run.
        assert "worker not found: nobody" in str((await asyncio.to_thread(drain, "nobody")).exception)
        streams = [cluster.client.generate_stream(f"prompt {number}", max_new_tokens=100) for number in range(6)]
        for stream in streams:
            await anext(stream)
        result = await asyncio.to_thread(drain, worker.worker_id)
        assert result.exit_code == 0, result.output
        assert worker.worker_id in result.stdout
        wholes = [await stream.result() for stream in streams]
        assert sum(whole.continuations for whole in wholes) > 0
        for number, whole in enumerate(wholes):
            assert list(whole.token_ids) == expected(f"prompt {number}", 100)
        assert await cluster.local.processes["worker-1"].exited == 0
        # A drained worker is not replaced, and its end is no failure of the cluster.
        assert "worker-3" not in cluster.local.processes
        await cluster.local.unless_failed(cluster.client.generate("x", max_new_tokens=1))
