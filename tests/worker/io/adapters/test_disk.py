"""The disk tier: its budget, its order of use, what a restart finds; a random walk with its invariants checked."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from worker.io.adapters.disk import DiskTier, Stored, TooLargeError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def digest(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


async def put(disk: DiskTier, name: str, size: int) -> Stored:
    """Store a revision of `size` bytes."""
    async with disk.reserve(size) as reservation:
        (reservation.path / CONFIG).write_bytes(b"{}")
        (reservation.path / WEIGHTS).write_bytes(b"w" * (size - 2))
        return disk.keep(reservation, digest(name), size)


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
            await put(disk, name, 100)
        disk.find(digest("a"))
        disk.pin(digest("b"))
        await put(disk, "d", 100)
        assert there(disk, "abcd") == "abd"
        await put(disk, "e", 100)
        assert there(disk, "abcde") == "bde"
        assert disk.bytes == bytes_below(tmp_path) == 300


async def test_a_reservation_waits_for_an_unpin_and_a_smaller_one_does_not_wait_behind_it(tmp_path: Path) -> None:
    async with opened(tmp_path, 300) as disk:
        for name in "ab":
            await put(disk, name, 100)
            disk.pin(digest(name))
        large = asyncio.create_task(put(disk, "large", 200))
        await put(disk, "c", 100)  # it may not take the room of what fits
        assert not large.done()
        disk.unpin(digest("a"))
        async with asyncio.timeout(20):
            await large
        assert there(disk, "abc") == "b"
        assert disk.bytes == 300


async def test_what_can_never_fit_is_refused_and_a_cancelled_wait_reserves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, 100) as disk:
        with pytest.raises(TooLargeError, match="101 bytes"):
            await put(disk, "a", 101)
        await put(disk, "a", 100)
        disk.pin(digest("a"))
        waits = asyncio.create_task(put(disk, "b", 50))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        disk.unpin(digest("a"))
        await put(disk, "c", 100)
        assert disk.bytes == 100


async def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    async def write(disk: DiskTier, error: BaseException) -> None:
        async with disk.reserve(80) as reservation:
            (reservation.path / WEIGHTS).write_bytes(b"w" * 40)
            assert disk.bytes == 80
            raise error

    async with opened(tmp_path, 100) as disk:
        with pytest.raises(OSError, match="full"):
            await write(disk, OSError("full"))
        with pytest.raises(asyncio.CancelledError):
            await write(disk, asyncio.CancelledError())
        assert disk.bytes == bytes_below(tmp_path) == 0
        assert not partials(tmp_path)


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


async def test_a_random_walk_keeps_the_budget_and_the_pins(tmp_path: Path) -> None:
    """Run 10,000 operations of 30 revisions on a budget of about 8, many at once."""
    seed, budget = 11, 800
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = {f"{number}": rng.randrange(20, 200) for number in range(30)}
    pinned: list[str] = []
    writing: dict[str, asyncio.Task[Stored]] = {}
    stored = evicted = 0
    async with opened(tmp_path, budget) as disk:
        for _ in range(10_000):
            name = rng.choice(list(sizes))
            match rng.randrange(8):
                case 0 | 1 if len(pinned) < 4:
                    disk.pin(digest(name))
                    pinned.append(name)
                case 2 | 3 if pinned:
                    disk.unpin(digest(pinned.pop(rng.randrange(len(pinned)))))
                case 4 if writing:
                    rng.choice(list(writing.values())).cancel()
                case 5 if name not in writing and disk.find(digest(name)) is None:
                    writing[name] = asyncio.create_task(put(disk, name, sizes[name]))
                case _:
                    await asyncio.sleep(0)
            before = {name for name in pinned if digest(name) in disk._stored}
            await asyncio.sleep(0)
            assert 0 <= disk.bytes <= budget
            assert before <= {name for name in pinned if digest(name) in disk._stored}, "a pinned one was removed"
            for done in [name for name, task in writing.items() if task.done()]:
                stored += not writing.pop(done).cancelled()
        for _ in range(len(pinned)):
            disk.unpin(digest(pinned.pop()))
        await asyncio.gather(*writing.values(), return_exceptions=True)
        while disk._removals:
            await asyncio.gather(*disk._removals)
        evicted = stored - disk.count
        assert disk.bytes == bytes_below(tmp_path) == sum(revision.size for revision in disk._stored.values())
        assert not disk._pins
    assert not partials(tmp_path)
    print(f"stored {stored}, evicted {evicted}")
    assert min(stored, evicted) > 50
