"""10,000 random operations on the tiers, with what must hold checked after each."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from loraplex.worker.engine.scheduling import adapter_slots as demand
from loraplex.worker.engine.scheduling.adapter_cache import SwapBudget
from loraplex.worker.engine.scheduling.adapter_slots import Urgency
from loraplex.worker.engine.scheduling.admission import RowShares, WaitingSequences
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, NewSequence

OPERATIONS = 10_000
SLOTS = 3
ROWS = 8
SIZES = {f"adapter {number}": 1 + number % 5 for number in range(12)}
PASSED_OVER_MOST = 8
AT_NIGHT = [pytest.param(*case, marks=pytest.mark.nightly) for case in ((0, False), (1000, True))]
BROKEN = frozenset(["adapter 11"])


class Walk:
    """The scheduler's part, at random: sequences come, leave, run, are preempted and end; loads end in any order."""

    def __init__(self, loads: Any, seed: int) -> None:
        self.loads = loads
        self.cache = loads.cache
        self.waiting = WaitingSequences(self.cache, RowShares())
        self.chance = random.Random(seed)
        self.waits: list[Sequence] = []
        self.running: list[Sequence] = []
        self.asked = 0
        self.outcomes: Counter[str] = Counter()
        self.passed_over: Counter[Sequence] = Counter()
        self.passed_over_most = 0

    def step(self) -> None:
        weights = {"ask": 5, "leave": 1, "admit": 6, "end": 4, "preempt": 1, "load": 5, "poll": 6, "spoil": 1}
        (operation,) = self.chance.choices(list(weights), list(weights.values()))
        getattr(self, operation)()

    # ---- operations

    def ask(self) -> None:
        if len(self.waits) < 20:
            digest = self.chance.choice(list(SIZES)) if self.chance.random() < 0.95 else ""
            self.ask_for(digest, self.chance.choice([0, 0, 0, 1]))

    def ask_for(self, digest: str, priority: int = 0) -> None:
        adapter = AdapterSource(digest, digest) if digest else None
        sequence = Sequence(
            NewSequence(str(self.asked), (1,), adapter=adapter, priority=priority), self.asked, frozenset()
        )
        self.asked += 1
        self.waits.append(sequence)
        self.waiting.enter(sequence)

    def leave(self) -> None:
        if self.waits:
            self.forget(self.chance.choice(self.waits), "withdrawn")

    def forget(self, sequence: Sequence, outcome: str) -> None:
        self.waiting.leave(sequence)
        self.waits.remove(sequence)
        self.outcomes[outcome] += 1

    def admit(self) -> None:
        sequence = self.waiting.head(ROWS) if len(self.running) < ROWS else None
        if sequence is None:
            return
        lacking = set(self.cache.demand.lacking)
        self.waiting.take(sequence)
        self.waits.remove(sequence)
        self.running.append(sequence)
        for other in self.waits:
            if other.spec.adapter and other.spec.adapter.digest in lacking and other.rank < sequence.rank:
                self.passed_over[other] += 1
        self.passed_over_most = max(self.passed_over_most, self.passed_over.pop(sequence, 0))

    def end(self) -> None:
        if self.running:
            self.stop(self.chance.choice(self.running))
            self.outcomes["arrived"] += 1

    def stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.cached_tokens = 0
        if sequence.spec.adapter:
            self.cache.unpin(sequence.spec.adapter.digest)

    def preempt(self) -> None:
        if self.running:
            sequence = self.chance.choice(self.running)
            self.stop(sequence)
            self.waits.append(sequence)
            self.waiting.enter(sequence)

    def load(self) -> None:
        if under_way := self.loads.loading():
            self.loads.finish_load(self.chance.choice(under_way))

    def poll(self, *, busy: bool | None = None) -> None:
        # A ready sequence is work, too, as the scheduler has it.
        had_work = self.cache.has_work() or self.waiting.ready > 0
        busy = self.chance.random() < 0.5 if busy is None else busy
        arrivals = self.cache.poll(busy=busy)
        for digest in arrivals.arrived:
            # Sequences that come to the head ask again for an adapter whose slot a starved one took.
            assert self.cache.slots.slot_of(digest) is not None or self.starved
            assert self.waiting.parked_for(digest), "an adapter for nobody"
            self.waiting.arrived(digest)
        for digest, error in arrivals.failed:
            assert str(error) == f"{digest} is broken"
            failed = self.waiting.parked_for(digest)
            assert failed, "a failure for nobody"
            for sequence in failed:
                self.forget(sequence, "failed")
        if not (self.running or busy):
            assert had_work or not (arrivals.arrived or arrivals.failed)
            assert not self.cache.has_work() or self.waiting.ready > 0, "a poll leaves nothing that the next could do"

    def spoil(self) -> None:
        self.loads.broken = BROKEN | frozenset(self.chance.sample(list(SIZES), self.chance.choice([0, 0, 1, 3])))

    # ---- what must hold

    def check(self) -> None:
        self.cache.check(self.pins)
        self.check_slots()
        self.check_bytes()
        self.check_requests()
        assert max(self.passed_over.values(), default=0) <= PASSED_OVER_MOST
        assert self.cache.demand.parked_count + self.ready == len(self.waiting) == len(self.waits)

    @property
    def starved(self) -> bool:
        demand = self.cache.demand
        return any(demand.urgency(digest) is not Urgency.CALM for digest in demand.lacking)

    @property
    def ready(self) -> int:
        return self.waiting.ready

    @property
    def pins(self) -> Counter[str]:
        return Counter(sequence.spec.adapter.digest for sequence in self.running if sequence.spec.adapter)

    def check_slots(self) -> None:
        slots = self.cache.slots
        for sequence in self.running:
            if sequence.spec.adapter:
                digest = sequence.spec.adapter.digest
                assert self.loads.installed[sequence.adapter_slot] == digest, "evicted while it was pinned"
                assert slots._resident[digest].slot == sequence.adapter_slot
        held = [resident.slot for resident in slots._resident.values()] + slots._free
        assert sorted(held) == list(range(SLOTS)), "a slot was lost or is held twice"
        assert self.cache.slots.used == len(self.cache.slots.digests) == len(slots._resident)
        pins = self.pins
        assert {digest: resident.pins for digest, resident in slots._resident.items() if resident.pins} == pins
        assert self.cache.slots.pinned == len(pins)
        assert slots.draining.keys() <= slots._resident.keys()

    def check_bytes(self) -> None:
        host = self.cache._host
        assert not host._held.keys() & host._idle.keys()
        assert host.held_bytes == sum(map(SIZES.__getitem__, host._held))
        assert host.bytes == host.held_bytes + sum(map(SIZES.__getitem__, host._idle)) == self.cache.tiers.host_bytes
        assert host.bytes <= max(host.budget, host.held_bytes)
        assert self.cache.tiers.device_bytes == sum(map(SIZES.__getitem__, self.cache.slots.digests))
        largest = max(SIZES.values())
        assert host.held_bytes <= max(host.budget + largest, 2 * largest) + len(self.cache._loading) * largest

    def check_requests(self) -> None:
        cache = self.cache
        parked = {one.spec.adapter.digest for one in self.waits if one.spec.adapter} & cache.demand._parked.keys()
        assert parked == cache.demand._parked.keys()
        assert cache._host._held.keys() == set(cache.demand.lacking)
        loading = {digest for digest, wanted in cache._loading.items() if wanted}
        stages = [*cache._pending, *loading, *cache._host._held]
        assert Counter(stages) == Counter(parked), "who waits for an adapter waits for exactly one thing"
        # A thread is left to bring to the device what is in memory.
        assert len(cache._loading) <= self.loads.most - self.loads.transfers

    def finish(self) -> None:
        """Everything that waits comes to an end, and nothing stays held."""
        for _ in range(100 * len(self.waits) + 1000):
            if not (self.waits or self.running or self.loads.loading()):
                break
            self.load()
            self.poll(busy=False)
            self.admit()
            self.end()
            self.check()
        cache = self.cache
        left = [self.waits, self.running, self.loads.loading(), cache._pending, cache._loading, cache._copies]
        assert list(map(len, left)) == [0] * len(left)
        assert (cache._host.held_bytes, cache.slots.pinned, cache.has_work()) == (0, 0, False)
        assert self.cache.demand._waiting == self.cache.demand._parked == self.cache.demand._carried == {}


@pytest.mark.parametrize(("host_bytes", "transfers"), [(8, True), (20, False), *AT_NIGHT])
def test_random_operations(gated_loads: Any, host_bytes: int, transfers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "PASSED_OVER_MOST", PASSED_OVER_MOST)
    seed = 11 + host_bytes
    print(f"seed {seed}")
    # Looking at the clock takes time, so that installing does; a step takes none but that.
    budget = SwapBudget(itertools.count().__next__)
    loads = gated_loads(SLOTS, BROKEN, host_bytes=host_bytes, sizes=SIZES, budget=budget)
    loads.transfers = transfers
    walk = Walk(loads, seed)
    for _ in range(OPERATIONS):
        walk.step()
        walk.check()
    walk.finish()
    print(walk.outcomes, f"passed over at most {walk.passed_over_most} times, {walk.cache.tiers.swaps} swaps")
    assert sum(walk.outcomes.values()) == walk.asked
    assert min(walk.outcomes[outcome] for outcome in ("arrived", "failed", "withdrawn")) > 0
    assert walk.cache.tiers.swaps > 50
    assert walk.passed_over_most > 0
