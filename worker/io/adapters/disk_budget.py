"""The bytes of the disk tier: which revisions are pinned, and which may be written.

    budget  =  stored (pinned | idle)  +  reserved for pinned ones that are not stored yet  +  being removed  +  free
                            |
                            `-- removed, the least recently used first, when a pin needs their bytes

A job pins its revisions all at once, with the bytes of those that are missing, or waits without a pin. So no job waits
for bytes while it holds some, and jobs cannot wait for each other. All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Stored:
    """A complete revision. One that was found at the start is verified at its first use."""

    path: Path
    size: int
    verified: bool


class PinnedShares:
    """The bytes that each tenant's jobs have pinned, on a disk of `limit` bytes. Pins of no tenant count for nobody.

    A running answer keeps its adapter on the disk to its end. A tenant with pinned revisions pins more only while it
    then has no more than what was left of the budget, so that the answers of one tenant alone keep half of it (see
    rpc.shares).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Numbers of each tenant's pins by digest, and bytes by digest.
        self._of_tenant: dict[str, Counter[str]] = {}
        self._sizes: dict[str, int] = {}

    def allow(self, tenant: str, sizes: Mapping[str, int]) -> bool:
        """Tell whether a tenant may pin revisions, given as bytes by digest; the first ones it always may."""
        own = self._of_tenant.get(tenant)
        if not own or (more := sum(size for digest, size in sizes.items() if digest not in own)) == 0:
            return True
        had, taken = sum(map(self._sizes.__getitem__, own)), sum(self._sizes.values())
        return had + more <= self._limit - taken

    def take(self, tenant: str, sizes: Mapping[str, int]) -> None:
        """Count pins of a tenant until as many `give`."""
        if tenant:
            self._of_tenant.setdefault(tenant, Counter()).update(sizes.keys())
            self._sizes.update(sizes)

    def give(self, tenant: str, digest: str) -> bool:
        """Undo a pin; return whether the tenant has none of the revision any more."""
        if not tenant:
            return False
        own = self._of_tenant[tenant]
        own[digest] -= 1
        if own[digest]:
            return False
        del own[digest]
        if not own:
            del self._of_tenant[tenant]
        if not any(digest in pins for pins in self._of_tenant.values()):
            del self._sizes[digest]
        return True


# Time in seconds for which later pins that fit may overtake one that does not.
OVERTAKEN_S = 1.0


class TooLargeError(Exception):
    """A pin of more bytes than the whole budget."""


@dataclass(slots=True, eq=False)
class DiskReservation:
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
    granted: asyncio.Future[None]
    since: float


class DiskBudget:
    """Pins and reservations within `limit` bytes; `discard` begins to remove a stored revision."""

    def __init__(
        self,
        limit: int,
        stored: OrderedDict[str, Stored],
        discard: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        # Least recently used first.
        self.stored = stored
        self._discard = discard
        self._clock = clock
        self._pins: Counter[str] = Counter()
        self._shares = PinnedShares(limit)
        self._requests: list[_PinRequest] = []
        self._reserved: dict[str, DiskReservation] = {}
        # Bytes stored, backed and being removed; bytes being removed; bytes reserved and not backed.
        self.used = sum(revision.size for revision in stored.values())
        self._removing = self._unbacked = 0
        self._freed = asyncio.Event()

    async def pin(self, sizes: Mapping[str, int], tenant: str = "") -> None:
        """Pin revisions for a tenant's job, and reserve bytes for those that are not stored; waits until there are.

        `sizes` has the most bytes that each may take, by digest. Raises TooLargeError.
        """
        request = _PinRequest(sizes, tenant, asyncio.get_running_loop().create_future(), self._clock())
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
        if self._shares.give(tenant, digest) and self._pins[digest]:  # another tenant has it: only the share is free
            self._grant_pins()
        if not self._pins[digest]:
            del self._pins[digest]
            if digest in self._reserved and not self._reserved[digest].writing.locked():
                self._drop(digest)
            self.announce_freed()

    def fits_now(self, sizes: Mapping[str, int], tenant: str = "") -> bool:
        """Return whether a pin would be granted at once."""
        fits = self._needed(sizes) <= self._free + self._bytes_of(self.idle(sizes))
        return not self._requests and fits and self._shares.allow(tenant, sizes)

    def idle(self, beside: Collection[str] = ()) -> list[str]:
        """Return the stored revisions that no job has pinned, least recently used first, but for those `beside`."""
        return [digest for digest in self.stored if not self._pins[digest] and digest not in beside]

    def reservation(self, digest: str) -> DiskReservation | None:
        """Return the reservation of a pinned revision that is not stored."""
        return self._reserved.get(digest)

    async def back(self, reservation: DiskReservation) -> None:
        """Wait until removals have made the room that was granted."""
        while not reservation.backed and self.used + reservation.size > self.limit:
            await self._freed.wait()
        if not reservation.backed:
            reservation.backed = True
            self._unbacked -= reservation.size
            self.used += reservation.size

    def convert(self, digest: str, stored: Stored) -> None:
        """Turn a backed reservation into a stored revision."""
        self.used += stored.size - self._reserved.pop(digest).size
        self.stored[digest] = stored

    def end_writing(self, digest: str, reservation: DiskReservation) -> None:
        """Unlock a reservation whose files are gone; it stays for the next attempt while the revision is pinned."""
        reservation.writing.release()
        if self._reserved.get(digest) is reservation and not self._pins[digest]:
            self._drop(digest)
        self.announce_freed()

    def begin_removal(self, digest: str) -> Stored:
        """Take a revision out of the stored ones; its bytes stay in use until `end_removal`."""
        stored = self.stored.pop(digest)
        self._removing += stored.size
        return stored

    def end_removal(self, stored: Stored) -> None:
        """Free the bytes of a revision that was removed."""
        self._removing -= stored.size
        self.used -= stored.size
        self.announce_freed()

    def announce_freed(self) -> None:
        """Grant pins that fit now, and wake the writers that wait for removals."""
        self._freed.set()
        self._freed = asyncio.Event()
        self._grant_pins()

    @property
    def _free(self) -> int:
        """Return the bytes that are not taken by a stored or a reserved revision."""
        return self.limit - (self.used - self._removing) - self._unbacked

    def _bytes_of(self, digests: Collection[str]) -> int:
        return sum(self.stored[digest].size for digest in digests)

    def _needed(self, sizes: Mapping[str, int]) -> int:
        missing = (digest for digest in sizes if digest not in self.stored and digest not in self._reserved)
        return sum(sizes[digest] for digest in missing)

    def _grant_pins(self) -> None:
        """Grant the pins that fit, in order of arrival; one that has waited for OVERTAKEN_S holds later ones up."""
        held_up = False
        for request in tuple(self._requests):
            needed = self._needed(request.sizes)
            if request.granted.cancelled() or (needed and held_up):
                continue
            kept = [digest for digest in request.sizes if digest in self.stored]
            if needed + self._bytes_of(kept) > self.limit:
                request.granted.set_exception(TooLargeError(f"{needed} bytes do not fit in {self.limit}"))
            elif not self._shares.allow(request.tenant, request.sizes):
                continue
            elif self._make_room(needed, request.sizes):
                self._shares.take(request.tenant, request.sizes)
                self._take(request.sizes)
                request.granted.set_result(None)
            else:
                held_up = self._clock() - request.since >= OVERTAKEN_S
                continue
            self._requests.remove(request)

    def _make_room(self, needed: int, beside: Collection[str]) -> bool:
        """Begin to remove idle revisions until `needed` bytes are free; returns whether they are or will be."""
        if needed <= self._free:
            return True
        idle = self.idle(beside)
        if needed > self._free + self._bytes_of(idle):
            return False
        for digest in idle:
            if needed <= self._free:
                break
            self._discard(digest)
        return True

    def _take(self, sizes: Mapping[str, int]) -> None:
        for digest, size in sizes.items():
            self._pins[digest] += 1
            if digest not in self.stored and digest not in self._reserved:
                self._reserved[digest] = DiskReservation(size)
                self._unbacked += size

    def _drop(self, digest: str) -> None:
        reservation = self._reserved.pop(digest)
        if reservation.backed:
            self.used -= reservation.size
        else:
            self._unbacked -= reservation.size
