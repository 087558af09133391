"""A Redis Cluster moves the slots of queue and ledger, whole, to a node that has joined and back, under load."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from loraplex.contracts.broker.keys import LEDGER, Keys
from loraplex.contracts.options import StoppingParams
from loraplex_client import AsyncClient
from tests.e2e.conftest import StartCluster
from tests.hash_oracle import expected_ids
from tests.plans_file import set_plans
from tests.valkey_cluster import ValkeyCluster

MODEL = "hash:?vocab=32000&seed=1&step_ms=5"
CALLERS = 8


async def test_every_call_is_answered_while_slots_move(start_cluster: StartCluster, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lp-") as directory:
        async with (
            ValkeyCluster(Path(directory)) as valkeys,
            start_cluster(
                MODEL,
                {},
                redis_url=valkeys.url,
                router_flags=("--usage-file", str(tmp_path / "usage")),
            ) as cluster,
        ):
            await set_plans(cluster.local.store, "[default]\nrequests_per_minute = 100000\n")
            answers, more = 0, asyncio.Condition()

            async def call(number: int, client: AsyncClient) -> None:
                nonlocal answers
                while True:
                    prompt = f"{number} {answers}"
                    answer = await client.generate(prompt, max_tokens=5)
                    expected = expected_ids(MODEL, list(prompt.encode()), stopping=StoppingParams(max_tokens=5))
                    assert answer.token_ids == expected
                    async with more:
                        answers += 1
                        more.notify_all()

            async def answered(count: int) -> None:
                target = answers + count
                async with more:
                    await more.wait_for(lambda: answers >= target)

            async def move() -> None:
                await answered(CALLERS)
                for source in (0, 1):
                    for key in (Keys("hash", "main").waiting, LEDGER):
                        await valkeys.move(key, source)
                        await answered(CALLERS)

            async with asyncio.TaskGroup() as calls, asyncio.timeout(60):
                calling = [calls.create_task(call(number, cluster.client)) for number in range(CALLERS)]
                await move()
                for task in calling:
                    task.cancel()
            # No process has ended and been replaced.
            assert set(cluster.local.processes) == {"store", "router-1", "worker-1"}
