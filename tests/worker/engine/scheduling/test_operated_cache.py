"""Test what operators ask of the tiers: adapters that are brought in though nobody waits, and kept whoever does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.adapter_slots import PASSED_OVER_MOST
from loraplex.worker.engine.scheduling.admission import RowShares, WaitingSequences
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, NewSequence, Removal

SLOTS = 4


def source(digest: str) -> AdapterSource:
    return AdapterSource(digest, f"/adapters/{digest}")


@pytest.fixture
def make_loads(gated_loads: Any) -> Callable[..., Any]:
    def make(slots: int, *, transfers: bool = False, host_bytes: int = 1 << 20) -> Any:
        loads = gated_loads(slots, frozenset(["broken"]))
        loads.transfers = transfers
        loads.cache = AdapterCache(slots, loads, loads, host_bytes)
        return loads

    return make


def settle(loads: Any) -> tuple[str, ...]:
    """Finish all loads and poll until there is nothing to do; what arrived."""
    arrived: tuple[str, ...] = ()
    for _ in range(40):
        if not loads.cache.has_work() and not loads.loading():
            return arrived
        arrived += loads.cache.poll().arrived
        while loads.loading():
            loads.finish_load()
    raise AssertionError("the tiers do not come to rest")


@pytest.mark.parametrize("transfers", [False, True])
def test_a_warm_adapter_is_there_before_anybody_asks(make_loads: Callable[..., Any], transfers: bool) -> None:
    loads = make_loads(3, transfers=transfers)
    for digest in ("a", "broken", "b", "c", "d"):
        loads.cache.warm_adapter(source(digest))
    assert loads.cache.has_work()
    assert settle(loads) == ("a", "b", "c", "d")
    # The last one took the place of the first, which nobody had asked for.
    assert set(loads.cache.slots.digests) == {"b", "c", "d"}
    assert (loads.cache.slots.pinned, loads.cache.slots.kept, loads.reads.total()) == (0, {}, 5)
    ended = dict(loads.cache.ended_commands())
    assert [digest for digest, error in ended.items() if error] == ["broken"]
    assert set(ended) == {"a", "broken", "b", "c", "d"}


def test_a_command_for_an_adapter_that_is_there_ends_though_it_leaves_at_once(make_loads: Callable[..., Any]) -> None:
    loads = make_loads(1)
    for digest in ("b", "a"):
        loads.cache.warm_adapter(source(digest))
    settle(loads)
    loads.cache.ended_commands()
    loads.cache.warm_adapter(source("a"))
    sequence = Sequence(NewSequence("1", (1,), adapter=source("b")), 1, frozenset())
    WaitingSequences(loads.cache, RowShares()).enter(sequence)
    assert settle(loads) == ("b",)
    assert loads.cache.ended_commands() == [("a", "")]


@pytest.mark.parametrize("transfers", [False, True])
def test_a_kept_adapter_stays_whoever_waits(make_loads: Callable[..., Any], transfers: bool) -> None:
    loads = make_loads(2, transfers=transfers)
    cache, waiting = loads.cache, WaitingSequences(loads.cache, RowShares())
    cache.pin_adapter(source("kept"))
    settle(loads)
    for number in range(2 * PASSED_OVER_MOST):
        sequence = Sequence(NewSequence(str(number), (1,), adapter=source(f"other {number % 7}")), number, frozenset())
        waiting.enter(sequence)
        for digest in settle(loads):
            waiting.arrived(digest)
        assert waiting.head(8) is sequence
        waiting.take(sequence)
        cache.unpin(f"other {number % 7}")
    assert cache.slots.slot_of("kept") is not None
    assert loads.reads["kept"] == 1
    cache.unpin_adapter("kept")
    cache.warm_adapter(source("another"))
    settle(loads)
    assert "kept" not in cache.slots.digests


def test_one_slot_is_left_for_others(make_loads: Callable[..., Any]) -> None:
    loads = make_loads(3)
    for digest in ("a", "b", "a"):
        loads.cache.pin_adapter(source(digest))
    with pytest.raises(ValueError, match="2 adapters are pinned; one of 3 slots is for others"):
        loads.cache.pin_adapter(source("c"))
    loads.cache.unpin_adapter("a")
    loads.cache.pin_adapter(source("c"))
    settle(loads)
    assert set(loads.cache.slots.digests) >= {"b", "c"}
    assert loads.cache.slots.kept == {"b": None, "c": None}


def test_an_order_waits_for_a_slot_that_nobody_wants(make_loads: Callable[..., Any]) -> None:
    """And while it does it is not read, nor does it keep those that wait from being read."""
    loads = make_loads(2)
    cache, waiting = loads.cache, WaitingSequences(loads.cache, RowShares())
    for number, digest in enumerate("ab"):
        waiting.enter(Sequence(NewSequence(digest, (1,), adapter=source(digest)), number, frozenset()))
    for digest in settle(loads):
        waiting.arrived(digest)
    cache.pin_adapter(source("kept"))
    assert not cache.has_work()
    cache.poll()
    assert loads.reads["kept"] == 0
    sequence = waiting.head(8)
    assert sequence is not None
    waiting.take(sequence)
    cache.unpin("a")
    assert settle(loads) == ("kept",)
    assert set(cache.slots.digests) == {"b", "kept"}


class Walk:
    """Sequences come, leave, run and end at random, and so do orders."""

    def __init__(self, loads: Any, seed: int) -> None:
        self.loads, self.cache, self.chance, self.purges = loads, loads.cache, random.Random(seed), random.Random(seed)
        self.waiting = WaitingSequences(self.cache, RowShares())
        self.waits: list[Sequence] = []
        self.running: list[str] = []
        self.stayed: set[str] = set()
        self.asked = 0

    def step(self) -> None:
        come, go = [self.ask, self.run, self.order, self.load], [self.leave, self.end, self.let_go, self.poll]
        self.chance.choice([*come, *go, self.poll])()
        if self.purges.random() < 0.005:
            self.forget()
        self.stayed = {one for one in self.stayed | set(self.cache.slots.digests) if one in self.cache.slots.kept}
        assert self.stayed <= set(self.cache.slots.digests), "a kept one was evicted"
        self.cache.check(Counter(self.running))

    def source(self) -> AdapterSource:
        return source(self.chance.choice([*"abcdefgh", "broken"]))

    def ask(self) -> None:
        if len(self.waits) < 12:
            self.asked += 1
            spec = NewSequence(str(self.asked), (1,), adapter=self.source())
            self.waits.append(Sequence(spec, self.asked, frozenset()))
            self.waiting.enter(self.waits[-1])

    def leave(self) -> None:
        if self.waits:
            self.waiting.leave(self.waits.pop(self.chance.randrange(len(self.waits))))

    def run(self) -> None:
        sequence = self.waiting.head(8)
        if sequence is not None and sequence.spec.adapter:
            self.waiting.take(sequence)
            self.waits.remove(sequence)
            self.running.append(sequence.spec.adapter.digest)

    def end(self) -> None:
        if self.running:
            self.cache.unpin(self.running.pop(self.chance.randrange(len(self.running))))

    def order(self) -> None:
        one = self.source()
        if self.chance.random() < 0.5:
            self.cache.warm_adapter(one)
        elif len(self.cache.slots.kept) < SLOTS - 1 or one.digest in self.cache.slots.kept:
            self.cache.pin_adapter(one)

    def let_go(self) -> None:
        self.cache.unpin_adapter(self.source().digest)

    def load(self) -> None:
        if self.loads.loading():
            self.loads.finish_load(self.chance.choice(self.loads.loading()))

    def forget(self) -> None:
        kept = set(self.purges.sample("abcdefgh", 4))
        found = self.cache.forget_others(kept)
        assert self.cache.forget_others(kept) == Removal(0, found.left)
        used = {*self.running, *self.cache.slots.kept}
        used.update(sequence.spec.adapter.digest for sequence in self.waits if sequence.spec.adapter)
        assert set(self.cache.slots.digests) <= kept | used, "one that nobody uses was left"

    def poll(self) -> None:
        arrivals = self.cache.poll()
        for digest in arrivals.arrived:
            self.waiting.arrived(digest)
        for digest, _ in arrivals.failed:
            for sequence in self.waiting.parked_for(digest):
                self.waits.remove(sequence)
                self.waiting.leave(sequence)

    def finish(self) -> None:
        while self.waits:
            self.leave()
        while self.running:
            self.end()
        for digest in list(self.cache.slots.kept):
            self.cache.unpin_adapter(digest)
        settle(self.loads)


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_orders_beside_sequences_leave_nothing_behind(
    make_loads: Callable[..., Any], seed: int, transfers: bool
) -> None:
    print("seed", seed)
    walk = Walk(make_loads(SLOTS, transfers=transfers, host_bytes=3), seed)
    for _ in range(3000):
        walk.step()
    walk.finish()
    cache = walk.cache
    assert (cache.slots.pinned, cache._host.held_bytes, cache._under_way, len(cache._copies)) == (0, 0, None, 0)
    assert cache.tiers.swaps > 50
