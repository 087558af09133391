"""Adapters in numbered device slots: loaded beside the batch, evicted when least recently used, never while pinned.

               loader thread                        step thread, in poll
 request ──▶ wanted ──▶ loading ──▶ prepared ──▶ resident: fresh ──pin──▶ pinned ──unpin──▶ idle ──▶ evicted
                          prepare()            install(prepared, slot)

A fresh adapter stays until it was pinned once or nobody waits for it: so each load serves someone. While one waits and
all slots are pinned for long, one slot drains: it takes no new pins, so that a stream of requests for resident
adapters can't keep all others out.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from worker.scheduling.contract import AdapterSource
from worker.scheduling.residency import Arrivals

P = TypeVar("P")

# Loaded or loading, but in no slot yet: bounds the host memory of a queue of adapters.
AHEAD = 2
# Polls, which are steps, that a prepared adapter waits for a pinned slot before one drains.
PATIENCE_POLLS = 64


@dataclass(slots=True)
class _Resident:
    slot: int
    pins: int = 0
    fresh: bool = True


class AdapterCache(Generic[P]):
    """Keeps adapters in slots 0 to slots - 1; see worker.scheduling.residency.Residency.

    `prepare` runs in the loader thread (reads files, casts); `install` on the thread that polls, between steps. What
    either raises fails that adapter alone. `on_prepared` is called from the loader thread when poll has news.
    """

    def __init__(
        self,
        slots: int,
        prepare: Callable[[AdapterSource], P],
        install: Callable[[P, int], None],
        on_prepared: Callable[[], None],
    ) -> None:
        self._prepare = prepare
        self._install = install
        self._on_prepared = on_prepared
        self._free = list(range(slots - 1, -1, -1))
        # Least recently used first.
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._digests: tuple[str, ...] = ()
        self._pinned = 0
        self._wanted: dict[str, AdapterSource] = {}
        # Whether somebody still waits for what the loader has in hand.
        self._loading: dict[str, bool] = {}
        self._prepared: dict[str, P] = {}
        self._draining: str | None = None
        self._starved_polls = 0
        self._jobs: queue.SimpleQueue[AdapterSource | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, P | Exception]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._load, name="adapter-loader", daemon=True)
        self._thread.start()

    def request(self, source: AdapterSource) -> None:
        """Have it loaded; poll tells when it is there. Nothing happens where that is under way already."""
        digest = source.digest
        if digest in self._loading:
            self._loading[digest] = True
        elif digest not in self._prepared:
            self._wanted[digest] = source
            self._feed()

    def withdraw(self, digest: str) -> None:
        """Nobody waits for it any more: what is not in a slot yet is dropped."""
        self._drop_request(digest)
        resident = self._resident.get(digest)
        if resident:
            resident.fresh = False
        self._feed()

    def slot_of(self, digest: str) -> int | None:
        """Its slot, or None where it can't be pinned now: not resident, or draining."""
        resident = self._resident.get(digest)
        return None if resident is None or digest == self._draining else resident.slot

    def pin(self, digest: str) -> int:
        """Keep it in its slot until as many unpins. Raises KeyError where it is not resident."""
        resident = self._resident[digest]
        self._resident.move_to_end(digest)
        self._pinned += not resident.pins
        resident.pins += 1
        resident.fresh = False
        return resident.slot

    def unpin(self, digest: str) -> None:
        """Undo one pin. Raises ValueError where there is none."""
        resident = self._resident[digest]
        if not resident.pins:
            raise ValueError(f"adapter {digest} is not pinned")
        self._resident.move_to_end(digest)
        resident.pins -= 1
        self._pinned -= not resident.pins

    def poll(self) -> Arrivals:
        """Put what has been loaded into free slots, or in place of the least recently used that nobody needs."""
        arrived: list[str] = []
        failed: list[tuple[str, Exception]] = []
        while not self._results.empty():
            digest, result = self._results.get()
            if not self._loading.pop(digest):
                continue
            if isinstance(result, Exception):
                failed.append((digest, result))
            else:
                self._prepared[digest] = result
        if self._prepared or self._draining:
            self._install_prepared(arrived, failed)
        self._feed()
        return Arrivals(tuple(arrived), tuple(failed))

    def has_work(self) -> bool:
        """Whether poll would do anything now."""
        return not self._results.empty() or (
            bool(self._prepared) and (bool(self._free) or self._evictable() is not None)
        )

    @property
    def used(self) -> int:
        """Slots with an adapter."""
        return len(self._resident)

    @property
    def pinned(self) -> int:
        """Slots that are pinned."""
        return self._pinned

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of the adapters in the slots."""
        return self._digests

    def close(self) -> None:
        """End the loader thread, after what it has in hand."""
        self._wanted.clear()
        self._jobs.put(None)
        self._thread.join()

    def _load(self) -> None:
        while (source := self._jobs.get()) is not None:
            result: P | Exception
            try:
                result = self._prepare(source)
            except Exception as error:  # any: it belongs to this adapter alone
                result = error
            self._results.put((source.digest, result))
            self._on_prepared()

    def _feed(self) -> None:
        while self._wanted and len(self._loading) + len(self._prepared) < AHEAD:
            digest = next(iter(self._wanted))
            self._loading[digest] = True
            self._jobs.put(self._wanted.pop(digest))

    def _drop_request(self, digest: str) -> bool:
        if digest in self._loading:
            was_wanted, self._loading[digest] = self._loading[digest], False
            return was_wanted
        return self._wanted.pop(digest, None) is not None or self._prepared.pop(digest, None) is not None

    def _install_prepared(self, arrived: list[str], failed: list[tuple[str, Exception]]) -> None:
        # In the order of the requests: the first one that finds no slot keeps those behind it waiting.
        for digest in list(self._prepared):
            if digest in self._resident:
                # It drained when it was asked for, and all that were in front have their slots now.
                self._draining = None
                del self._prepared[digest]
                arrived.append(digest)
                continue
            slot = self._make_room()
            if slot is None:
                self._be_patient()
                return
            self._starved_polls = 0
            self._put(digest, slot, arrived, failed)
        self._starved_polls = 0
        self._stop_draining(arrived)

    def _put(self, digest: str, slot: int, arrived: list[str], failed: list[tuple[str, Exception]]) -> None:
        prepared = self._prepared.pop(digest)
        try:
            self._install(prepared, slot)
        except Exception as error:  # any: it belongs to this adapter alone
            self._free.append(slot)
            failed.append((digest, error))
        else:
            self._resident[digest] = _Resident(slot)
            arrived.append(digest)
        self._digests = tuple(self._resident)

    def _make_room(self) -> int | None:
        if self._free:
            return self._free.pop()
        digest = self._evictable()
        if digest is None:
            return None
        if digest == self._draining:
            self._draining = None
        return self._resident.pop(digest).slot

    def _evictable(self) -> str | None:
        idle = (digest for digest, resident in self._resident.items() if not resident.pins and not resident.fresh)
        return next(idle, None)

    def _be_patient(self) -> None:
        self._starved_polls += 1
        if self._starved_polls < PATIENCE_POLLS or self._draining is not None:
            return
        pinned = [(resident.pins, digest) for digest, resident in self._resident.items() if resident.pins]
        if pinned:
            self._draining = min(pinned)[1]

    def _stop_draining(self, arrived: list[str]) -> None:
        draining, self._draining = self._draining, None
        # Who came while it drained has asked for it to be loaded again: it is still there.
        if draining is not None and self._drop_request(draining):
            arrived.append(draining)
