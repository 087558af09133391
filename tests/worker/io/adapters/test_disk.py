"""The disk tier: its budget, its order of use, what a restart finds; a random walk with its invariants checked."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.worker.io.adapters.disk import DiskTier, NotReservedError, Stored, TooLargeError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def digest(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


async def pin(disk: DiskTier, names: str, size: int = 100) -> None:
    """Pin revisions of at most `size` bytes each."""
    await disk.pin({digest(name): size for name in names})


async def write(disk: DiskTier, name: str, size: int = 100) -> Stored:
    """Store a pinned revision of `size` bytes."""
    async with disk.write(digest(name)) as path:
        (path / CONFIG).write_bytes(b"{}")
        (path / WEIGHTS).write_bytes(b"w" * (size - 2))
        return disk.keep(path, digest(name), size)


async def put(disk: DiskTier, name: str, size: int = 100) -> Stored:
    """Store a revision of `size` bytes, which no job needs then."""
    await disk.pin({digest(name): size})
    try:
        return await write(disk, name, size)
    finally:
        disk.unpin(digest(name))


def there(disk: DiskTier, names: str) -> str:
    """Return which of the revisions are stored, without using them."""
    return "".join(name for name in names if digest(name) in disk._stored)


@asynccontextmanager
async def opened(directory: Path, budget: int = 0) -> Any:
    disk = DiskTier.open(directory, budget)
    try:
        yield disk
    finally:
        await disk.close()


def bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def partials(directory: Path) -> list[Path]:
    return list(directory.glob("partial-*"))


async def test_the_least_recently_used_goes_first_and_what_is_pinned_stays(tmp_path: Path) -> None:
    async with opened(tmp_path, 300) as disk:
        for name in "abc":
            await put(disk, name)
        disk.find(digest("a"))
        await pin(disk, "b")
        await put(disk, "d")
        assert there(disk, "abcd") == "abd"
        await put(disk, "e")
        assert there(disk, "abcde") == "bde"
        assert disk.bytes == bytes_below(tmp_path) == 300


async def test_a_pin_waits_for_an_unpin_and_a_smaller_one_overtakes_it_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, 300) as disk:
        await pin(disk, "ab")
        large = asyncio.create_task(pin(disk, "cd"))
        await put(disk, "e")  # it fits, and may go first
        monkeypatch.setattr("loraplex.worker.io.adapters.disk.OVERTAKEN_S", 0.0)
        later = asyncio.create_task(pin(disk, "f"))
        await asyncio.sleep(0)
        assert not large.done()
        assert not later.done(), "the first has waited long enough"
        await pin(disk, "e")  # it needs no bytes
        disk.unpin(digest("e"))
        disk.unpin(digest("a"))
        async with asyncio.timeout(60):
            await large
        disk.unpin(digest("b"))
        async with asyncio.timeout(60):
            await later


async def test_what_can_never_fit_is_refused_and_a_cancelled_wait_reserves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, 100) as disk:
        with pytest.raises(TooLargeError, match="101 bytes"):
            await put(disk, "a", 101)
        with pytest.raises(TooLargeError, match="102 bytes"):
            await pin(disk, "ab", 51)
        await pin(disk, "a")
        waits = asyncio.create_task(put(disk, "b", 50))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        granted = asyncio.create_task(pin(disk, "c"))
        await asyncio.sleep(0)
        disk.unpin(digest("a"))  # grants it
        granted.cancel()
        await asyncio.gather(granted, return_exceptions=True)
        await put(disk, "d")
        assert disk.bytes == 100


async def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    async def fail(disk: DiskTier, error: BaseException) -> None:
        async with disk.write(digest("a")) as path:
            (path / WEIGHTS).write_bytes(b"w" * 40)
            assert disk.bytes == 80
            raise error

    async with opened(tmp_path, 100) as disk:
        await pin(disk, "a", 80)
        with pytest.raises(OSError, match="full"):
            await fail(disk, OSError("full"))
        with pytest.raises(asyncio.CancelledError):
            await fail(disk, asyncio.CancelledError())
        assert bytes_below(tmp_path) == 0
        assert not partials(tmp_path)
        await write(disk, "a", 70)  # the pin has kept its bytes
        assert disk.bytes == 70
        disk.unpin(digest("a"))
        with pytest.raises(NotReservedError):
            await write(disk, "b")


async def test_a_restart_finds_what_was_whole_and_removes_the_rest(tmp_path: Path) -> None:
    async with opened(tmp_path) as disk:
        for name in "abc":
            await put(disk, name, 100)
    (tmp_path / "partial-x").mkdir()
    (tmp_path / "partial-x" / WEIGHTS).write_bytes(b"half")
    (tmp_path / digest("a").replace(":", "-") / CONFIG).unlink()
    (tmp_path / "mine.txt").write_text("not an adapter")
    async with opened(tmp_path) as disk:
        assert there(disk, "abc") == "bc"
        assert disk.bytes == 200
        assert names(tmp_path) == {
            "lock",
            "mine.txt",
            *(digest(name).replace(":", "-") for name in "bc"),
        }
        found = disk.find(digest("b"))
        assert found is not None
        assert not found.verified
    async with opened(tmp_path, 150) as disk:  # a smaller budget: b was used last
        assert there(disk, "abc") == "b"
        assert disk.bytes == 100


async def test_one_directory_has_one_worker(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(ArtifactError, match="another worker"):
            DiskTier.open(tmp_path)
    async with opened(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="can't be kept here"):
        DiskTier.open(tmp_path / "file")


async def test_a_revision_whose_files_were_removed_is_not_found(tmp_path: Path) -> None:
    async with opened(tmp_path, 100) as disk:
        stored = await put(disk, "a", 100)
        (stored.path / WEIGHTS).unlink()
        assert disk.find(digest("a")) is None
        await put(disk, "a", 100)
        assert disk.find(digest("a")) is not None


async def test_one_tenants_answers_leave_room_for_another_s(tmp_path: Path) -> None:
    """An answer keeps its adapter on the disk to its end, which may be hours away."""
    async with opened(tmp_path, 800) as disk:
        loud = [asyncio.create_task(disk.pin({digest(name): 100}, "loud")) for name in "abcdef"]
        await asyncio.sleep(0)
        assert [task.done() for task in loud] == [True] * 4 + [False] * 2
        await asyncio.wait_for(disk.pin({digest("a"): 100}, "loud"), 60)  # one that it has
        assert not disk.fits_now({digest("g"): 100}, "loud")
        await asyncio.wait_for(disk.pin({digest("g"): 400}, "quiet"), 60)
        assert not disk.fits_now({digest("h"): 100}, "quiet")
        disk.unpin(digest("g"), "quiet")
        disk.unpin(digest("b"), "loud")
        await asyncio.wait_for(loud[4], 60)
        assert not loud[5].done()
        for name in "aacde":
            disk.unpin(digest(name), "loud")
        await asyncio.wait_for(loud[5], 60)
        disk.unpin(digest("f"), "loud")
        assert not disk._tenant_pins
        assert not disk._sizes


async def test_a_random_walk_keeps_the_budget_and_the_pins(tmp_path: Path) -> None:
    """Run 600 jobs of one to three of 30 revisions on a budget of about 8, many at once; some are cancelled."""
    seed, budget = 11, 800
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = {f"{number}": rng.randrange(20, 200) for number in range(30)}
    fetching = {name: asyncio.Lock() for name in sizes}
    held: Counter[str] = Counter()
    done = written = 0

    async def run(disk: DiskTier, parts: list[str]) -> None:
        nonlocal done, written
        tenant = rng.choice(("", "one", "two"))
        await disk.pin({digest(name): sizes[name] for name in parts}, tenant)
        try:
            for name in parts:
                async with fetching[name]:
                    if disk.find(digest(name)) is None:
                        await write(disk, name, sizes[name])
                        written += 1
            held.update(parts)
            try:
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
            finally:
                held.subtract(parts)
            done += 1
        finally:
            for name in parts:
                disk.unpin(digest(name), tenant)

    async with opened(tmp_path, budget) as disk:
        jobs: list[asyncio.Task[None]] = []
        for _ in range(600):
            jobs.append(asyncio.create_task(run(disk, rng.sample(list(sizes), rng.randrange(1, 4)))))
            if rng.random() < 0.1:
                rng.choice(jobs).cancel()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            assert 0 <= disk.bytes <= budget
            assert all(digest(name) in disk._stored for name in +held), "a pinned one was removed"
            jobs = [job for job in jobs if not job.done()]
        async with asyncio.timeout(60):
            await asyncio.gather(*jobs, return_exceptions=True)
        while disk._removals:
            await asyncio.gather(*disk._removals)
        assert disk.bytes == bytes_below(tmp_path) == sum(revision.size for revision in disk._stored.values())
        assert not disk._pins
        assert not disk._reserved
        assert not disk._requests
        print(f"{done} done, {written} written, {len(disk.digests)} left")
        assert written - len(disk.digests) > 50
        assert done > 400
    assert not partials(tmp_path)
