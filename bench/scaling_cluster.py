"""A large cluster in virtual time: the queue on a Redis in this process, the router's placement, simple workers.

The number of an adapter's homes comes from the queue's functions, the choice among them from broker.homes.
A worker has rows and slots of a least-recently-used cache of adapters. It claims as worker.io.intake does: when it
is woken, after a hold, and once a second; while jobs wait also when a job of its own has ended, at an interval unless
several rows are free.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, Literal

import numpy as np

from bench.in_process.queue import TimedQueue
from loraplex.contracts.broker.commands import COMMAND_TTL_MS
from loraplex.contracts.broker.homes import Preference, Roster, WorkerLoad, hash_of, mixed
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job
from loraplex.contracts.broker.terms import (
    ADAPTER_DIGITS,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    Placement,
    QueueLimits,
    UsageReport,
)
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.io.intake import IDLE_S, PACE_S, PACED_ROWS
from loraplex.worker.io.results import REPORT_S

BASE = "sha256:0"
_NO_LIMITS = QueueLimits(jobs=1 << 40, bytes=1 << 50, tenant_jobs=1 << 40, tenant_bytes=1 << 50)
# Intervals in ms of a worker's claims, while it is idle or full and while jobs wait, and of its beats, as in
# loraplex.worker.io.intake and contracts.broker.liveness; and of its usage reports.
_IDLE_MS, _PACE_MS, BEAT_MS, REPORT_MS = IDLE_S * 1e3, PACE_S * 1e3, 500, REPORT_S * 1e3
_Event = Literal["arrival", "end", "look", "beat", "watch", "warm"]


@dataclass(frozen=True)
class Scale:
    """The size and the load of a cluster. `load` is the share of all rows' capacity that the requests take.

    `loud` is the first tenant's share of the requests; the other tenants share the rest evenly. A request's adapter is
    floor(n * u ** (1 / skew)): with skew 1 all are equally likely. With `zipf` its popularity is (number + 1) ** -zipf.
    """

    workers: int
    adapters: int
    jobs: int
    rendezvous: bool = True
    # False: an adapter has one home, wherever it is loaded, as before homes followed the demand.
    by_demand: bool = True
    zipf: float = 0.0
    # Number of requests before the first one that have filled the caches of the adapters' first homes.
    earlier: int = 0
    # Number of further workers, which begin with the second half.
    joining: int = 0
    load: float = 0.7
    skew: float = 1.0
    tenants: int = 100
    loud: float = 0.01
    rows: int = 32
    slots: int = 32
    prompt: int = 64
    # Mean tokens of an answer; 100 gives answers of 1 to 199 tokens.
    answer: int = 100
    token_ms: float = 20.0
    load_ms: float = 150.0


@dataclass
class Result:
    """The figures of the second half: `waits_ms` from arrival to claim and `served` charged tokens, by tenant."""

    seconds: float = 0.0
    claims: int = 0
    # Of them those that took no job; and those without a free row.
    empty_claims: int = 0
    full_claims: int = 0
    hits: int = 0
    misses: int = 0
    # Claimed jobs whose adapter no worker had had before.
    firsts: int = 0
    # Loads that no job waited for.
    warms: int = 0
    # Time in ms from arrival until the adapter was on the device, by the adapter's number.
    starts_ms: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits_ms: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    served: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def hit_rate(self) -> float:
        """Return the share of cached adapters among claimed jobs whose adapter some worker had had before."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def loads_per_s(self) -> float:
        """Return how many adapters were loaded in a second."""
        return (self.misses + self.firsts + self.warms) / self.seconds


class _Worker:
    def __init__(self, worker_id: str, slots: int) -> None:
        self.worker_id = worker_id
        self.slots = slots
        self.running: dict[str, float] = {}
        self.adapters: OrderedDict[str, None] = OrderedDict()
        # Time of the next look at the queue; an earlier time in the event list is void.
        self.look_at = 0.0
        self.claimed_at = self.full_claim_at = 0.0
        # Whether its claim waits in Redis for a job.
        self.waits = True

    def use(self, digest: str) -> bool:
        """Put an adapter into the cache; return whether it was cached before."""
        there = digest in self.adapters
        self.adapters[digest] = None
        self.adapters.move_to_end(digest)
        if len(self.adapters) > self.slots:
            self.adapters.popitem(last=False)
        return there


class VirtualCluster:
    """A simulation of one cluster."""

    def __init__(self, scale: Scale, seed: int = 42) -> None:
        self._scale = scale
        self._chance = random.Random(seed)
        self._queue = TimedQueue(_NO_LIMITS)
        self._workers = {f"w{number}": _Worker(f"w{number}", scale.slots) for number in range(scale.workers)}
        self._worker_list = list(self._workers.values())
        # Loads that are under way or a moment ago, as a router remembers them: time until which, by worker and adapter.
        self._warms: dict[tuple[str, str], float] = {}
        self._homes: Mapping[str, int] = {}
        self._jobs: dict[str, tuple[Job, float]] = {}
        self._refs = [AdapterRef(f"a{n}", f"sha256:{n:064x}", 16, 1 << 20) for n in range(scale.adapters)]
        self._number_of = {ref.digest: number for number, ref in enumerate(self._refs)}
        self._shares = list(accumulate((number + 1) ** -scale.zipf for number in range(scale.adapters)))
        self._events: list[tuple[float, int, _Event, str]] = []
        self._seen: set[str] = set()
        self._order = count()
        self._now_ms = 0.0
        self._arrived = 0
        self.result = Result()
        if scale.earlier:
            self._fill_caches()

    def run(self) -> Result:
        """Simulate until the last request has arrived. The first half fills the caches and does not count."""
        scale = self._scale
        job_ms = scale.answer * scale.token_ms
        gap_ms = job_ms / (scale.load * scale.rows * scale.workers)
        self._begin(self._worker_list)
        self._watch()
        self._at(0.0, "arrival", "")
        half_ms = 0.0
        while self._arrived < scale.jobs:
            self._now_ms, _, event, which = heapq.heappop(self._events)
            match event:
                case "arrival":
                    if self._arrived == scale.jobs // 2:
                        half_ms, self.result = self._now_ms, Result()
                        self._join()
                    self._arrive()
                    self._at(self._now_ms + self._chance.expovariate(1 / gap_ms), "arrival", "")
                case "end":
                    worker_id, _, job_id = which.partition("/")
                    self._end(self._workers[worker_id], job_id)
                case "look":
                    self._look(self._workers[which])
                case "beat":
                    self._beat(self._workers[which])
                case "watch":
                    self._watch()
                case "warm":
                    self._end_warm(*which.split("/"))
        self._queue.close()
        self.result.seconds = (self._now_ms - half_ms) / 1e3
        return self.result

    def _at(self, at_ms: float, event: _Event, which: str) -> None:
        heapq.heappush(self._events, (at_ms, next(self._order), event, which))

    def _begin(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._at(self._now_ms + self._chance.uniform(0, _IDLE_MS), "look", worker.worker_id)
            self._at(self._now_ms + self._chance.uniform(0, REPORT_MS), "beat", worker.worker_id)

    def _join(self) -> None:
        first = len(self._worker_list)
        joining = [_Worker(f"w{first + number}", self._scale.slots) for number in range(self._scale.joining)]
        self._workers |= {worker.worker_id: worker for worker in joining}
        self._worker_list += joining
        self._begin(joining)

    def _fill_caches(self) -> None:
        """Have earlier requests use the slots of their adapters' first homes."""
        others = np.array([hash_of(worker.worker_id) for worker in self._worker_list], np.uint64)
        own = np.array([hash_of(ref.digest) for ref in self._refs], np.uint64)
        mix: Any = mixed  # of arrays as well
        parts = np.array_split(own, 1 + len(own) // 1_000)
        first_homes = [int(home) for part in parts for home in np.argmax(mix(part[:, None] ^ others), axis=1)]
        for _ in range(self._scale.earlier):
            number = self._draw_adapter()
            self._worker_list[first_homes[number]].use(self._refs[number].digest)
        self._seen.update(self._number_of)

    def _draw_adapter(self) -> int:
        scale, draw = self._scale, self._chance.random()
        if scale.zipf:
            return bisect_left(self._shares, draw * self._shares[-1])
        return int(scale.adapters * draw ** (1 / scale.skew))

    def _arrive(self) -> None:
        scale, chance = self._scale, self._chance
        self._arrived += 1
        loud = chance.random() < scale.loud
        ref = self._refs[self._draw_adapter()]
        job = Job(
            job_id=str(self._arrived),
            tenant="t0" if loud else f"t{chance.randrange(1, scale.tenants)}",
            model="model",
            base_digest=BASE,
            reply_to="router",
            prompt_ids=(1,) * scale.prompt,
            stopping=StoppingParams(chance.randint(1, 2 * scale.answer - 1)),
            sampling=SamplingParams(seed=1),
            adapter=ref,
        )
        homes = self._homes.get(ref.digest[-ADAPTER_DIGITS:], 1)
        preference = (
            self._roster.preferred(ref.digest, homes, self._arrived) if scale.rendezvous else Preference(workers=())
        )
        self._jobs[job.job_id] = job, self._now_ms
        self._queue.enqueue(job, Placement(prefer=preference.workers), self._now_ms)
        for worker_id in preference.to_warm:
            self._warm(worker_id, ref.digest)
        self._wake(preference.workers)

    def _warm(self, worker_id: str, digest: str) -> None:
        if self._warms.get((worker_id, digest), 0.0) <= self._now_ms:
            self._warms[worker_id, digest] = self._now_ms + COMMAND_TTL_MS
            self._at(self._now_ms + self._scale.load_ms, "warm", f"{worker_id}/{digest}")

    def _end_warm(self, worker_id: str, digest: str) -> None:
        self._seen.add(digest)
        self.result.warms += not self._workers[worker_id].use(digest)

    def _watch(self) -> None:
        """Take a census: the workers' loads and adapters' homes as routers know them until their next look."""
        scale = self._scale
        loads = [
            WorkerLoad(
                *(worker.worker_id, len(worker.running), scale.rows),
                frozenset(digest[-ADAPTER_DIGITS:] for digest in worker.adapters) if scale.by_demand else frozenset(),
                len(worker.adapters) < scale.slots,
            )
            for worker in self._worker_list
        ]
        self._roster = Roster(loads)
        if scale.by_demand:
            busy = sum(load.used / load.rows for load in loads)
            self._homes = self._queue.take_census(busy, self._now_ms).homes
        self._at(self._now_ms + BEAT_MS, "watch", "")

    def _wake(self, prefer: Sequence[str]) -> None:
        """Wake the first preferred worker with free rows, or else any idle one, as the script does."""
        for worker_id in prefer:
            if self._free_rows(self._workers[worker_id]):
                self._claim(self._workers[worker_id])
                return
        # Redis wakes any of the waiting workers. Eight random tries find one unless nearly all workers are full.
        for _ in range(8):
            worker = self._chance.choice(self._worker_list)
            if self._free_rows(worker):
                self._claim(worker)
                return

    def _free_rows(self, worker: _Worker) -> int:
        return self._scale.rows - len(worker.running)

    def _look(self, worker: _Worker) -> None:
        if worker.look_at <= self._now_ms:
            self._claim(worker)

    def _claim(self, worker: _Worker) -> None:
        scale, free_rows = self._scale, self._free_rows(worker)
        if free_rows < 1 and self._now_ms < worker.full_claim_at + _IDLE_MS:
            self._look_at(worker, worker.full_claim_at + _IDLE_MS)
            return
        adapters = tuple(worker.adapters)
        capacity = Capacity(free_rows, scale.rows, 1 << 20, 1 << 20, 64, adapters)
        worker.claimed_at = self._now_ms
        claimed = self._queue.claim(worker.worker_id, BASE, capacity, self._now_ms)
        self.result.claims += 1
        self.result.empty_claims += free_rows > 0 and not claimed.jobs
        self.result.full_claims += free_rows < 1
        if free_rows < 1:
            worker.full_claim_at = self._now_ms
        for job in claimed.jobs:
            self._start(worker, job.job_id)
        worker.waits = self._free_rows(worker) > 0 and not (claimed.waiting and (claimed.jobs or claimed.crowded))
        if worker.waits or not self._free_rows(worker):
            self._look_at(worker, self._now_ms + (claimed.hold_ms or _IDLE_MS if worker.waits else 0))
        else:
            self._look_paced(worker)

    def _look_at(self, worker: _Worker, at_ms: float) -> None:
        worker.look_at = at_ms
        self._at(at_ms, "look", worker.worker_id)

    def _look_paced(self, worker: _Worker) -> None:
        """Let a worker claim at once where several rows are free, or nothing runs; else after an interval."""
        few = worker.running and self._free_rows(worker) < PACED_ROWS
        self._look_at(worker, max(self._now_ms, worker.claimed_at + _PACE_MS) if few else self._now_ms)

    def _start(self, worker: _Worker, job_id: str) -> None:
        (job, arrived_ms), scale, result = self._jobs[job_id], self._scale, self.result
        assert job.adapter is not None
        there = worker.use(job.adapter.digest)
        seen = job.adapter.digest in self._seen
        self._seen.add(job.adapter.digest)
        result.hits += there
        result.misses += seen and not there
        result.firsts += not seen
        result.waits_ms[job.tenant].append(self._now_ms - arrived_ms)
        start_ms = self._now_ms - arrived_ms + (0.0 if there else scale.load_ms)
        result.starts_ms[self._number_of[job.adapter.digest]].append(start_ms)
        result.served[job.tenant] += PROMPT_WEIGHT * scale.prompt + OUTPUT_WEIGHT * job.stopping.max_tokens
        worker.running[job_id] = self._now_ms
        runs_ms = job.stopping.max_tokens * scale.token_ms + (0.0 if there else scale.load_ms)
        self._at(self._now_ms + runs_ms, "end", f"{worker.worker_id}/{job_id}")

    def _end(self, worker: _Worker, job_id: str) -> None:
        job, _ = self._jobs.pop(job_id)
        del worker.running[job_id]
        self._queue.charge([UsageReport(job_id, 1, job.stopping.max_tokens, ended=True)], self._now_ms)
        if not worker.waits:
            self._look_paced(worker)

    def _beat(self, worker: _Worker) -> None:
        scale = self._scale
        reports = [
            UsageReport(job_id, 1, int((self._now_ms - since_ms) / scale.token_ms))
            for job_id, since_ms in worker.running.items()
        ]
        self._queue.charge(reports, self._now_ms)
        self._at(self._now_ms + REPORT_MS, "beat", worker.worker_id)
