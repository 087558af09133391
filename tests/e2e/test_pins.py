"""Operators say which adapters the workers have on their devices: `loraplex adapters warm, pin, unpin`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from tests.e2e.conftest import TENANT, Cluster, running_cluster, write_hash_adapters
from tests.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.asyncio(loop_scope="module")
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

MODEL = "hash:?vocab=32000&seed=1"
# Fewer slots than adapters, and one of them for what is pinned.
FLAGS = ("--adapter-slots", "2", "--max-rank", "8", "--rows", "4", "--fetch-s", "3", "--fetch-silent-s", "1")


def retry_after(error: grpc.aio.AioRpcError) -> float:
    """Return the delay of the error's RetryInfo, in seconds."""
    (packed,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    info = error_details_pb2.RetryInfo()
    (found,) = [detail for detail in status_pb2.Status.FromString(packed).details if detail.Is(info.DESCRIPTOR)]
    found.Unpack(info)
    return float(info.retry_delay.ToNanoseconds() / 1e9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store() -> FaultyStore:
    """The store as the workers see it."""
    return FaultyStore()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, store: FaultyStore) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("pins")
    adapters = dict(write_hash_adapters(directory / "adapters"))
    config = (adapters["a"] / "adapter_config.json").read_text()
    for name, rank in (("big", 16), ("slow", 8)):
        files = adapters[name] = directory / "adapters" / name
        files.mkdir()
        (files / "adapter_config.json").write_text(config.replace('"r": 8', f'"r": {rank}'))
        (files / "adapter_model.safetensors").write_bytes(f"weights of {name}".encode())
    async with running_cluster(directory / "cluster", MODEL, adapters, worker_flags=FLAGS, faulty=store) as running:
        yield running


async def adapters_command(cluster: Cluster, *words: str) -> tuple[int, str]:
    """The exit code and what was printed."""
    where = ("--router", cluster.local.router, "--tenant", TENANT)
    result = await asyncio.to_thread(CliRunner().invoke, app, ["adapters", *words, *where])
    return result.exit_code, " ".join(f"{result.output} {result.exception or ''}".split())


async def ask(cluster: Cluster, name: str) -> None:
    await cluster.client.generate("x", adapter_id=name, max_tokens=2)


def counted(workers: list[cluster_pb2.Worker], field: str) -> int:
    return sum(getattr(worker.adapter_tiers, field) for worker in workers)


async def test_a_warm_adapter_is_there_when_the_first_request_comes(cluster: Cluster, eventually: Eventually) -> None:
    before = await cluster.workers()
    assert cluster.digests["c"] not in before[0].adapters
    assert await adapters_command(cluster, "warm", "c") == (0, "c is loading on every worker")

    async def is_there() -> bool:
        return cluster.digests["c"] in (await cluster.workers())[0].adapters

    await eventually(is_there)
    await ask(cluster, "c")

    async def is_counted() -> bool:
        return counted(await cluster.workers(), "hits") == counted(before, "hits") + 1

    await eventually(is_counted)
    assert counted(await cluster.workers(), "misses") == counted(before, "misses")


async def test_a_pinned_adapter_stays_until_it_is_unpinned(cluster: Cluster, eventually: Eventually) -> None:
    pinned = cluster.digests["a"]

    async def have_it() -> bool:
        workers = await cluster.workers()
        return bool(workers) and all(pinned in state.adapters and state.adapter_slots.pinned == 1 for state in workers)

    async def pressed() -> bool:
        """Load every other adapter, one after the other."""
        before = counted(await cluster.workers(), "swaps")
        for name in ("b", "c", "b", "c"):
            await ask(cluster, name)

        async def swapped() -> bool:
            return counted(await cluster.workers(), "swaps") >= before + 3

        await eventually(swapped)
        return pinned in (await cluster.workers())[0].adapters

    code, line = await adapters_command(cluster, "pin", "a")
    assert (code, line) == (0, "a is pinned on every worker; `loraplex adapters top` counts pinned adapters")
    await eventually(have_it)
    assert await pressed()

    # There is one slot for others: a second pin would leave none.
    code, line = await adapters_command(cluster, "pin", "b")
    assert code != 0
    assert "1 adapters are pinned on all workers, which keep at most 1; unpin one" in line

    (worker,) = await cluster.workers()
    os.kill(worker.engine_pid, signal.SIGKILL)

    async def lives_again() -> bool:
        found = await cluster.workers()
        return len(found) == 1 and found[0].incarnation != worker.incarnation and await have_it()

    await eventually(lives_again)
    os.kill(worker.pid, signal.SIGKILL)  # the launcher starts another

    async def another_lives() -> bool:
        found = await cluster.workers()
        return len(found) == 1 and found[0].worker_id != worker.worker_id and await have_it()

    await eventually(another_lives)
    assert await pressed()

    assert await adapters_command(cluster, "unpin", "a") == (0, "a is no longer pinned on every worker")

    async def let_go() -> bool:
        return (await cluster.workers())[0].adapter_slots.pinned == 0

    async def is_gone() -> bool:
        return pinned not in (await cluster.workers())[0].adapters

    await eventually(let_go)
    for name in ("b", "c"):
        await ask(cluster, name)
    await eventually(is_gone)
    assert [key async for key in cluster.redis.scan_iter("*:pins")] == []


async def test_a_redis_that_is_full_keeps_no_new_pin_and_says_so(cluster: Cluster) -> None:
    assert (await adapters_command(cluster, "pin", "a"))[0] == 0
    await cluster.redis.config_set("maxmemory", "1")
    try:
        async with grpc.aio.insecure_channel(cluster.local.router) as channel:
            pin = cluster_pb2_grpc.ClusterServiceStub(channel).PinAdapter
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pin(cluster_pb2.PinAdapterRequest(adapter="a"), metadata=[("x-loraplex-tenant", TENANT)])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after(caught.value) > 0
        code, line = await adapters_command(cluster, "pin", "a")
        assert code != 0
        assert "Redis is out of memory" in line
        # Commands that free memory still work.
        assert (await adapters_command(cluster, "unpin", "a"))[0] == 0
    finally:
        await cluster.redis.config_set("maxmemory", "0")


async def test_a_store_that_hangs_delays_no_other_order(
    cluster: Cluster, store: FaultyStore, eventually: Eventually
) -> None:
    store.faults = {"slow": Fault.HANGS}
    assert (await adapters_command(cluster, "pin", "slow"))[0] == 0
    assert (await adapters_command(cluster, "warm", "a"))[0] == 0

    def there(name: str, pinned: int) -> Callable[[], Awaitable[bool]]:
        async def is_there() -> bool:
            (worker,) = await cluster.workers()
            return cluster.digests[name] in worker.adapters and worker.adapter_slots.pinned == pinned

        return is_there

    await eventually(there("a", 0))
    assert cluster.digests["slow"] not in (await cluster.workers())[0].adapters
    store.faults = {}
    await eventually(there("slow", 1))
    assert (await adapters_command(cluster, "unpin", "slow"))[0] == 0
    await eventually(there("slow", 0))


async def test_one_worker_alone(cluster: Cluster, eventually: Eventually) -> None:
    name = await cluster.local.start_worker()
    await cluster.local.processes[name].wait_ready()

    async def two_live() -> bool:
        return len(await cluster.workers()) == 2

    await eventually(two_live)
    first, second = [worker.worker_id for worker in await cluster.workers()]

    def kept(expected: int) -> Callable[[], Awaitable[bool]]:
        async def holds() -> bool:
            slots = {worker.worker_id: worker.adapter_slots.pinned for worker in await cluster.workers()}
            return slots == {first: expected, second: 0}

        return holds

    assert (await adapters_command(cluster, "pin", "b", "--worker", first))[0] == 0
    await eventually(kept(1))
    assert cluster.digests["b"] in next(w for w in await cluster.workers() if w.worker_id == first).adapters
    assert [key async for key in cluster.redis.scan_iter("*:pins")] == []
    assert (await adapters_command(cluster, "unpin", "b", "--worker", first))[0] == 0
    await eventually(kept(0))
    await eventually(cluster.idle)


@pytest.mark.parametrize("verb", ["warm", "pin", "unpin"])
async def test_what_is_not_known_is_one_error(cluster: Cluster, verb: str) -> None:
    for words, message in (
        ((verb, "nobody"), "adapter not found: nobody"),
        ((verb, "not a name"), "adapter: "),
        ((verb, "a", "--worker", "w-9"), "worker not found: w-9"),
    ):
        code, line = await adapters_command(cluster, *words)
        assert code != 0
        assert message in line
    if verb != "unpin":
        code, line = await adapters_command(cluster, verb, "big")
        assert code != 0
        assert "rank 16; the workers take at most 8" in line
    assert await cluster.idle()
    assert [key async for key in cluster.redis.scan_iter("*:pins")] == []
