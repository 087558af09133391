"""AdapterCache.check(): silent while random operations go on, and an error for each way to break the accounts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from loraplex.worker.engine.scheduling import adapter_slots
from loraplex.worker.engine.scheduling.adapter_slots import AdapterIntegrityError
from loraplex.worker.engine_api import AdapterSource
from tests.worker.engine.scheduling.test_adapter_walk import PASSED_OVER_MOST, SIZES, SLOTS, Walk


@pytest.mark.parametrize("transfers", [False, True])
def test_random_operations_leave_all_parts_in_agreement(
    gated_loads: Any, transfers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_slots, "PASSED_OVER_MOST", PASSED_OVER_MOST)

    @settings(max_examples=60)
    @given(seed=integers(0, 1 << 32), operations=integers(1, 120))
    def walk_randomly(seed: int, operations: int) -> None:
        walk = walked(gated_loads, seed, operations, transfers=transfers)
        walk.finish()
        walk.cache.check({})

    walk_randomly()


def walked(gated_loads: Any, seed: int, operations: int, *, transfers: bool = False) -> Walk:
    loads = gated_loads(SLOTS, host_bytes=20, sizes=SIZES)
    loads.transfers = transfers
    walk = Walk(loads, seed)
    for _ in range(operations):
        walk.step()
        walk.cache.check(walk.pins)
    return walk


def lose_a_slot(cache: Any) -> None:
    cache.slots._free = cache.slots._free[1:] or [0]


def drain_nothing(cache: Any) -> None:
    cache.slots.draining["nobody"] = None


def forget_an_idle_one(cache: Any) -> None:
    cache.slots._idle.clear()


def miscount_slots(cache: Any) -> None:
    cache.slots.bytes += 1


def miscount_host_memory(cache: Any) -> None:
    cache._host.bytes -= 1


def miscount_held_memory(cache: Any) -> None:
    cache._host.held_bytes += 1


def hold_for_nobody(cache: Any) -> None:
    cache._host.hold("adapter 3", "adapter 3")


def want_for_nobody(cache: Any) -> None:
    cache._pending["adapter 3"] = AdapterSource("adapter 3", "/")


def copy_what_is_not_held(cache: Any) -> None:
    cache._copies["adapter 3"] = "adapter 3"


BREAKS = [
    lose_a_slot, drain_nothing, forget_an_idle_one, miscount_slots, miscount_host_memory, miscount_held_memory,
    hold_for_nobody, want_for_nobody, copy_what_is_not_held,
]  # fmt: skip


@pytest.mark.parametrize("spoil", BREAKS, ids=[spoil.__name__ for spoil in BREAKS])
def test_accounts_that_contradict_each_other_are_an_error(gated_loads: Any, spoil: Callable[[Any], None]) -> None:
    loads = gated_loads(SLOTS, host_bytes=20, sizes=SIZES)
    cache = loads.cache
    cache.request(AdapterSource("adapter 0", "/"))
    cache.withdraw("adapter 0")
    cache.check({})
    idle = Walk(loads, random.Random(0).randrange(100))
    idle.ask_for("adapter 1")
    loads.finish_load("adapter 0")
    loads.finish_load("adapter 1")
    idle.poll(busy=False)
    cache.check({})
    assert "adapter 1" in cache.slots.digests
    spoil(cache)
    with pytest.raises(AdapterIntegrityError):
        cache.check({})


def test_pins_are_those_of_the_running_sequences(gated_loads: Any) -> None:
    walk = Walk(gated_loads(SLOTS, sizes=SIZES), 1)
    walk.ask_for("adapter 1")
    walk.load()
    walk.poll(busy=False)
    walk.admit()
    walk.cache.check(Counter(["adapter 1"]))
    for wrong in ({}, {"adapter 1": 2}, {"adapter 2": 1}):
        with pytest.raises(AdapterIntegrityError, match="sequences pin"):
            walk.cache.check(wrong)
