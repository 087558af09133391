"""The disk tier: verified adapter revisions by digest, within a budget of bytes, kept over restarts.

All methods but `open` run on the event loop's thread. disk_budget.py describes the budget, and this is the directory:

DIR/lock             locked while a worker uses the directory
DIR/sha256-.../      a complete revision, made and removed by one rename
DIR/partial-.../     being written or removed; those of a killed worker are removed at the start
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from artifacts import ArtifactError
from artifacts.peft_config import CONFIG_FILE
from artifacts.revision import WEIGHTS_FILE
from worker.engine_api import Removal
from worker.io.adapters.disk_budget import DiskBudget, DiskReservation, Stored

_PARTIAL = "partial-"
_REVISION = re.compile(r"sha256-[0-9a-f]{64}")


def lock_directory(directory: Path) -> IO[bytes]:
    """Make a directory and lock it until the returned file is closed. Raises ArtifactError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("ab")
    except OSError as error:
        raise ArtifactError(str(directory), f"adapters can't be kept here: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ArtifactError(
            str(directory), "another worker keeps its adapters here; give each a --cache-dir of its own"
        ) from error
    return lock


def find_revisions(directory: Path) -> OrderedDict[str, Stored]:
    """Return complete revisions by digest, the least recently used first; removes what a killed worker left."""
    for partial in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
    found: list[tuple[float, str, Stored]] = []
    for path in directory.iterdir():
        if not _REVISION.fullmatch(path.name):
            continue
        if is_complete(path):
            size = sum((path / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
            found.append((path.stat().st_mtime, path.name.replace("-", ":"), Stored(path, size, verified=False)))
        else:
            shutil.rmtree(path, ignore_errors=True)
    return OrderedDict((digest, stored) for _, digest, stored in sorted(found, key=lambda entry: entry[:2]))


def is_complete(revision: Path) -> bool:
    """Return whether a revision's directory has its files."""
    return all((revision / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def revision_path(directory: Path, digest: str) -> Path:
    """Return the place of a complete revision."""
    return directory / digest.replace(":", "-")


def new_partial(directory: Path) -> Path:
    """Return the path of a directory for what is being written or removed; it is not made yet."""
    return directory / f"{_PARTIAL}{secrets.token_hex(8)}"


# Default budget in bytes; half of the disk's free space where that is less.
BUDGET_BYTES = 10_000_000_000


class NotReservedError(Exception):
    """A revision that is neither stored nor has bytes reserved: it must be pinned again."""


class DiskTier:
    """The revisions below one directory."""

    def __init__(
        self, directory: Path, lock: IO[bytes], budget: int, stored: OrderedDict[str, Stored], *, temporary: bool
    ) -> None:
        self._directory = directory
        self._temporary = temporary
        self._lock = lock
        self._stored = stored
        self._budget = DiskBudget(budget, stored, self.discard)
        self._removals: set[asyncio.Task[None]] = set()

    @classmethod
    def open(cls, directory: Path, budget: int = 0, *, temporary: bool = False) -> DiskTier:
        """Lock a directory and find the revisions in it; blocks. Budget 0: the default. Raises ArtifactError.

        A temporary directory is removed by `close`.
        """
        lock = lock_directory(directory)
        stored = find_revisions(directory)
        found_bytes = sum(revision.size for revision in stored.values())
        budget = budget or min(BUDGET_BYTES, (shutil.disk_usage(directory).free + found_bytes) // 2)
        while found_bytes > budget:
            _, oldest = stored.popitem(last=False)
            shutil.rmtree(oldest.path, ignore_errors=True)
            found_bytes -= oldest.size
        return cls(directory, lock, budget, stored, temporary=temporary)

    @property
    def bytes(self) -> int:
        """Return the bytes stored, being written and being removed; never more than the budget."""
        return self._budget.used

    @property
    def budget(self) -> int:
        """Return the budget in bytes."""
        return self._budget.limit

    @property
    def digests(self) -> Set[str]:
        """Return the digests of the complete revisions."""
        return self._stored.keys()

    @property
    def count(self) -> int:
        """Return the number of complete revisions."""
        return len(self._stored)

    async def pin(self, sizes: Mapping[str, int], tenant: str = "") -> None:
        """Keep revisions on the disk, all or none, and reserve bytes for those that are missing; see DiskBudget."""
        await self._budget.pin(sizes, tenant)

    def unpin(self, digest: str, tenant: str = "") -> None:
        """Undo one pin. Raises ValueError where there is none."""
        self._budget.unpin(digest, tenant)

    def fits_now(self, sizes: Mapping[str, int], tenant: str = "") -> bool:
        """Return whether a pin would be granted at once."""
        return self._budget.fits_now(sizes, tenant)

    def find(self, digest: str) -> Stored | None:
        """Return a complete revision, from now on the most recently used; None: there is none."""
        stored = self._stored.get(digest)
        if stored is None:
            return None
        try:
            os.utime(stored.path)  # the order of use outlives the process
            if not is_complete(stored.path):
                raise FileNotFoundError
        except OSError:  # another program removed files
            self.discard(digest)
            return None
        self._stored.move_to_end(digest)
        return stored

    @asynccontextmanager
    async def write(self, digest: str) -> AsyncIterator[Path]:
        """Make a directory to write a pinned revision to; removes what is not kept. Raises NotReservedError."""
        reservation = self._budget.reservation(digest)
        if reservation is None:
            raise NotReservedError(digest)
        # An earlier attempt may still be removing its files.
        await reservation.writing.acquire()
        path = new_partial(self._directory)
        try:
            if self._budget.reservation(digest) is not reservation:
                raise NotReservedError(digest)
            await self._budget.back(reservation)
            path.mkdir()
            yield path
        finally:
            # Shielded: a cancellation must not leave bytes reserved.
            await asyncio.shield(self._start(self._end_writing(digest, reservation, path)))

    def keep(self, path: Path, digest: str, size: int) -> Stored:
        """Store what was written to `path` as a complete, verified revision of `size` bytes. Raises OSError."""
        target = revision_path(self._directory, digest)
        path.rename(target)
        stored = Stored(target, size, verified=True)
        self._budget.convert(digest, stored)
        return stored

    def discard(self, digest: str) -> asyncio.Task[None]:
        """Remove a revision, pinned or not. `find` misses it at once; its bytes are free when the task ends."""
        stored = self._budget.begin_removal(digest)
        trash = new_partial(self._directory)
        with suppress(OSError):  # removed already
            stored.path.rename(trash)
        return self._start(self._remove(trash, stored))

    async def evict(self, size: int) -> bool:
        """Remove idle revisions of `size` bytes, least recently used first; returns whether there were any."""
        removals = []
        for digest in self._budget.idle():
            if size <= 0:
                break
            size -= self._stored[digest].size
            removals.append(self.discard(digest))
        for removal in removals:
            await asyncio.shield(removal)
        return bool(removals)

    async def forget(self, digests: Collection[str]) -> Removal:
        """Remove revisions; those that a job has pinned stay and count as left."""
        idle = [digest for digest in self._budget.idle() if digest in digests]
        for removal in [self.discard(digest) for digest in idle]:
            await asyncio.shield(removal)
        return Removal(len(idle), sum(digest in self._stored for digest in digests))

    async def close(self) -> None:
        """Wait for removals that are under way, and unlock the directory."""
        await asyncio.gather(*self._removals)
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._lock.close()

    async def _end_writing(self, digest: str, reservation: DiskReservation, path: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        self._budget.end_writing(digest, reservation)

    async def _remove(self, path: Path, stored: Stored) -> None:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        self._budget.end_removal(stored)

    def _start(self, removal: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task
