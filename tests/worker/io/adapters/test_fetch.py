"""Fetches from a real store through a faulty one: their results, how often the store is asked, what is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.names import weighted_digest
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, WeightedRef
from loraplex.worker.io.adapters.disk import DiskTier
from loraplex.worker.io.adapters.fetch import (
    CONFIG_BYTES,
    FAILURE_S,
    AdapterFetcher,
    DiskPin,
    DownloadTimeouts,
    FetchFailedError,
    fetch_source,
)
from loraplex_client import AsyncStoreClient
from tests.faulty_store import Fault, FaultyStore
from tests.small_disks import SmallDisk

TENANT = "acme"
WEIGHTS = "adapter_model.safetensors"
MOST_S = 20.0


class World:
    """A store with the adapters a to e, what stands before it, and a worker's fetcher."""

    def __init__(self, store: FaultyStore, address: str, refs: dict[str, AdapterRef], directory: Path) -> None:
        self.store = store
        self.refs = refs
        self.directory = directory
        self.address = address
        self.budget = 0
        self.timeouts = DownloadTimeouts(total_s=2.0, silent_s=0.5)

    @asynccontextmanager
    async def worker(self, *, failure_s: float = FAILURE_S) -> AsyncIterator[AdapterFetcher]:
        """Run a worker's I/O process once; its disk outlives it. Asserts that it leaves nothing half done."""
        self.disk = DiskTier.open(self.directory, self.budget)
        fetcher = AdapterFetcher(self.address, self.disk, self.timeouts, failure_s=failure_s)
        try:
            yield fetcher
        finally:
            await fetcher.close()
            await self.disk.close()
        assert not list(self.directory.glob("partial-*"))
        assert self.disk.bytes == sum(path.stat().st_size for path in self.directory.glob("sha256-*/*"))
        assert fetcher.stats.fetching == 0

    def stored(self, name: str) -> Path:
        return self.directory / self.refs[name].digest.replace(":", "-")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    real, store = Store(StoreSettings(tmp_path / "store", port=0)), FaultyStore()
    await real.start()
    address = await store.start()
    store.target = f"127.0.0.1:{real.port}"
    base = read_base_model("hash:?vocab=600")
    refs = {}
    async with AsyncStoreClient(store.target, TENANT) as client:
        await client.register_model(registered(base), base.files)
        for name in "abcde":
            revision = (await client.push(adapter(tmp_path / name, name), name)).revision
            refs[name] = AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes)
    yield World(store, address, refs, tmp_path / "cache")
    await store.stop()
    await real.stop(0)


def adapter(directory: Path, name: str, copies: int = 1000) -> Path:
    """Files that the hash model's store takes."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / WEIGHTS).write_bytes(name.encode() * copies)
    return directory


async def test_the_invocation_of_an_activated_adapter_comes_with_it_and_no_set_has_such_a_part(
    world: World, tmp_path: Path
) -> None:
    files, plain = adapter(tmp_path / "checks", "checks"), world.refs["a"]
    (files / "adapter_config.json").write_text(json.dumps({"alora_invocation_tokens": [7, 9]}))
    async with AsyncStoreClient(world.store.target, TENANT) as client:
        revision = (await client.push(files, "checks")).revision
    checks = AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes)
    digest = weighted_digest((ref.digest, 0.5) for ref in (plain, checks))
    parts = (WeightedRef(plain, 0.5), WeightedRef(checks, 0.5))
    for _ in range(2):  # the second worker finds them on its disk
        async with world.worker() as fetcher:
            for ref, invocation in ((checks, (7, 9)), (plain, ())):
                pin = fetcher.disk_pin()
                assert (await fetch_source(pin, ref, TENANT)).invocation == invocation
                pin.release()
            with pytest.raises(FetchFailedError, match=r"checks/.* is an activated adapter"):
                await fetch_source(fetcher.disk_pin(), AdapterRef(digest, digest, 16, 2000, parts), TENANT)
            assert all(not pins for pins in fetcher.disk._pins.values())


async def fetch_one(pin: DiskPin, ref: AdapterRef) -> Path:
    """Return the directory of one revision."""
    (path,) = await pin.fetch([ref], TENANT)
    return path


async def failure_of(fetch: Awaitable[Path]) -> tuple[str, str]:
    """Return the code and reason that a job would end with."""
    with pytest.raises(FetchFailedError) as caught:
        async with asyncio.timeout(MOST_S):
            await fetch
    return caught.value.failure.code, caught.value.failure.reason


FAILURES = {
    Fault.TRICKLES: ("UNAVAILABLE", "STORE_TIMEOUT"),
    Fault.HANGS: ("UNAVAILABLE", "STORE_TIMEOUT"),
    Fault.SILENT: ("UNAVAILABLE", "STORE_TIMEOUT"),
    Fault.GARBLED: ("DATA_LOSS", "DATA_LOSS"),
    Fault.TOO_LONG: ("DATA_LOSS", "DATA_LOSS"),
    Fault.BREAKS_OFF: ("UNAVAILABLE", "STORE_DOWN"),
    Fault.DOWN: ("UNAVAILABLE", "STORE_DOWN"),
    Fault.MISSING: ("NOT_FOUND", "ADAPTER_GONE"),
}


@pytest.mark.parametrize("fault", FAILURES)
async def test_a_fault_fails_its_own_jobs_while_others_are_fetched(world: World, fault: Fault) -> None:
    # A trickle of bytes is not silence: the whole download takes too long. The timeouts hold for the others' fetches
    # too, which a busy machine makes wait.
    timeouts = {
        Fault.TRICKLES: DownloadTimeouts(1.5, 1.2, 60.0),
        Fault.HANGS: DownloadTimeouts(60.0, 60.0, 1.2),
        Fault.SILENT: DownloadTimeouts(60.0, 1.2, 60.0),
    }
    world.timeouts = timeouts.get(fault, DownloadTimeouts(60.0, 60.0, 60.0))
    world.store.faults["a"] = fault
    async with world.worker() as fetcher:
        pins = [fetcher.disk_pin() for _ in range(100)]
        outcomes = [asyncio.create_task(failure_of(fetch_one(pin, world.refs["a"]))) for pin in pins]
        await world.store.asked("a")
        for name in "bcde":
            path = await fetch_one(fetcher.disk_pin(), world.refs[name])
            assert (path / WEIGHTS).read_bytes() == name.encode() * 1000
        assert await asyncio.gather(*outcomes) == [FAILURES[fault]] * 100
        assert world.store.downloads == dict.fromkeys("abcde", 1)
        assert fetcher.stats.disk_adapters == 4


async def test_a_failure_is_remembered_for_a_moment(world: World) -> None:
    world.store.faults["a"] = Fault.DOWN
    async with world.worker(failure_s=3600.0) as fetcher:
        for _ in range(1000):
            assert await failure_of(fetch_one(fetcher.disk_pin(), world.refs["a"])) == FAILURES[Fault.DOWN]
        assert world.store.downloads["a"] == 1
    async with world.worker(failure_s=0.0) as fetcher:
        assert await failure_of(fetch_one(fetcher.disk_pin(), world.refs["a"])) == FAILURES[Fault.DOWN]
        world.store.faults.clear()
        assert (await fetch_one(fetcher.disk_pin(), world.refs["a"])).is_dir()


async def test_a_store_that_restarts_fails_no_fetch(world: World) -> None:
    world.timeouts = DownloadTimeouts(60.0, 60.0, 60.0)
    await world.store.stop()
    back = FaultyStore()
    back.target = world.store.target
    async with world.worker() as fetcher:
        fetch = asyncio.create_task(fetch_one(fetcher.disk_pin(), world.refs["a"]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(fetch), 0.3)
        await back.start(int(world.address.rpartition(":")[2]))
        assert (await fetch).is_dir()
    await back.stop()


async def test_a_fetch_is_shared_and_ends_with_its_last_job(world: World) -> None:
    world.store.faults["a"] = Fault.GATED
    world.timeouts = DownloadTimeouts(60.0, 60.0)
    async with world.worker() as fetcher:
        fetches = [asyncio.create_task(fetch_one(fetcher.disk_pin(), world.refs["a"])) for _ in range(10)]
        await world.store.asked("a")
        for fetch in fetches[:9]:
            fetch.cancel()
        await asyncio.gather(*fetches[:9], return_exceptions=True)
        assert fetcher.stats.fetching == 1
        fetches[9].cancel()
        await asyncio.gather(fetches[9], return_exceptions=True)
        assert fetcher.stats.fetching == 0
        # A cancelled fetch is not remembered as a failure.
        again = [asyncio.create_task(fetch_one(fetcher.disk_pin(), world.refs["a"])) for _ in range(10)]
        await world.store.asked("a", 2)
        again[0].cancel()
        world.store.gate.set()
        paths = await asyncio.gather(*again[1:])
        assert set(paths) == {world.stored("a")}
        assert world.store.downloads["a"] == 2


async def test_the_disk_is_found_again_and_what_was_changed_is_not_used(world: World) -> None:
    async with world.worker() as fetcher:
        for name in "ab":
            await fetch_one(fetcher.disk_pin(), world.refs[name])
    (world.stored("b") / WEIGHTS).write_bytes(b"x" * 1000)
    async with world.worker() as fetcher:
        fetches = [fetch_one(fetcher.disk_pin(), world.refs[name]) for name in "aabb"]
        for path, name in zip(await asyncio.gather(*fetches), "aabb", strict=True):
            assert (path / WEIGHTS).read_bytes() == name.encode() * 1000
        assert world.store.downloads == {"a": 1, "b": 2}


async def test_one_name_s_end_is_not_the_other_s(world: World, tmp_path: Path) -> None:
    """Two names of the same bytes have one digest, but the right to read them goes by name."""
    async with AsyncStoreClient(world.store.target, TENANT) as client:
        revision = (await client.push(tmp_path / "a", "twin")).revision
    twin = AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes)
    assert twin.digest == world.refs["a"].digest
    world.store.faults |= {"a": Fault.MISSING}
    async with world.worker() as fetcher:
        gone = asyncio.create_task(failure_of(fetch_one(fetcher.disk_pin(), world.refs["a"])))
        theirs = asyncio.create_task(fetch_one(fetcher.disk_pin(), twin))
        # A second waiter behind the other name: it tries again, and must not join the fetch that has just failed.
        also_gone = asyncio.create_task(failure_of(fetch_one(fetcher.disk_pin(), world.refs["a"])))
        assert await gone == await also_gone == FAILURES[Fault.MISSING]
        assert await theirs == world.stored("a")
        assert world.store.downloads == {"a": 1, "twin": 1}


async def test_an_adapter_waits_for_room_until_a_job_ends(world: World) -> None:
    world.budget = CONFIG_BYTES + 2000  # one, and what another reserves does not fit beside it
    world.timeouts = DownloadTimeouts(60.0, 60.0)
    async with world.worker() as fetcher:
        first = fetcher.disk_pin()
        await fetch_one(first, world.refs["a"])
        waits = asyncio.create_task(fetch_one(fetcher.disk_pin(), world.refs["b"]))
        second = fetcher.disk_pin()
        assert await fetch_one(second, world.refs["a"]) == world.stored("a")
        first.release()
        await asyncio.sleep(0)
        assert world.store.downloads["b"] == 0
        second.release()
        async with asyncio.timeout(MOST_S):
            assert await waits == world.stored("b")
        assert not world.stored("a").exists()


async def test_weighted_sets_do_not_wait_for_each_other_s_parts(world: World, tmp_path: Path) -> None:
    """Run 48 jobs, each of three of six adapters, of which the disk holds five, or three that are being written."""
    refs, size = [], 3 << 19
    async with AsyncStoreClient(world.store.target, TENANT) as client:
        for name in "uvwxyz":
            revision = (await client.push(adapter(tmp_path / name, name, size), name)).revision
            refs.append(AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes))
    world.budget = 3 * (size + CONFIG_BYTES)
    world.timeouts = DownloadTimeouts(20.0, 20.0)
    chance = random.Random(3)

    async def run(fetcher: AdapterFetcher) -> None:
        pin = fetcher.disk_pin()
        paths = await pin.fetch(chance.sample(refs, 3), TENANT)
        assert all((path / WEIGHTS).stat().st_size == size for path in paths)
        await asyncio.sleep(0)
        pin.release()

    async with world.worker() as fetcher, asyncio.TaskGroup() as jobs:
        for _ in range(48):
            jobs.create_task(run(fetcher))


async def test_an_answer_whose_adapter_is_deleted_goes_on_at_another_worker(world: World, tmp_path: Path) -> None:
    async with world.worker() as fetcher:
        await fetch_one(fetcher.disk_pin(), world.refs["a"])
    async with AsyncStoreClient(world.store.target, TENANT) as client:
        await client.delete("a")
    world.directory = tmp_path / "another worker"
    async with world.worker() as fetcher:
        assert (await fetch_one(fetcher.disk_pin(), world.refs["a"]) / WEIGHTS).read_bytes() == b"a" * 1000


async def test_a_full_disk_takes_what_no_job_needs_or_is_named(world: World, small_disk: SmallDisk) -> None:
    """The budget is larger than what other programs leave of the disk."""
    world.directory = small_disk(3 << 20)
    world.budget = 1 << 30
    async with AsyncStoreClient(world.store.target, TENANT) as client:
        refs = []
        for name in "xyz":
            revision = (await client.push(adapter(world.directory.parent / name, name, 2 << 20), name)).revision
            refs.append(AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes))
    async with world.worker(failure_s=0.0) as fetcher:
        idle, running = fetcher.disk_pin(), fetcher.disk_pin()
        await fetch_one(idle, refs[0])
        idle.release()
        path = await fetch_one(running, refs[1])
        assert fetcher.stats.disk_adapters == 1, "the idle one made room"
        assert await failure_of(fetch_one(fetcher.disk_pin(), refs[2])) == ("UNAVAILABLE", "DISK_FULL")
        assert (path / WEIGHTS).stat().st_size == 2 << 20
        assert [entry.name for entry in world.directory.glob("partial-*")] == []
        running.release()
        await fetch_one(fetcher.disk_pin(), refs[2])


async def test_what_no_job_needs_makes_room(world: World) -> None:
    world.budget = CONFIG_BYTES + 2000
    async with world.worker() as fetcher:
        for name in "abab":
            pin = fetcher.disk_pin()
            assert await fetch_one(pin, world.refs[name]) == world.stored(name)
            pin.release()
        assert world.store.downloads == {"a": 2, "b": 2}
        assert fetcher.stats.disk_adapters == 1
        large = AdapterRef(world.refs["c"].revision, world.refs["c"].digest, 8, world.budget)
        assert await failure_of(fetch_one(fetcher.disk_pin(), large)) == ("FAILED_PRECONDITION", "ADAPTER_TOO_LARGE")


async def test_a_store_that_is_not_there_is_named(world: World, unused_tcp_port: int) -> None:
    disk = DiskTier.open(world.directory)
    fetcher = AdapterFetcher(f"127.0.0.1:{unused_tcp_port}", disk, world.timeouts)
    code, _ = await failure_of(fetch_one(fetcher.disk_pin(), world.refs["a"]))
    assert (code, disk.bytes) == ("UNAVAILABLE", 0)
    await fetcher.close()
    await disk.close()


async def test_prefetches_are_few_and_never_beside_a_job_s_own(world: World) -> None:
    world.store.faults = dict.fromkeys("abcde", Fault.GATED)
    world.timeouts = DownloadTimeouts(60.0, 60.0)
    requests = [AdapterRequest(world.refs[name], TENANT) for name in "abcde"]
    async with world.worker() as fetcher:
        own = asyncio.create_task(fetch_one(fetcher.disk_pin(), world.refs["e"]))
        await world.store.asked("e")
        fetcher.prefetch(requests)
        assert fetcher.stats.fetching == 1
        world.store.gate.set()
        await own
        world.store.gate.clear()
        for _ in range(3):
            fetcher.prefetch(requests)
        await asyncio.gather(world.store.asked("a"), world.store.asked("b"))
        assert fetcher.stats.fetching == 2
        # A job that is claimed now joins the fetch.
        joins = asyncio.create_task(fetch_one(fetcher.disk_pin(), world.refs["a"]))
        await asyncio.sleep(0)
        world.store.gate.set()
        assert await joins == world.stored("a")
        assert world.store.downloads == {"a": 1, "b": 1, "e": 1}
