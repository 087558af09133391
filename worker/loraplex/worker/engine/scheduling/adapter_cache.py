"""Adapters in three tiers: files, host memory, device slots; brought in beside the batch.

              loader thread                     loader thread (CUDA)        step thread, in poll
 request ──▶ pending ─▶ loading ──▶ host tier, held ──▶ transfer ──▶ copied ──▶ resident ──pin──▶ pinned ──unpin──▶ idle
                         read()                          transfer()   install(), within the swap budget         │
                                    host tier, kept while its budget allows ◀────────── evicted ◀───────────────┘

What the sequences wait for decides which adapter is next, and which one leaves: adapter_slots.py.

Operators' commands bring in adapters that no sequence waits for. They are carried out one after the other, each once
some slot is empty or has an adapter that nobody waits for: no sequence is delayed by one, and at most one adapter is
held in memory for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from loraplex.worker.engine.scheduling.adapter_slots import WINDOW, Demand, DeviceSlots, Urgency, require_integrity
from loraplex.worker.engine.scheduling.adapter_tiers import AdapterMemory, HostTier
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine_api import AdapterSource, Removal, TierStats

P = TypeVar("P")
# Maximum seconds of copies for each second of steps, in the long run.
SHARE = 0.5
# Maximum time of copies between two steps, as a share of a step; one adapter may always be copied.
STALL_SHARE = 0.2
# Maximum number of copies on the device that wait for a slot, whatever the host budget says: they are held twice.
MAX_AHEAD = 2


class SwapBudget:
    """Measures steps (the time between polls) and copies; in polls without running sequences nothing is bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = False
        self._polled_at: float | None = None
        self._step_s = 0.0
        self._spent_s = 0.0
        self._last_s = 0.0
        # Below zero: the next steps pay for what was spent.
        self._credit_s = 0.0

    def begin_poll(self, *, busy: bool) -> None:
        """Begin a poll; `busy`: sequences run."""
        now = self._clock()
        if busy and self._polled_at is not None:
            self._step_s = max(0.0, now - self._polled_at - self._spent_s)
            earned_s = SHARE * self._step_s
            self._credit_s = min(earned_s, self._credit_s + earned_s)
        else:
            self._credit_s = 0.0
        self._busy, self._polled_at, self._spent_s = busy, now if busy else None, 0.0

    def allows(self) -> bool:
        """Tell whether one more adapter may be copied in this poll."""
        if not self._busy:
            return True
        if not self._spent_s:
            return self._credit_s >= 0
        return self._spent_s + self._last_s <= STALL_SHARE * self._step_s

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Measure one copy."""
        began = self._clock()
        try:
            yield
        finally:
            self._last_s = self._clock() - began
            self._spent_s += self._last_s
            self._credit_s -= self._last_s


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The requests that have ended: digests that can be pinned now, and those that could not be loaded."""

    arrived: tuple[str, ...]
    failed: tuple[tuple[str, Exception], ...]


class AdapterCache(Generic[P]):
    """Keeps adapters in slots 0 to slots - 1. All calls come from the step thread."""

    def __init__(
        self,
        slots: int,
        memory: AdapterMemory[P],
        loads: LoaderThreads[P],
        host_bytes: int,
        budget: SwapBudget | None = None,
    ) -> None:
        self.demand = Demand()
        self._memory = memory
        self._loads = loads
        self._host: HostTier[P] = HostTier(host_bytes, memory.size)
        self.slots = DeviceSlots(slots, self.demand)
        self._budget = budget or SwapBudget()
        # Adapters whose read has not begun; those that are being read, and whether they are still requested.
        self._pending: dict[str, AdapterSource] = {}
        self._loading: dict[str, bool] = {}
        self._oldest_next, self._largest = False, 0
        # Copies on the device, where memory needs them, beside the batch; one that is being made is None.
        self._copies: dict[str, P | None] = {}
        # Arrivals that the next poll returns.
        self._arrived: list[str] = []
        self._load_failures = 0
        self._failed: list[tuple[str, Exception]] = []
        # Operators' commands that have not begun, the digest of the one that is under way, and those that have ended.
        self._commands: dict[str, AdapterSource] = {}
        self._under_way: str | None = None
        self._ended: list[tuple[str, str]] = []

    def request(self, source: AdapterSource) -> None:
        """Bring an adapter in, unless that is under way; poll reports when it is there."""
        digest = source.digest
        if digest in self._loading:
            self._loading[digest] = True
        elif self._host.hold(digest):
            self.demand.lacks_slot(digest)
        else:
            self._pending[digest] = source
            self._feed()

    def withdraw(self, digest: str) -> None:
        """Stop bringing in an adapter that nobody waits for any more; one that is being read is kept in host memory."""
        if digest == self._under_way:
            return
        self._drop_request(digest)
        self._feed()

    def unpin(self, digest: str) -> None:
        """Undo one pin. Raises ValueError where there is none."""
        self.slots.unpin(digest)
        self._host.touch(digest)

    def warm_adapter(self, source: AdapterSource) -> None:
        """Bring an adapter into a slot when one can be had; `ended_commands` reports when that has ended."""
        if source.digest in self.slots:
            self._ended.append((source.digest, ""))
        else:
            self._commands[source.digest] = source

    def ended_commands(self) -> list[tuple[str, str]]:
        """Return the digests whose commands have ended since the last call, each with why it can't be loaded, or ""."""
        ended, self._ended = self._ended, []
        return ended

    def pin_adapter(self, source: AdapterSource) -> None:
        """Bring an adapter into a slot and keep it there. Raises ValueError where no slot would be left for others."""
        self.slots.keep(source.digest)
        if source.digest in self.slots.draining:
            self._spare(source.digest)
        self.warm_adapter(source)

    def unpin_adapter(self, digest: str) -> None:
        """Undo pin_adapter: the adapter may leave like any other, and a command not yet begun is forgotten."""
        self.slots.kept.pop(digest, None)
        self._commands.pop(digest, None)

    def forget_others(self, keep: Container[str]) -> Removal:
        """Remove all adapters except `keep` from host memory and slots; those in use count as left."""
        removed = in_use = 0
        for digest in [digest for digest in self._host.kept_digests if digest not in keep]:
            self._host.drop(digest)
            removed += 1
        for digest in [digest for digest in self.slots.digests if digest not in keep]:
            dropped = self.slots.drop(digest)
            removed, in_use = removed + dropped, in_use + (not dropped)
        coming = {*self._commands, *self._pending, *self._loading, *self._host.held_digests}
        return Removal(removed, in_use + sum(one not in keep and one not in self.slots for one in coming))

    def poll(self, *, busy: bool = False) -> Arrivals:
        """Put what has been loaded into slots, the most urgent first; `busy`: sequences run, which that delays."""
        while self._may_command():
            digest = next(iter(self._commands))
            source = self._commands.pop(digest)
            self._under_way = digest
            if digest in self.slots:
                self._end_command(digest)
            else:
                self.request(source)
        self.slots.now += 1
        self._budget.begin_poll(busy=busy)
        if self._loads.has_ended():
            for digest, result in self._loads.ended():
                self._take(digest, result)
        if (lacking := self._lacking()) or self.slots.draining:
            self._install_waiting(lacking)
        self._feed()
        arrivals = Arrivals(tuple(self._arrived), tuple(self._failed))
        self._arrived, self._failed = [], []
        return arrivals

    def has_work(self) -> bool:
        """Tell whether poll would do anything now; asked while nothing runs, so that no budget counts."""
        if self._loads.has_ended():
            return True
        # A slot that has drained goes to the adapter it drained for, or takes pins again.
        if any(map(self.slots.idle, self.slots.draining)) and None not in self._copies.values():
            return True
        movable = (digest not in self.slots and self._can_move(digest) for digest in self._lacking())
        return (any(movable) and self.slots.has_room()) or self._may_command()

    @property
    def tiers(self) -> TierStats:
        """Return what the tiers hold now."""
        slots, host, loading = self.slots, self._host, len(self._loading)
        return TierStats(slots.loads, slots.swaps, self._load_failures, loading, host.bytes, slots.bytes)

    def check(self, pins: Mapping[str, int]) -> None:
        """Raise AdapterIntegrityError unless tiers, slots, requests and demand agree, and exactly `pins` are held."""
        self._host.check()
        self.slots.check(pins)
        # Nobody waits for what the next poll returns.
        settled = {*self._arrived, *(digest for digest, _ in self._failed)}
        due = {*self.demand.parked_digests, *((self._under_way,) if self._under_way else ())} - settled
        requested = (digest for digest, requested in self._loading.items() if requested)
        places = [*self._pending, *requested, *self._host.held_digests]
        require_integrity(sorted(places) == sorted(due), f"{due} are requested, and {places} are on their way")
        lacking = set(self.demand.lacking) - settled
        held = self._host.held_digests & self.demand.parked_digests
        require_integrity(held == lacking, f"{held} are in host memory and waited for, but {lacking} lack a slot")
        copied = {digest for digest, copy in self._copies.items() if copy is not None}
        require_integrity(copied <= self._host.held_digests, "a copy for a slot is not held")

    def close(self) -> None:
        """End the loads, after what is under way."""
        self._loads.close()

    def _may_command(self) -> bool:
        """Tell whether a command may begin."""
        return self._under_way is None and bool(self._commands) and self.slots.has_room()

    def _take(self, digest: str, result: P | Exception) -> None:
        requested = self._end_load(digest, result)
        if isinstance(result, Exception):
            self._end_command(digest, str(result))
            if requested:
                self._host.let_go(digest)
                if digest in self.slots:  # it drains; sequences that wait for it can use it as it is
                    self.slots.draining.pop(digest, None)
                    self._arrived.append(digest)
                else:
                    self._fail(digest, result)

    def _end_load(self, digest: str, result: P | Exception) -> bool:
        """Put what a read or copy has returned into its place; return whether the adapter is still requested."""
        if digest not in self._loading:
            requested = self._host.held(digest) is not None
            if requested and not isinstance(result, Exception):
                self._copies[digest] = result
            else:
                self._copies.pop(digest, None)
            return requested
        requested = self._loading.pop(digest)
        if not isinstance(result, Exception):
            self._largest = max(self._largest, self._memory.size(result))
            if requested:
                self._host.hold(digest, result)
                self.demand.lacks_slot(digest)
            else:
                self._host.put(digest, result)
        return requested

    def _feed(self) -> None:
        """Start reads while a loader is free and host memory has room."""
        # Keep loaders free for copies to the device: slow files must not delay adapters that are in memory.
        most = self._loads.most - self._memory.transfers
        while self._pending and (ahead := len(self._loading) + 1) <= most:
            # A reservation of the largest so far for each load: it ends with the load, whatever comes of that.
            if not self._host.has_room_for(ahead, self._largest, MAX_AHEAD):
                return
            # An adapter whose copy nobody waits for any more is read again once that copy has ended.
            window = [digest for digest in islice(self._pending, WINDOW) if digest not in self._copies]
            if not window:
                return
            # By turns the adapter for which most wait and the one that was requested first, so that none starves.
            digest = window[0] if self._oldest_next else max(window, key=self.demand.waiting_for)
            self._oldest_next = not self._oldest_next
            self._loading[digest] = True
            self._loads.start(digest, partial(self._memory.read, self._pending.pop(digest)))

    def _installable(self, digest: str, *, first: bool) -> P | None:
        """Return what can be installed now of an adapter in host memory; start its copy where one is needed.

        `first`: it is the most urgent one, which does not wait for the places of others.
        """
        held = self._host.held(digest)
        if not self._memory.transfers:
            return held
        if digest not in self._copies and held is not None and (first or len(self._copies) < MAX_AHEAD):
            self._copies[digest] = None
            self._loads.start(digest, partial(self._memory.transfer, held))
        return self._copies.get(digest)

    def _can_move(self, digest: str) -> bool:
        """Tell whether `_installable` would return something or start a copy."""
        if not self._memory.transfers or self._copies.get(digest) is not None:
            return True
        return digest not in self._copies and len(self._copies) < MAX_AHEAD

    def _fail(self, digest: str, error: Exception) -> None:
        self._failed.append((digest, error))
        self._load_failures += 1

    def _lacking(self) -> list[str]:
        """Return the adapters that lack only a slot, the most urgent first; the one of a command comes last."""
        lacking, commanded = list(self.demand.order()), self._under_way
        if commanded is not None and self._host.held(commanded) is not None and commanded not in self.demand.lacking:
            lacking.append(commanded)
        return lacking

    def _install_waiting(self, lacking: list[str]) -> None:
        starved: list[str] = []
        first = room = True
        for digest in lacking:
            urgency = self.demand.urgency(digest)
            if digest in self.slots:  # it drains for another one
                if urgency is Urgency.OVERDUE and not starved:
                    self._spare(digest)
                continue
            if urgency is Urgency.CALM and not room:
                break
            prepared = self._installable(digest, first=first)
            first = False
            allowed = self._budget.allows() or urgency is Urgency.OVERDUE
            slot = self.slots.claim_slot(digest) if prepared is not None and allowed else None
            if prepared is not None and slot is not None:
                self._put(digest, prepared, slot)
                continue
            room = room and prepared is None
            if urgency is not Urgency.CALM and not self.slots.has_room():
                starved.append(digest)
        for digest in self.slots.drain(starved):
            self._spare(digest)

    def _put(self, digest: str, prepared: P, slot: int) -> None:
        try:
            with self._budget.spending():
                self._memory.install(prepared, slot)
        except Exception as error:  # any: it belongs to this adapter alone
            self.slots.return_slot(slot)
            self._end_command(digest, str(error))
            self._fail(digest, error)
        else:
            self.slots.occupy(digest, slot, self._memory.size(prepared))
            self._arrived.append(digest)
        self._drop_request(digest)

    def _spare(self, digest: str) -> None:
        """Let a draining slot take pins again."""
        self.slots.draining.pop(digest, None)
        if self.demand.parked(digest):
            self._drop_request(digest)
            self._arrived.append(digest)

    def _drop_request(self, digest: str) -> None:
        """Forget a request: what is being read is then kept in host memory, though not held."""
        self._pending.pop(digest, None)
        if digest in self._loading:
            self._loading[digest] = False
        if self._copies.get(digest) is not None:  # else it is dropped when it ends
            del self._copies[digest]
        self._host.let_go(digest)
        self._end_command(digest)

    def _end_command(self, digest: str, error: str = "") -> None:
        if digest == self._under_way:
            self._under_way = None
            self._ended.append((digest, error))
