"""Adapters and the workers that they prefer: hashing, its bound on load, several homes, a cluster in virtual time.

The gate simulates 15 workers; `RENDEZVOUS_WORKERS=100` simulates the cluster of the design.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from bench.in_process.queue import TimedQueue
from loraplex.contracts.broker.homes import PREFERRED, Preference, Roster, WorkerLoad
from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.terms import Placement
from tests.broker.clocked_queue import BASE, make_job

WORKERS, ROWS, SLOTS, LOAD = int(os.environ.get("RENDEZVOUS_WORKERS", "15")), 32, 32, 0.7
ADAPTERS = 20 * WORKERS


def idle(count: int) -> list[WorkerLoad]:
    return [WorkerLoad(f"w{number}", 0, ROWS) for number in range(count)]


def test_a_worker_that_goes_moves_only_its_own_adapters() -> None:
    digests = [f"sha256:{number}" for number in range(2_000)]
    before = {digest: Roster(idle(20)).preferred(digest).workers for digest in digests}
    after = {digest: Roster(idle(19)).preferred(digest).workers for digest in digests}
    assert all(len(workers) == len(set(workers)) == PREFERRED for workers in before.values())
    for digest, workers in before.items():
        stay = tuple(worker for worker in workers if worker != "w19")
        assert after[digest][: len(stay)] == stay
    counts = [sum(workers[0] == worker.worker_id for workers in before.values()) for worker in idle(20)]
    assert min(counts) > 60
    assert max(counts) < 140


def test_an_overloaded_worker_is_not_preferred() -> None:
    first, second, third = Roster(idle(3)).preferred("sha256:1").workers
    loads = [WorkerLoad(first, ROWS, ROWS), WorkerLoad(second, 0, ROWS), WorkerLoad(third, ROWS // 2, ROWS)]
    assert Roster(loads).preferred("sha256:1").workers == (second, third)


def loaded(
    workers: Iterable[str], having: Collection[str], used: Mapping[str, int] | None = None, *, free_slot: bool = False
) -> list[WorkerLoad]:
    """Workers by their ids, some of which have the adapter sha256:1."""
    return [
        WorkerLoad(name, (used or {}).get(name, 0), ROWS, {"sha256:1"} if name in having else set(), free_slot)
        for name in workers
    ]


def test_jobs_go_to_the_homes_that_have_the_adapter_in_turns() -> None:
    names = [f"w{number}" for number in range(12)]
    homes = Roster(idle(12)).preferred("sha256:1").workers

    def firsts(**used: int) -> list[str]:
        return [
            Roster(loaded(names, homes, used)).preferred("sha256:1", len(homes), turn).workers[0] for turn in range(6)
        ]

    assert firsts() == [*homes, *homes]
    assert homes[0] not in firsts(**{homes[0]: 3}), "of two homes the one with fewer used rows is first"
    assert not {*firsts(**dict.fromkeys(homes, ROWS))} & {*homes}


def test_a_home_is_warmed_before_it_is_preferred() -> None:
    names = ["w0", "w1", "w2", "w3"]
    home, former, other = ranking = Roster(idle(4)).preferred("sha256:1").workers
    as_before = (former, home, other)

    def prefers(*having: str, homes: int = 1, free_slot: bool = False) -> Preference:
        return Roster(loaded(names, having, free_slot=free_slot)).preferred("sha256:1", homes)

    assert prefers() == Preference(ranking), "nobody has it: the home loads it for a job"
    assert prefers(former, free_slot=True) == Preference(as_before, (home,))
    assert prefers(former) == Preference(as_before), "it would evict another adapter"
    assert prefers(home, former, free_slot=True) == Preference(ranking)
    assert prefers(former, homes=3) == Preference(as_before, (home, other))


class Cluster:
    """Workers with caches of adapters, in virtual milliseconds. `prefers`: whether jobs prefer workers."""

    def __init__(self, *, prefers: bool, seed: int) -> None:
        self.queue = TimedQueue()
        self.chance = random.Random(seed)
        self.prefers = prefers
        self.used = dict.fromkeys((f"w{number}" for number in range(WORKERS)), 0)
        self.caches: dict[str, OrderedDict[str, None]] = {worker: OrderedDict() for worker in self.used}
        self.ends: list[tuple[float, int, str]] = []
        self.hits = self.claims = 0
        for worker in self.used:
            self.claim(worker, 0)

    def run(self, jobs: int, warm: int) -> float:
        """The share of jobs after the first `warm` that found their adapter where they ran."""
        now = 0.0
        for number in range(jobs):
            if number == warm:
                self.hits = self.claims = 0
            now += self.chance.expovariate(WORKERS * ROWS * LOAD / 1_000)
            while self.ends and self.ends[0][0] <= now:
                at, _, worker = heapq.heappop(self.ends)
                self.used[worker] -= 1
                self.claim(worker, at)
            self.arrive(number, now)
        assert self.claims > 0.9 * (jobs - warm)
        self.queue.close()
        return self.hits / self.claims

    def arrive(self, number: int, now: float) -> None:
        # Some adapters are much more in demand than others.
        adapter = f"sha256:{int(ADAPTERS * self.chance.random() ** 2)}"
        loads = [WorkerLoad(worker, used, ROWS) for worker, used in self.used.items()]
        prefer = Roster(loads).preferred(adapter).workers if self.prefers else ()
        job = make_job(f"{number}", f"t{number % 50}", adapter=adapter)
        self.queue.enqueue(job, Placement(1, prefer), now)
        free = [worker for worker, used in self.used.items() if used < ROWS]
        woken = next((worker for worker in prefer if self.used[worker] < ROWS), None)
        if woken or free:
            self.claim(woken or self.chance.choice(free), now)

    def claim(self, worker: str, now: float) -> None:
        cache = self.caches[worker]
        capacity = Capacity(ROWS - self.used[worker], ROWS, 10_000, 4096, 64, tuple(cache))
        for job in self.queue.claim(worker, BASE, capacity, now).jobs:
            adapter = job.adapter.digest if job.adapter else ""
            self.claims += 1
            self.hits += adapter in cache
            cache[adapter] = None
            cache.move_to_end(adapter)
            if len(cache) > SLOTS:
                cache.popitem(last=False)
            self.used[worker] += 1
            heapq.heappush(self.ends, (now + self.chance.expovariate(1 / 1_000), int(job.job_id), worker))
            self.queue.finish(job.job_id, 1, now)


def test_jobs_meet_their_adapters_in_a_cluster() -> None:
    seed = 4
    print(f"seed {seed}")
    first_free = Cluster(prefers=False, seed=seed).run(70 * WORKERS, warm=50 * WORKERS)
    preferring = Cluster(prefers=True, seed=seed).run(140 * WORKERS, warm=120 * WORKERS)
    print(f"hits: first free worker {first_free:.1%}, preferred {preferring:.1%}")
    assert first_free < 0.25
    assert preferring >= 0.9
