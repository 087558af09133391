"""Adapters that are slow, broken or gone, beside eight streams that go on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from loraplex_client import AsyncClient, LoraplexError

from tests.e2e.conftest import TENANT
from tests.faulty_store import Fault, FaultyStore
from worker.engine.hash_engine import expected_ids
from worker.engine_api import Stopping

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=25"
GOOD = ("a", "b", "c")
# The error that a client gets, by its adapter's fault.
ENDINGS = {
    Fault.TRICKLES: "UnavailableError",
    Fault.HANGS: "UnavailableError",
    Fault.GARBLED: "DataLossError",
    Fault.BREAKS_OFF: "UnavailableError",
    Fault.DOWN: "UnavailableError",
    Fault.MISSING: "NotFoundError",
}


def name_of(fault: Fault) -> str:
    """The adapter that suffers from it."""
    return fault.name.lower().replace("_", "-")


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    """Adapters that the hash model accepts: three good ones, and one for each fault."""
    directories = {}
    for name in (*GOOD, *(name_of(fault) for fault in ENDINGS)):
        directory = directories[name] = tmp_path / "adapters" / name
        directory.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        (directory / "adapter_model.safetensors").write_bytes(f"weights of {name}".encode() * 100)
    return directories


def truth(cluster: Any, prompt: str, name: str, count: int) -> list[int]:
    return list(
        expected_ids(
            MODEL,
            list(prompt.encode()),
            adapter_digest=cluster.digests[name],
            stopping=Stopping(max_tokens=count),
        )
    )


async def test_a_broken_adapter_costs_its_own_requests_alone(
    start_cluster: StartCluster, adapters: dict[str, Path], eventually: Eventually
) -> None:
    store = FaultyStore()
    # More broken requests than rows: those that wait for their adapter must not keep others out.
    flags = ("--rows", "16", "--fetch-s", "2", "--fetch-silent-s", "1.5")
    async with start_cluster(MODEL, adapters, worker_flags=flags, faulty=store) as cluster:
        store.faults = {name_of(fault): fault for fault in ENDINGS}
        got: dict[int, list[int]] = {number: [] for number in range(8)}
        all_asked = asyncio.Event()

        async def stream(number: int) -> None:
            name = GOOD[number % 3]
            async with cluster.client.generate_stream(
                f"stream {number}", adapter_id=name, max_new_tokens=30_000
            ) as pieces:
                async for piece in pieces:
                    got[number] += piece.token_ids
                    if all_asked.is_set():
                        break
            assert got[number] == truth(cluster, f"stream {number}", name, len(got[number]))

        async def ask_broken(fault: Fault) -> str:
            async with AsyncClient(cluster.local.router, TENANT, resume_attempts=0) as client:  # it tries once
                with pytest.raises(LoraplexError) as caught:
                    await client.generate("x", adapter_id=name_of(fault), max_new_tokens=5)
            return f"{fault.name} {type(caught.value).__name__}"

        async def ask_good(number: int) -> str:
            answer = await cluster.client.generate(f"late {number}", adapter_id=GOOD[number % 3], max_new_tokens=5)
            assert list(answer.token_ids) == truth(cluster, f"late {number}", GOOD[number % 3], 5)
            return "good"

        async with asyncio.timeout(60), asyncio.TaskGroup() as streams:
            for number in range(8):
                streams.create_task(stream(number))
            async with asyncio.TaskGroup() as asking:
                asked = [asking.create_task(ask_broken(fault)) for fault in list(ENDINGS) * 8]
                await asyncio.gather(*(store.asked(name) for name in store.faults))
                asked += [asking.create_task(ask_good(number)) for number in range(12)]
                before = {number: len(ids) for number, ids in got.items()}
            assert all(len(ids) > before[number] for number, ids in got.items()), "a stream stood still"
            all_asked.set()
        outcomes = Counter(task.result() for task in asked)
        assert outcomes == {f"{fault.name} {code}": 8 for fault, code in ENDINGS.items()} | {"good": 12}
        assert not list((cluster.local.data_dir / "cache").rglob("partial-*"))
        (directory,) = (cluster.local.data_dir / "cache").iterdir()
        assert {path.name for path in directory.glob("sha256-*")} == {
            cluster.digests[name].replace(":", "-") for name in GOOD
        }

        async def only_good_remain() -> bool:
            (worker,) = await cluster.workers()
            return (worker.adapter_tiers.disk_adapters, worker.adapter_tiers.fetching) == (3, 0)

        await eventually(only_good_remain)
        tiers = (await cluster.workers())[0].adapter_tiers
        assert tiers.disk_bytes == sum(path.stat().st_size for path in directory.glob("sha256-*/*"))
        assert tiers.disk_hits > 0
        assert tiers.disk_misses >= 3 + len(ENDINGS)

        store.faults.clear()
        for name in (name_of(fault) for fault in ENDINGS):
            answer = await first_that_works(cluster, "y", name)
            assert list(answer.token_ids) == truth(cluster, "y", name, 5)


async def first_that_works(cluster: Any, prompt: str, name: str) -> Any:
    """The first answer; a failure is remembered for a moment."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await cluster.client.generate(prompt, adapter_id=name, max_new_tokens=5)
            except LoraplexError:
                await asyncio.sleep(0.1)
