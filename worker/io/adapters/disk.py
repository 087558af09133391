"""The disk tier: verified adapter revisions by digest, within a budget of bytes, kept over restarts.

    DIR/lock             locked while a worker uses the directory
    DIR/sha256-.../      a complete revision, made and removed by one rename
    DIR/partial-.../     being written or removed; those of a killed worker are removed at the start

        budget  =  stored (pinned | idle)  +  reserved (being written)  +  being removed  +  free
                            |
                            `-- removed, the least recently used first, when a reservation needs their bytes

All methods but `open` run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from artifacts.errors import ArtifactError
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE

log = logging.getLogger(__name__)

# Default budget in bytes; half of the disk's free space where that is less.
BUDGET_BYTES = 10_000_000_000
_PARTIAL = "partial-"
_REVISION = re.compile(r"sha256-[0-9a-f]{64}")


class TooLargeError(Exception):
    """A reservation of more bytes than the whole budget."""


@dataclass(slots=True)
class Stored:
    """A complete revision. One that was found at the start is verified at its first use."""

    path: Path
    size: int
    verified: bool


@dataclass(slots=True, eq=False)
class DiskReservation:
    """A directory to write a revision to, and the bytes that are reserved for it."""

    path: Path
    size: int


class DiskTier:
    """The revisions below one directory; see the drawing above."""

    def __init__(
        self, directory: Path, lock: IO[bytes], budget: int, stored: OrderedDict[str, Stored], *, temporary: bool
    ) -> None:
        self._directory = directory
        self._temporary = temporary
        self._lock = lock
        self.budget = budget
        # Least recently used first.
        self._stored = stored
        self._pins: Counter[str] = Counter()
        self._bytes = sum(revision.size for revision in stored.values())
        self._freed = asyncio.Event()
        self._removals: set[asyncio.Task[None]] = set()

    @classmethod
    def open(cls, directory: Path, budget: int = 0, *, temporary: bool = False) -> DiskTier:
        """Lock a directory and find the revisions in it; blocks. Budget 0: the default. Raises ArtifactError.

        A temporary directory is removed by `close`.
        """
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
        for partial in directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)
        stored = _find(directory)
        found_bytes = sum(revision.size for revision in stored.values())
        budget = budget or min(BUDGET_BYTES, (shutil.disk_usage(directory).free + found_bytes) // 2)
        while found_bytes > budget:
            _, oldest = stored.popitem(last=False)
            shutil.rmtree(oldest.path, ignore_errors=True)
            found_bytes -= oldest.size
        return cls(directory, lock, budget, stored, temporary=temporary)

    @property
    def bytes(self) -> int:
        """Return the bytes stored, reserved and being removed; never more than the budget."""
        return self._bytes

    @property
    def count(self) -> int:
        """Return the number of complete revisions."""
        return len(self._stored)

    def pin(self, digest: str) -> None:
        """Keep a revision on the disk, now or once it is stored, until it is unpinned as often."""
        self._pins[digest] += 1

    def unpin(self, digest: str) -> None:
        """Undo one pin. Raises ValueError where there is none."""
        if not self._pins[digest]:
            raise ValueError(f"adapter {digest} is not pinned")
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]
            self._announce_freed()

    def find(self, digest: str) -> Stored | None:
        """Return a complete revision, from now on the most recently used; None: there is none."""
        stored = self._stored.get(digest)
        if stored is None:
            return None
        try:
            os.utime(stored.path)  # the order of use outlives the process
            if not _is_complete(stored.path):
                raise FileNotFoundError
        except OSError:  # another program removed files
            self.discard(digest)
            return None
        self._stored.move_to_end(digest)
        return stored

    def fits_now(self, size: int) -> bool:
        """Return whether `size` bytes could be reserved without waiting for an unpin."""
        idle = sum(revision.size for digest, revision in self._stored.items() if not self._pins[digest])
        return self._bytes - idle + size <= self.budget

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[DiskReservation]:
        """Reserve `size` bytes in a new directory, waiting until there are; removes what is not kept in the end.

        Raises TooLargeError.
        """
        await self._take_bytes(size)
        reservation = DiskReservation(self._directory / f"{_PARTIAL}{secrets.token_hex(8)}", size)
        try:
            reservation.path.mkdir()
            yield reservation
        finally:
            # Shielded: a cancellation must not leave bytes reserved.
            await asyncio.shield(self._remove(reservation.path, reservation.size))

    def keep(self, reservation: DiskReservation, digest: str, size: int) -> Stored:
        """Store what was written to a reservation as a complete, verified revision of `size` bytes. Raises OSError."""
        target = self._directory / digest.replace(":", "-")
        if digest in self._stored:  # stored meanwhile under another name
            return self._stored[digest]
        reservation.path.rename(target)
        reservation.size -= size
        stored = self._stored[digest] = Stored(target, size, verified=True)
        return stored

    def discard(self, digest: str) -> asyncio.Task[None]:
        """Remove a revision, pinned or not. `find` misses it at once; its bytes are free when the task ends."""
        stored = self._stored.pop(digest)
        trash = self._directory / f"{_PARTIAL}{secrets.token_hex(8)}"
        with suppress(OSError):  # removed already
            stored.path.rename(trash)
        return self._remove(trash, stored.size)

    async def close(self) -> None:
        """Wait for removals that are under way, and unlock the directory."""
        await asyncio.gather(*self._removals)
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._lock.close()

    async def _take_bytes(self, size: int) -> None:
        if size > self.budget:
            raise TooLargeError(f"{size} bytes do not fit in {self.budget}")
        while self._bytes + size > self.budget:
            idle = next((digest for digest in self._stored if not self._pins[digest]), None)
            if idle is not None:
                await asyncio.shield(self.discard(idle))
            else:
                await self._freed.wait()
        self._bytes += size

    def _remove(self, path: Path, size: int) -> asyncio.Task[None]:
        async def remove() -> None:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            self._bytes -= size
            self._announce_freed()

        task = asyncio.get_running_loop().create_task(remove())
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    def _announce_freed(self) -> None:
        """Wake all reservations that wait now; those that wait again wait for the next time."""
        self._freed.set()
        self._freed = asyncio.Event()


def _find(directory: Path) -> OrderedDict[str, Stored]:
    """Find complete revisions by digest, the least recently used first; removes incomplete ones."""
    found: list[tuple[float, str, Stored]] = []
    for path in directory.iterdir():
        if not _REVISION.fullmatch(path.name):
            continue
        if _is_complete(path):
            size = sum((path / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
            found.append((path.stat().st_mtime, path.name.replace("-", ":"), Stored(path, size, verified=False)))
        else:
            shutil.rmtree(path, ignore_errors=True)
    return OrderedDict((digest, stored) for _, digest, stored in sorted(found, key=lambda entry: entry[:2]))


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))
