"""The tiers case by case: who is loaded next, who is evicted, what stays in host memory, what a slow load costs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.worker.engine.scheduling import adapter_slots as demand
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache, SwapBudget
from loraplex.worker.engine.scheduling.adapter_slots import MINIMUM_RESIDENCE, PASSED_OVER_MOST
from loraplex.worker.engine.scheduling.admission import RowShares, WaitingSequences
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, NewSequence

SLOTS = 2


def source(digest: str) -> AdapterSource:
    return AdapterSource(digest, f"/adapters/{digest}")


class Room:
    """A waiting room over a cache: sequences that wait, run and end as the scheduler would have it."""

    def __init__(self, loads: Any) -> None:
        self.loads = loads
        self.cache = loads.cache
        self.waiting = WaitingSequences(self.cache, RowShares())
        self._arrivals = itertools.count()

    def wait(self, digest: str = "") -> Sequence:
        number = next(self._arrivals)
        spec = NewSequence(str(number), (1,), adapter=source(digest) if digest else None)
        sequence = Sequence(spec, number, frozenset())
        self.waiting.enter(sequence)
        return sequence

    def poll(self, *, busy: bool = False) -> tuple[str, ...]:
        arrivals = self.cache.poll(busy=busy)
        for digest in arrivals.arrived:
            self.waiting.arrived(digest)
        for digest, _ in arrivals.failed:
            for sequence in self.waiting.parked_for(digest):
                self.waiting.leave(sequence)
        return tuple(arrivals.arrived)

    def admit(self) -> Sequence | None:
        sequence = self.waiting.head(8)
        if sequence is not None:
            self.waiting.take(sequence)
        return sequence

    def end(self, digest: str) -> None:
        self.cache.unpin(digest)

    def run(self, digest: str) -> None:
        """Have a sequence run with this adapter, loaded if need be."""
        sequence = self.wait(digest)
        while self.loads.loading():
            self.loads.finish_load()
        self.poll()
        assert self.admit() is sequence


@pytest.fixture
def make_room(gated_loads: Any) -> Callable[..., Room]:
    return lambda slots=SLOTS, **options: Room(gated_loads(slots, frozenset(["broken"]), **options))


@pytest.fixture
def room(make_room: Callable[..., Room]) -> Room:
    return make_room()


# ---- device slots


def test_one_load_for_many_requests(room: Room) -> None:
    for _ in range(2):
        room.wait("a")
    room.loads.finish_load()
    room.wait("a")
    assert room.poll() == ("a",)
    assert not room.loads.loading()
    assert [room.admit() is not None for _ in range(4)] == [True, True, True, False]


def test_the_least_recently_used_unpinned_adapter_goes(room: Room) -> None:
    for digest in ("a", "b"):
        room.run(digest)
    room.end("b")
    room.end("a")
    room.run("c")
    assert set(room.cache.slots.digests) == {"a", "c"}
    assert room.cache.tiers.swaps == 1


def test_a_load_waits_while_all_slots_are_pinned(room: Room) -> None:
    for digest in ("a", "b"):
        room.run(digest)
    room.wait("c")
    room.loads.finish_load()
    assert room.poll() == ()
    assert not room.cache.has_work()
    room.end("a")
    assert room.cache.has_work()
    assert room.poll() == ("c",)
    assert set(room.cache.slots.digests) == {"b", "c"}


def test_an_adapter_for_which_somebody_waits_is_not_evicted(room: Room) -> None:
    for digest in ("a", "b"):
        room.wait(digest)
        room.loads.finish_load()
        assert room.poll() == (digest,)
    room.wait("c")
    room.loads.finish_load()
    assert room.poll() == ()
    first = room.admit()
    assert first is not None
    room.end("a")
    assert room.poll() == ("c",)
    assert set(room.cache.slots.digests) == {"b", "c"}


def test_the_adapter_for_which_most_wait_is_next(room: Room) -> None:
    for digest in ("a", "b"):
        room.run(digest)
    for digest in ("c", "d", "d"):
        room.wait(digest)
    for _ in range(2):
        room.loads.finish_load()
    room.poll()
    room.end("a")
    assert room.poll() == ("d",)


def test_a_slot_drains_for_one_that_was_passed_over(room: Room) -> None:
    for digest in ("a", "b", "b"):
        room.run(digest)
    passed_over = room.wait("c")
    room.loads.finish_load()
    for _ in range(max(PASSED_OVER_MOST // 2, MINIMUM_RESIDENCE)):
        room.poll()
        room.run("b")
    room.poll()
    assert room.cache.slots.slot_of("a") is None
    assert room.cache.slots.slot_of("b") is not None
    later = room.wait("a")
    room.poll()
    assert later in room.waiting.parked_for("a")
    # Whom it drained for leaves: it takes pins again.
    room.waiting.leave(passed_over)
    assert room.poll() == ("a",)
    assert room.admit() is later


def test_nobody_is_passed_over_more_often_than_the_bound(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "PASSED_OVER_MOST", 5)
    for digest in ("a", "b"):
        room.run(digest)
    passed_over = room.wait("c")
    room.loads.finish_load()
    room.poll()
    for _ in range(20):
        # Of both adapters and of none, without end.
        for digest in ("a", "b", ""):
            room.wait(digest)
    admitted = 0
    while room.admit() is not None:
        room.poll()
        admitted += 1
    assert admitted == 5
    drained = [digest for digest in ("a", "b") if room.cache.slots.slot_of(digest) is None]
    assert len(drained) == 1
    while room.cache.slots._resident[drained[0]].pins:
        room.end(drained[0])
    assert room.poll() == ("c",)
    assert room.admit() is passed_over
    assert room.admit() is not None


# ---- host memory


def test_an_evicted_adapter_comes_back_without_being_read(room: Room) -> None:
    for digest in ("a", "b", "c"):
        room.run(digest)
        room.end(digest)
    assert "a" not in room.cache.slots.digests
    sequence = room.wait("a")
    assert not room.loads.loading()
    assert room.cache.has_work()
    assert room.poll() == ("a",)
    assert room.admit() is sequence
    assert room.loads.reads == {"a": 1, "b": 1, "c": 1}
    assert (room.waiting.hits, room.waiting.misses) == (0, 4)


def test_host_memory_keeps_the_most_recently_used_within_its_budget(make_room: Callable[..., Room]) -> None:
    room = make_room(1, host_bytes=10, sizes={"a": 4, "b": 4, "c": 4, "d": 11})
    for digest in ("a", "b"):
        room.run(digest)
        room.end(digest)
    assert (room.cache.tiers.host_bytes, room.cache.tiers.device_bytes) == (8, 4)
    room.run("c")
    room.end("c")
    assert room.cache.tiers.host_bytes == 8
    # An adapter larger than the budget is held until it is in its slot.
    room.run("d")
    room.end("d")
    assert (room.cache.tiers.host_bytes, room.cache.tiers.device_bytes) == (0, 11)
    room.run("a")
    assert room.loads.reads["a"] == 2


def test_loads_stop_where_host_memory_is_full_of_what_others_wait_for(make_room: Callable[..., Room]) -> None:
    room = make_room(1, host_bytes=12, sizes=dict.fromkeys("abcdef", 4))
    room.run("a")
    for digest in "bcdef":
        room.wait(digest)
    for _ in range(3):
        room.loads.finish_load()
        room.poll()
    assert not room.loads.loading()
    assert room.cache.tiers.host_bytes == 12
    room.end("a")
    assert len(room.poll()) == 1
    assert len(room.loads.loading()) == 1


def test_what_nobody_waits_for_is_not_read_and_takes_no_slot(room: Room) -> None:
    sequences = {digest: room.wait(digest) for digest in "abcd"}
    for digest in "abc":
        room.waiting.leave(sequences[digest])
    while room.loads.loading():
        room.loads.finish_load()
        room.poll()
    assert room.cache.slots.digests == ("d",)
    # The two that were under way are kept: they may be wanted again.
    assert room.loads.reads == {"a": 1, "b": 1, "d": 1}
    assert room.cache.tiers.host_bytes == 3


# ---- loads


def test_a_slow_load_delays_no_other(room: Room) -> None:
    for digest in ("slow", "b"):
        room.wait(digest)
    assert room.loads.loading() == ["slow", "b"]
    room.loads.finish_load("b")
    assert room.poll() == ("b",)
    assert room.admit() is not None
    assert room.cache.tiers.loading == 1


def test_a_failed_load_frees_its_place(room: Room) -> None:
    room.wait("broken")
    room.loads.finish_load()
    [(digest, error)] = room.cache.poll().failed
    assert (digest, str(error)) == ("broken", "/adapters/broken is broken")
    for sequence in room.waiting.parked_for("broken"):
        room.waiting.leave(sequence)
    room.run("a")
    assert (room.cache.tiers.loading, room.cache.tiers.host_bytes) == (0, 1)
    assert (room.cache.tiers.loads, room.cache.tiers.load_failures) == (1, 1)


def test_a_failed_install_frees_its_slot(make_room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room(1)

    def install(prepared: str, slot: int) -> None:
        raise MemoryError("no room")

    room.wait("a")
    room.loads.finish_load()
    with monkeypatch.context() as patch:
        patch.setattr(room.loads, "install", install)
        assert room.poll() == ()
    assert len(room.waiting) == 0
    assert room.cache.tiers.load_failures == 1
    room.run("b")
    assert room.cache.slots.digests == ("b",)


def test_threads_go_on_beside_one_that_hangs() -> None:
    """The real ones: of two threads one hangs in a read, and one fails; the others' adapters come."""
    hangs, news = threading.Event(), threading.Semaphore(0)

    class Memory:
        transfers = False

        def read(self, source: AdapterSource) -> str:
            if source.digest == "hangs":
                hangs.wait()
            if source.digest == "broken":
                raise OSError("broken")
            return source.digest

        def transfer(self, prepared: str) -> str:
            return prepared

        def install(self, prepared: str, slot: int) -> None:
            pass

        def size(self, prepared: str) -> int:
            return 1

    cache = AdapterCache[str](4, Memory(), LoaderThreads(news.release, threads=2), 100)
    waiting = WaitingSequences(cache, RowShares())
    arrived: list[str] = []
    failed: list[str] = []
    try:
        for number, digest in enumerate(("hangs", "a", "broken", "b")):
            spec = NewSequence(str(number), (1,), adapter=source(digest))
            waiting.enter(Sequence(spec, number, frozenset()))
        while len(arrived) + len(failed) < 3:
            assert news.acquire(timeout=60)
            arrivals = cache.poll()
            arrived += arrivals.arrived
            failed += [digest for digest, _ in arrivals.failed]
        assert (arrived, failed) == (["a", "b"], ["broken"])
        assert cache.tiers.loading == 1
    finally:
        hangs.set()
        cache.close()
    assert cache.poll().arrived == ("hangs",)


# ---- what swaps may cost the others


class Costly:
    """A clock, and installs that take so much of it."""

    def __init__(self) -> None:
        self.now = 0.0

    def steps(self, room: Room, count: int, *, busy: bool, install_s: float) -> list[int]:
        """Return the number of adapters that arrived in each of so many steps of one second."""
        original = room.loads.install

        def install(prepared: str, slot: int) -> None:
            self.now += install_s
            original(prepared, slot)

        room.loads.install = install
        arrived = []
        for _ in range(count):
            self.now += 1.0
            arrived.append(len(room.poll(busy=busy)))
        return arrived


@pytest.mark.parametrize(
    ("install_s", "arrived"),
    [(0.05, [1, 4, 3, 0]), (0.3, [1, 1, 1, 1]), (1.0, [1, 0, 1, 0])],
)
def test_installs_take_a_bounded_share_of_busy_steps(
    make_room: Callable[..., Room], install_s: float, arrived: list[int]
) -> None:
    clock = Costly()
    room = make_room(8, budget=SwapBudget(lambda: clock.now))
    for number in range(8):
        room.wait(f"adapter {number}")
    # They are all there before the first of them is installed.
    room.loads.most = 8
    room.cache._feed()
    while room.loads.loading():
        room.loads.finish_load()
    assert clock.steps(room, 4, busy=True, install_s=install_s) == arrived


def test_where_nothing_runs_all_that_is_there_is_installed(make_room: Callable[..., Room]) -> None:
    clock = Costly()
    room = make_room(8, budget=SwapBudget(lambda: clock.now))
    for number in range(2):
        room.wait(f"adapter {number}")
        room.loads.finish_load()
    assert clock.steps(room, 1, busy=False, install_s=1.0) == [2]
