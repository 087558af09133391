"""A pinned slot is never evicted, a load never waits for another's user, and whoever waits is served."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import sampled_from

from worker.lora import cache as cache_module
from worker.lora.cache import AdapterCache
from worker.scheduling.contract import AdapterSource

DIGESTS = ["a", "b", "c", "d", "e", "broken"]
SLOTS = 2


def source(digest: str) -> AdapterSource:
    return AdapterSource(digest, f"/adapters/{digest}")


@pytest.fixture
def loads(gated_loads: Any) -> Any:
    loads = gated_loads(SLOTS, frozenset(["broken"]))
    yield loads
    loads.close()


def bring_in(loads: Any, digest: str) -> None:
    loads.cache.request(source(digest))
    loads.finish_load()
    assert digest in loads.cache.poll().arrived


class CacheWalk(RuleBasedStateMachine):
    """What sequences do with the cache, in any order; `waiting` and `pins` are what the scheduler would know."""

    gated_loads: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.loads = self.gated_loads(SLOTS, frozenset(["broken"]))
        self.cache = self.loads.cache
        self.waiting: set[str] = set()
        self.pins: dict[str, int] = {}
        self.slots: dict[str, int] = {}

    @rule(digest=sampled_from(DIGESTS))
    def request(self, digest: str) -> None:
        if self.cache.slot_of(digest) is None:
            self.cache.request(source(digest))
            self.waiting.add(digest)

    @rule(digest=sampled_from(DIGESTS))
    def withdraw(self, digest: str) -> None:
        self.cache.withdraw(digest)
        self.waiting.discard(digest)

    @rule(digest=sampled_from(DIGESTS))
    def pin(self, digest: str) -> None:
        slot = self.cache.slot_of(digest)
        if slot is not None:
            assert self.cache.pin(digest) == slot
            assert self.slots.setdefault(digest, slot) == slot
            self.pins[digest] = self.pins.get(digest, 0) + 1

    @rule(digest=sampled_from(DIGESTS))
    def unpin(self, digest: str) -> None:
        if digest in self.pins:
            self.cache.unpin(digest)
            self.pins[digest] -= 1
            if not self.pins[digest]:
                del self.pins[digest], self.slots[digest]

    @precondition(lambda self: self.loads.loading())
    @rule()
    def finish_load(self) -> None:
        self.loads.finish_load()

    @rule()
    def poll(self) -> None:
        had_work = self.cache.has_work()
        arrivals = self.cache.poll()
        assert not self.cache.has_work(), "a poll leaves nothing that the next one could do"
        assert had_work or not (arrivals.arrived or arrivals.failed)
        for digest in arrivals.arrived:
            assert digest in self.waiting
            assert self.cache.slot_of(digest) is not None
            self.waiting.discard(digest)
        for digest, error in arrivals.failed:
            assert (digest, str(error)) == ("broken", "/adapters/broken is broken")
            self.waiting.discard(digest)

    @invariant()
    def pinned_adapters_stay_in_their_slots(self) -> None:
        for digest, slot in self.slots.items():
            assert self.loads.installed[slot] == digest
            assert digest in self.cache.resident

    @invariant()
    def counts_hold(self) -> None:
        assert self.cache.pinned == len(self.pins)
        assert self.cache.used == len(self.cache.resident) <= SLOTS
        assert len(set(self.cache.resident)) == self.cache.used

    def teardown(self) -> None:
        try:
            self.everyone_is_served()
        finally:
            self.loads.close()

    def everyone_is_served(self) -> None:
        for digest in list(self.pins):
            while digest in self.pins:
                self.unpin(digest)
        for _ in range(10 * len(DIGESTS)):
            if self.loads.loading():
                self.loads.finish_load()
            self.poll()
            for digest in self.cache.resident:
                # As admission does with a fresh one.
                self.pin(digest)
                self.unpin(digest)
        assert not self.waiting


@pytest.mark.parametrize("patience", [1, 64])
def test_cache_walk(gated_loads: Any, patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PATIENCE_POLLS", patience)
    monkeypatch.setattr(CacheWalk, "gated_loads", gated_loads)
    run_state_machine_as_test(
        CacheWalk, settings=settings(max_examples=100, stateful_step_count=60, deadline=None, derandomize=True)
    )


def test_one_load_for_many_requests(loads: Any) -> None:
    loads.cache.request(source("a"))
    loads.cache.request(source("a"))
    loads.finish_load()
    loads.cache.request(source("a"))
    assert loads.cache.poll().arrived == ("a",)
    assert not loads.loading()


def test_the_least_recently_used_unpinned_adapter_goes(loads: Any) -> None:
    for digest in ("a", "b"):
        bring_in(loads, digest)
        loads.cache.pin(digest)
    loads.cache.unpin("b")
    loads.cache.unpin("a")
    bring_in(loads, "c")
    assert set(loads.cache.resident) == {"a", "c"}


def test_a_load_waits_while_all_slots_are_pinned(loads: Any) -> None:
    for digest in ("a", "b"):
        bring_in(loads, digest)
        loads.cache.pin(digest)
    loads.cache.request(source("c"))
    loads.finish_load()
    assert loads.cache.poll().arrived == ()
    assert not loads.cache.has_work()
    loads.cache.unpin("a")
    assert loads.cache.has_work()
    assert loads.cache.poll().arrived == ("c",)
    assert set(loads.cache.resident) == {"b", "c"}


def test_a_fresh_adapter_stays_until_it_served_someone(loads: Any) -> None:
    bring_in(loads, "a")
    bring_in(loads, "b")
    loads.cache.request(source("c"))
    loads.finish_load()
    assert loads.cache.poll().arrived == ()
    loads.cache.withdraw("b")
    assert loads.cache.poll().arrived == ("c",)
    assert set(loads.cache.resident) == {"a", "c"}


def test_a_slot_drains_for_one_that_waits_long(loads: Any) -> None:
    for digest in ("a", "b"):
        bring_in(loads, digest)
        loads.cache.pin(digest)
    loads.cache.pin("b")
    loads.cache.request(source("c"))
    loads.finish_load()
    for _ in range(cache_module.PATIENCE_POLLS + 1):
        loads.cache.poll()
    assert loads.cache.slot_of("a") is None
    assert loads.cache.slot_of("b") is not None
    # Who comes for the draining one meanwhile gets it back when nobody wants its slot any more.
    loads.cache.request(source("a"))
    loads.cache.withdraw("c")
    assert loads.cache.poll().arrived == ("a",)
    assert loads.cache.slot_of("a") is not None


def test_slots_drain_one_after_the_other(loads: Any) -> None:
    for digest in ("a", "b"):
        bring_in(loads, digest)
        loads.cache.pin(digest)
    for digest in ("c", "d"):
        loads.cache.request(source(digest))
        loads.finish_load()
    for _ in range(cache_module.PATIENCE_POLLS + 1):
        loads.cache.poll()
    assert (loads.cache.slot_of("a"), loads.cache.slot_of("b") is None) == (None, False)
    loads.cache.unpin("a")
    assert loads.cache.poll().arrived == ("c",)
    for _ in range(cache_module.PATIENCE_POLLS + 1):
        loads.cache.pin("c")
        loads.cache.poll()
    assert loads.cache.slot_of("b") is None
    loads.cache.unpin("b")
    assert loads.cache.poll().arrived == ("d",)


def test_what_nobody_waits_for_is_dropped(loads: Any) -> None:
    for digest in ("a", "b", "c", "d"):
        loads.cache.request(source(digest))
    for digest in ("a", "b", "c"):
        loads.cache.withdraw(digest)
    loads.finish_load()
    loads.finish_load()
    assert loads.cache.poll().arrived == ()
    loads.finish_load()
    assert loads.cache.poll().arrived == ("d",)
    assert loads.cache.resident == ("d",)


def test_a_failed_load_frees_its_place(loads: Any) -> None:
    loads.cache.request(source("broken"))
    loads.finish_load()
    [(digest, error)] = loads.cache.poll().failed
    assert (digest, str(error)) == ("broken", "/adapters/broken is broken")
    bring_in(loads, "a")


def test_a_failed_install_frees_its_slot() -> None:
    loaded = threading.Event()

    def install(prepared: str, slot: int) -> None:
        if prepared == "a":
            raise MemoryError("no room")

    cache = AdapterCache(1, lambda source: source.digest, install, loaded.set)
    try:
        for digest in ("a", "b"):
            cache.request(source(digest))
            assert loaded.wait(10)
            loaded.clear()
            arrivals = cache.poll()
        assert arrivals.arrived == ("b",)
        assert cache.resident == ("b",)
    finally:
        cache.close()
