"""A worker of two ranks, one of which is killed in mid-stream: no token is lost. `make ranks` runs it.

Each of its engines starts two processes that import torch, twice: too much for the suite, whose proof of this is in
tests/worker/engine/ranks (a rank's death ends the engine) and tests/trials/chaos (an engine's death loses nothing).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.cli.local import ClusterSettings, LocalCluster
from tests.e2e.conftest import running_cluster
from tests.e2e.test_shipped_model import ADAPTERS, EXAMPLES, FLAGS, prompt

pytestmark = [pytest.mark.model, pytest.mark.skipif(os.environ.get("FAMILIES") != "all", reason="make ranks runs it")]
NAMES = (*ADAPTERS, None)
TOKENS = 60


def ranks_of(engine: int) -> list[int]:
    """The processes that an engine has started."""
    return [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]


@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_a_ranks_death_loses_no_token(tmp_path: Path, eventually: Callable[..., Awaitable[None]]) -> None:
    def launch(settings: ClusterSettings) -> LocalCluster:
        return LocalCluster(replace(settings, worker_flags=("--tensor-parallel=2", *settings.worker_flags)))

    model = str(EXAMPLES / "model")
    async with running_cluster(tmp_path, model, ADAPTERS, worker_flags=FLAGS, launch=launch) as cluster:

        async def ask(number: int, begun: asyncio.Event) -> tuple[int, ...]:
            stream = cluster.client.generate_stream(
                token_ids=prompt(number), adapter_id=NAMES[number % 4], max_tokens=TOKENS, ignore_eos=True
            )
            ids: list[int] = []
            async for piece in stream:
                ids += piece.token_ids
                if len(ids) > TOKENS // 4:
                    begun.set()
            return tuple(ids)

        async def ask_all(killed: int | None) -> list[tuple[int, ...]]:
            begun = [asyncio.Event() for _ in range(8)]
            answers = asyncio.gather(*(ask(number, event) for number, event in enumerate(begun)))
            await asyncio.gather(*(event.wait() for event in begun))
            if killed is not None:
                os.kill(killed, signal.SIGKILL)
            return await answers

        [worker] = await cluster.workers()
        undisturbed = await ask_all(None)
        assert {len(ids) for ids in undisturbed} == {TOKENS}
        [rank] = ranks_of(worker.engine_pid)
        assert await ask_all(rank) == undisturbed
        [after] = await cluster.workers()
        assert after.engine_pid != worker.engine_pid
        await eventually(cluster.idle)
