"""The disk tier: verified adapter revisions by digest, within a budget of bytes, kept over restarts.

DIR/lock             locked while a worker uses the directory
DIR/sha256-.../      a complete revision, made and removed by one rename
DIR/partial-.../     being written or removed; those of a killed worker are removed at the start

    budget  =  stored (pinned | idle)  +  reserved for pinned ones that are not stored yet  +  being removed  +  free
                            |
                            `-- removed, the least recently used first, when a pin needs their bytes

A job pins its revisions all at once, with the bytes of those that are missing, or waits without a pin. So no job waits
for bytes while it holds some, and jobs cannot wait for each other. All methods but `open` run on the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.worker.engine_api import Removal

_PARTIAL = "partial-"
_REVISION = re.compile(r"sha256-[0-9a-f]{64}")
# Default budget in bytes; half of the disk's free space where that is less.
BUDGET_BYTES = 10_000_000_000
# Time in seconds for which later pins that fit may overtake one that does not.
OVERTAKEN_S = 1.0


class NotReservedError(Exception):
    """A revision that is neither stored nor has bytes reserved: it must be pinned again."""


class TooLargeError(Exception):
    """A pin of more bytes than the whole budget."""


@dataclass(slots=True)
class Stored:
    """A complete revision. One that was found at the start is verified at its first use."""

    path: Path
    size: int
    verified: bool
    # The ids that an activated adapter counts from; None: not read yet.
    invocation: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class _Reservation:
    """The bytes of a pinned revision that is not stored yet; `backed` once removals have made room for them."""

    size: int
    backed: bool = False
    # Held while the revision is written, and until what was not kept is removed.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, eq=False)
class _PinRequest:
    """A pin that waits: the most bytes that each revision may take, by digest, and whose job it is for."""

    sizes: Mapping[str, int]
    tenant: str
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    since: float = field(default_factory=time.monotonic)


class DiskTier:
    """The revisions below one directory."""

    def __init__(
        self, directory: Path, lock: IO[bytes], budget: int, stored: OrderedDict[str, Stored], *, temporary: bool
    ) -> None:
        self._directory = directory
        self._temporary = temporary
        self._lock = lock
        # In bytes.
        self.budget = budget
        # Least recently used first.
        self._stored = stored
        # Numbers of pins by digest, and of each tenant's pins.
        self._pins: Counter[str] = Counter()
        self._tenant_pins: dict[str, Counter[str]] = {}
        # The most bytes that revisions may take that tenants have pinned, by digest.
        self._sizes: dict[str, int] = {}
        self._requests: list[_PinRequest] = []
        self._reserved: dict[str, _Reservation] = {}
        # Bytes stored, being written and being removed, never more than the budget; bytes being removed; bytes
        # reserved and not backed.
        self.bytes = self._size(stored)
        self._removing = self._unbacked = 0
        self._freed = asyncio.Event()
        self._removals: set[asyncio.Task[None]] = set()

    @classmethod
    def open(cls, directory: Path, budget: int = 0, *, temporary: bool = False) -> DiskTier:
        """Lock a directory and find the revisions in it; blocks. Budget 0: the default. Raises ArtifactError.

        A temporary directory is removed by `close`.
        """
        lock = _lock_directory(directory)
        stored = _find_revisions(directory)
        stored_bytes = sum(revision.size for revision in stored.values())
        budget = budget or min(BUDGET_BYTES, (shutil.disk_usage(directory).free + stored_bytes) // 2)
        while stored_bytes > budget:
            _, oldest = stored.popitem(last=False)
            shutil.rmtree(oldest.path, ignore_errors=True)
            stored_bytes -= oldest.size
        return cls(directory, lock, budget, stored, temporary=temporary)

    @property
    def digests(self) -> Set[str]:
        """Return the digests of the complete revisions."""
        return self._stored.keys()

    async def close(self) -> None:
        """Wait for removals that are under way, and unlock the directory."""
        await asyncio.gather(*self._removals)
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._lock.close()

    # Pins

    async def pin(self, sizes: Mapping[str, int], tenant: str = "") -> None:
        """Pin revisions for a tenant's job, and reserve bytes for those that are not stored; waits until there are.

        `sizes` has the most bytes that each may take, by digest. Raises TooLargeError.
        """
        request = _PinRequest(sizes, tenant)
        self._requests.append(request)
        self._grant_pins()
        try:
            await request.granted
        except asyncio.CancelledError:
            if request in self._requests:
                self._requests.remove(request)
                self._grant_pins()
            elif request.granted.exception() is None:  # granted a moment before
                for digest in sizes:
                    self.unpin(digest, tenant)
            raise

    def unpin(self, digest: str, tenant: str = "") -> None:
        """Undo one pin. Raises ValueError where there is none."""
        if not self._pins[digest]:
            raise ValueError(f"adapter {digest} is not pinned")
        self._pins[digest] -= 1
        if tenant:
            self._unpin_of(tenant, digest)
        if not self._pins[digest]:
            del self._pins[digest]
            if digest in self._reserved and not self._reserved[digest].writing.locked():
                self._drop(digest)
        self._announce_freed()

    def _unpin_of(self, tenant: str, digest: str) -> None:
        own = self._tenant_pins[tenant]
        own[digest] -= 1
        if not own[digest]:
            del own[digest]
        if not own:
            del self._tenant_pins[tenant]
        if not any(digest in pins for pins in self._tenant_pins.values()):
            del self._sizes[digest]

    def fits_now(self, sizes: Mapping[str, int], tenant: str = "") -> bool:
        """Return whether a pin would be granted at once."""
        fits = self._needed(sizes) <= self._free + self._size(self._idle(sizes))
        return not self._requests and fits and self._allows(tenant, sizes)

    def _allows(self, tenant: str, sizes: Mapping[str, int]) -> bool:
        """Return whether a tenant may pin revisions; its first ones it always may.

        A running answer keeps its adapter on the disk. A tenant with pinned revisions pins more while it has no more
        than was free of the budget: the answers of one tenant alone keep half of it (see rpc.shares).
        """
        own = self._tenant_pins.get(tenant)
        if not own or (more := sum(size for digest, size in sizes.items() if digest not in own)) == 0:
            return True
        return sum(self._sizes[digest] for digest in own) + more <= self.budget - sum(self._sizes.values())

    def _grant_pins(self) -> None:
        """Grant the pins that fit, in order of arrival; after OVERTAKEN_S a waiting one blocks later ones."""
        held_up = False
        for request in tuple(self._requests):
            needed = self._needed(request.sizes)
            if request.granted.cancelled() or (needed and held_up):
                continue
            if needed + self._size(request.sizes) > self.budget:
                request.granted.set_exception(TooLargeError(f"{needed} bytes do not fit in {self.budget}"))
            elif not self._allows(request.tenant, request.sizes):
                continue
            elif self._make_room(needed, request.sizes):
                self._take(request)
                request.granted.set_result(None)
            else:
                held_up = time.monotonic() - request.since >= OVERTAKEN_S
                continue
            self._requests.remove(request)

    def _take(self, request: _PinRequest) -> None:
        self._pins.update(request.sizes.keys())
        if request.tenant:
            self._tenant_pins.setdefault(request.tenant, Counter()).update(request.sizes.keys())
            self._sizes.update(request.sizes)
        for digest, size in request.sizes.items():
            if digest not in self._stored and digest not in self._reserved:
                self._reserved[digest] = _Reservation(size)
                self._unbacked += size

    def _make_room(self, needed: int, beside: Collection[str]) -> bool:
        """Begin to remove idle revisions until `needed` bytes are free; returns whether they are or will be."""
        if needed <= self._free:
            return True
        idle = self._idle(beside)
        if needed > self._free + self._size(idle):
            return False
        for digest in idle:
            if needed <= self._free:
                break
            self.discard(digest)
        return True

    def _idle(self, beside: Collection[str] = ()) -> list[str]:
        """Return the stored revisions that no job has pinned, least recently used first, but for those `beside`."""
        return [digest for digest in self._stored if not self._pins[digest] and digest not in beside]

    def _size(self, digests: Iterable[str]) -> int:
        """Return the bytes of those revisions that are stored."""
        return sum(self._stored[digest].size for digest in digests if digest in self._stored)

    @property
    def _free(self) -> int:
        """Return the bytes that are not taken by a stored or a reserved revision."""
        return self.budget - (self.bytes - self._removing) - self._unbacked

    def _needed(self, sizes: Mapping[str, int]) -> int:
        return sum(
            size for digest, size in sizes.items() if digest not in self._stored and digest not in self._reserved
        )

    def _drop(self, digest: str) -> None:
        """Give up the reservation of a revision that nobody has pinned any more."""
        reservation = self._reserved.pop(digest)
        if reservation.backed:
            self.bytes -= reservation.size
        else:
            self._unbacked -= reservation.size

    def _announce_freed(self) -> None:
        """Grant pins that fit now, and wake the writers that wait for removals."""
        self._freed.set()
        self._freed = asyncio.Event()
        self._grant_pins()

    # Revisions

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

    @asynccontextmanager
    async def write(self, digest: str) -> AsyncIterator[Path]:
        """Make a directory to write a pinned revision to; removes what is not kept. Raises NotReservedError."""
        reservation = self._reserved.get(digest)
        if reservation is None:
            raise NotReservedError(digest)
        # An earlier attempt may still be removing its files.
        await reservation.writing.acquire()
        path = self._new_partial()
        try:
            if self._reserved.get(digest) is not reservation:
                raise NotReservedError(digest)
            while not reservation.backed and self.bytes + reservation.size > self.budget:
                await self._freed.wait()
            if not reservation.backed:
                reservation.backed = True
                self._unbacked -= reservation.size
                self.bytes += reservation.size
            path.mkdir()
            yield path
        finally:
            # Shielded: a cancellation must not leave bytes reserved.
            await asyncio.shield(self._start(self._end_writing(digest, reservation, path)))

    async def _end_writing(self, digest: str, reservation: _Reservation, path: Path) -> None:
        """Remove what was not kept; the reservation stays for the next attempt while the revision is pinned."""
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        reservation.writing.release()
        if self._reserved.get(digest) is reservation and not self._pins[digest]:
            self._drop(digest)
        self._announce_freed()

    def keep(self, path: Path, digest: str, size: int) -> Stored:
        """Store what was written to `path` as a complete, verified revision of `size` bytes. Raises OSError."""
        stored = Stored(self._directory / digest.replace(":", "-"), size, verified=True)
        path.rename(stored.path)
        self.bytes += size - self._reserved.pop(digest).size
        self._stored[digest] = stored
        return stored

    def discard(self, digest: str) -> asyncio.Task[None]:
        """Remove a revision, pinned or not. `find` misses it at once; its bytes are free when the task ends."""
        stored = self._stored.pop(digest)
        self._removing += stored.size
        trash = self._new_partial()
        with suppress(OSError):  # removed already
            stored.path.rename(trash)
        return self._start(self._remove(trash, stored))

    async def _remove(self, path: Path, stored: Stored) -> None:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        self._removing -= stored.size
        self.bytes -= stored.size
        self._announce_freed()

    async def evict(self, size: int) -> bool:
        """Remove idle revisions of `size` bytes, least recently used first; returns whether there were any."""
        removals = []
        for digest in self._idle():
            if size <= 0:
                break
            size -= self._stored[digest].size
            removals.append(self.discard(digest))
        for removal in removals:
            await asyncio.shield(removal)
        return bool(removals)

    async def forget(self, digests: Collection[str]) -> Removal:
        """Remove revisions; those that a job has pinned stay and count as left."""
        idle = [digest for digest in self._idle() if digest in digests]
        for removal in [self.discard(digest) for digest in idle]:
            await asyncio.shield(removal)
        return Removal(len(idle), sum(digest in self._stored for digest in digests))

    def _new_partial(self) -> Path:
        """Return the path of a directory for what is being written or removed; it is not made yet."""
        return self._directory / f"{_PARTIAL}{secrets.token_hex(8)}"

    def _start(self, removal: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task


def _lock_directory(directory: Path) -> IO[bytes]:
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


def _find_revisions(directory: Path) -> OrderedDict[str, Stored]:
    """Return complete revisions by digest, the least recently used first; removes what a killed worker left."""
    revisions: list[tuple[float, str, Stored]] = []
    for path in directory.iterdir():
        if _REVISION.fullmatch(path.name) and _is_complete(path):
            size = sum((path / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
            revisions.append((path.stat().st_mtime, path.name.replace("-", ":"), Stored(path, size, verified=False)))
        elif _REVISION.fullmatch(path.name) or path.name.startswith(_PARTIAL):
            shutil.rmtree(path, ignore_errors=True)
    return OrderedDict((digest, stored) for _, digest, stored in sorted(revisions, key=lambda entry: entry[:2]))


def _is_complete(revision: Path) -> bool:
    """Return whether a revision's directory has its files."""
    return all((revision / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))
