"""Redis's clock in the tests' hands, a queue at its time, and what its keys in Redis say of the waiting jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import msgspec
from redis.asyncio import Redis

from bench.in_process.redis import Client, Server
from loraplex.contracts.broker.claims import ClaimMemory, ClaimPlan
from loraplex.contracts.broker.functions import Library, load, shipped_functions
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job
from loraplex.contracts.broker.queue import (
    DeadlineUnattainableError,
    JobQueue,
    QuarantinedError,
    QueueFullError,
    RemovedRecords,
)
from loraplex.contracts.broker.terms import (
    FACTS,
    PLACE_BYTES,
    QUARANTINE_LIMIT_MS,
    Claimed,
    Placement,
    QueueLimits,
    QueueLoad,
    QueueState,
    UsageReport,
)
from loraplex.contracts.options import SamplingParams, StoppingParams

CLOCK = "test:now"
START_MS = 1_700_000_000_000


def library_on_test_clock(**constants: int) -> Library:
    """Return a library whose clock is a key that the test sets.

    Free rows and charges are believed however slow the test is, and each census looks at the workers anew.
    """
    believed = {"ROLL_MS": 0, "FREE_ROWS_MS": 1 << 40, "CHARGE_RECORD_MS": 1 << 40, "REFUND_RECORD_MS": 1 << 40}
    text, clock = shipped_functions(**{**believed, **constants}), "redis.call('TIME')"
    assert clock in text
    return Library(text.replace(clock, f"{{0, 1000 * redis.call('GET', '{CLOCK}')}}"))


LIBRARY_ON_TEST_CLOCK = library_on_test_clock()


@dataclass
class Clock:
    """The time of LIBRARY_ON_TEST_CLOCK."""

    redis: Redis
    now_ms: int = START_MS

    async def advance(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms
        await self.redis.set(CLOCK, self.now_ms)


KEYS = Keys("tiny", "main")
BASE = "sha256:0"


def make_job(
    job_id: str,
    tenant: str,
    *,
    prompt: int = 4,
    max_tokens: int = 8,
    adapter: str = "",
    rank: int = 8,
    base: str = BASE,
    attempt: int = 1,
    n: int = 1,
    priority: int = 0,
    deadline_ms: int = 0,
    router: str = "here",
    resumed: bool = False,
) -> Job:
    """A job of `prompt` tokens."""
    return Job(
        job_id=job_id,
        tenant=tenant,
        model="tiny",
        base_digest=base,
        reply_to=router,
        prompt_ids=tuple(range(prompt)),
        stopping=StoppingParams(max_tokens),
        sampling=SamplingParams(seed=1),
        attempt=attempt,
        n=n,
        priority=priority,
        deadline_ms=deadline_ms,
        resumed=resumed,
        emitted={0: (7,)} if resumed else {},
        adapter=AdapterRef(f"r/{adapter}", adapter, rank, 1000) if adapter else None,
    )


class WaitingJob(msgspec.Struct, array_like=True):
    """A waiting job's facts, in their order in Redis (broker/terms.py, broker/lua/jobs.lua)."""

    tenant: str
    base: str
    adapter: str
    prefer: str
    router: str
    attempt: int
    weight: float
    tokens: int
    prefill: int
    prompt: int
    rank: int
    rows: int
    load: float
    key: str
    key_weight: float
    place: str
    size: int
    work: float
    queued: int
    deadline: float


_FACTS_BEGIN = b"\xdc" + (len(FACTS) + 5).to_bytes(2)


class _Memory(ClaimMemory):
    """A worker's memory of its claims, which keeps the last plan."""

    last: ClaimPlan

    def plan(self, base_digest: str, capacity: Capacity, *, freed: bool) -> ClaimPlan:
        self.last = super().plan(base_digest, capacity, freed=freed)
        return self.last


def in_process() -> Redis:
    """Return a client of an empty Redis in this process: a call takes a fraction of one to Valkey."""
    return Client(Server(lambda: START_MS))


@dataclass
class ClockedQueue:
    """A cell's queue, with its routers and workers."""

    redis: Redis = field(default_factory=in_process)
    limits: QueueLimits = field(default_factory=QueueLimits)
    now_ms: int = START_MS
    library: Library = LIBRARY_ON_TEST_CLOCK
    # Minimum number of jobs looked at in vain for a rest of the worker; tests of what claims find let nobody rest.
    looks_limit: int = 1 << 30
    # A router's and a worker's clients, where they are not to do all that the server's own user may.
    roles: tuple[Redis, Redis] | None = None

    def __post_init__(self) -> None:
        self._queues: dict[str, JobQueue] = {}
        self._memories: dict[str, _Memory] = {}
        self._router, self._worker = self.roles or (self.redis, self.redis)
        self._charges = JobQueue(self._worker, KEYS, library=self.library)
        self._liveness = Liveness(self._router, KEYS, library=self.library)
        # Time by the workers' own clocks, which do not go back.
        self.elapsed_ms = 0
        # Number of jobs that workers which rest have claimed.
        self.found_in_news = 0

    def _queue(self, worker: str = "") -> JobQueue:
        if worker not in self._queues:
            memory = _Memory(lambda: self.elapsed_ms / 1e3, looks_limit=self.looks_limit, rest_per_look_s=0.05)
            self._memories[worker] = memory
            redis = self._worker if worker else self._router
            self._queues[worker] = JobQueue(
                redis, KEYS, limits=self.limits, worker_id=worker, library=self.library, memory=memory
            )
        return self._queues[worker]

    async def start(self) -> None:
        """Empty the database and set its clock."""
        await self.redis.flushall()
        await load(self.redis, self.library)
        await self.advance(0)

    async def advance(self, ms: int) -> None:
        """Let time pass; less than 0: Redis's clock goes back."""
        self.now_ms, self.elapsed_ms = self.now_ms + ms, self.elapsed_ms + max(ms, 0)
        await self.redis.set(CLOCK, self.now_ms)

    async def enqueue(self, job: Job, placement: Placement | None = None) -> str:
        """Empty, or why it was refused: a bound, or `late`. Later attempts have begun, unless `placement` says else."""
        placement = placement or Placement(begun=job.attempt > 1)
        try:
            await self._queue().enqueue(job, placement)
        except QueueFullError as error:
            limit, unit = str(error).split()[:2]
            why = ("key_" if error.key else "tenant_" if error.tenant else "") + unit
            if int(limit) != getattr(self.limits.for_placement(placement), why):
                raise
            return why
        except DeadlineUnattainableError:
            return "late"
        except QuarantinedError:
            return "quarantined"
        return ""

    async def claim(self, worker: str, capacity: Capacity, *reports: UsageReport, freed: bool = False) -> Claimed:
        """Claim as the worker, which reports what jobs have made."""
        claimed = await self._queue(worker).claim(BASE, capacity, reports, freed=freed)
        self.found_in_news += self._memories[worker].last.news_only and len(claimed.jobs)
        return claimed

    async def charge(self, *reports: UsageReport) -> None:
        """Report what jobs have made."""
        await self._charges.charge(reports)

    async def finish(self, job_id: str, attempt: int) -> None:
        """A job ended."""
        await self._queue().finish(job_id, attempt)

    async def forget_tenant(self, tenant: str) -> int:
        """A tenant is purged; returns how many of its jobs waited."""
        found = await self._queue().forget_tenant(tenant)
        assert await self._queue().forget_tenant(tenant) == RemovedRecords()
        return found.jobs

    async def look_up(self, *jobs: tuple[str, int]) -> list[QueueState]:
        """The states of attempts, by job id and attempt."""
        return await self._queue().look_up(jobs)

    async def load(self) -> QueueLoad:
        """Return the load."""
        return await self._queue().load()

    async def record_death(self, tenant: str, adapter: str, job_id: str, age_ms: int = 0) -> int:
        """A job ended because engines died of it."""
        return await self._queue().record_death(tenant, adapter, job_id, age_ms)

    async def clear_free_rows(self, worker: str) -> None:
        """A worker has not claimed for long."""
        await self.redis.hdel(KEYS.prefix + "rooms", worker)

    async def beat_router(self, router: str) -> None:
        """A router says that it lives."""
        await self._liveness.take_census(router)

    async def want(self, adapter: str) -> None:
        """Let a job of an adapter come and go, so that later ones are held for the workers that the adapter prefers."""
        await self.enqueue(make_job(f"before {adapter}", "before", adapter=adapter))
        await self.finish(f"before {adapter}", 1)

    async def homes(self, busy: float | None) -> dict[str, int]:
        """Return the number of homes of the adapters with several."""
        return dict((await self._liveness.take_census("here", busy)).homes)

    async def live_routers(self) -> list[str]:
        """Return the routers whose jobs are not dropped."""
        return await self._liveness.live_routers()

    async def is_quarantined(self, tenant: str, adapter: str) -> bool:
        """Return whether a tenant's jobs with an adapter are refused."""
        scores = await self.redis.zmscore(KEYS.prefix + "quarantine", [tenant, f"{tenant} {adapter}"])
        return any(0 < float(score or 0) - self.now_ms <= QUARANTINE_LIMIT_MS for score in scores)

    async def counter(self, tenant: str) -> float:
        """A tenant's counter; that of an idle one is at least the lowest of the others."""
        active = await self.redis.zscore(KEYS.prefix + "tenants", tenant)
        if active is not None:
            return float(active)
        idle = await self.redis.zscore(KEYS.prefix + "idle", tenant)
        lowest = await self.redis.zrange(KEYS.prefix + "tenants", 0, 0, withscores=True)
        floor = lowest[0][1] if lowest else await self.redis.get(KEYS.prefix + "floor") or 0
        return max(float(floor), float(idle or 0))

    async def count_waiting(self) -> int:
        """Return how many jobs wait."""
        return await self._queue().count_waiting()

    async def members(self, name: str) -> list[str]:
        """Return the members of a sorted set of the cell, in order."""
        return [member.decode() for member in cast("list[bytes]", await self.redis.zrange(KEYS.prefix + name, 0, -1))]

    async def fields(self, name: str) -> dict[str, bytes]:
        """Return the fields of a hash of the cell."""
        kept = cast("dict[bytes, bytes]", await self.redis.hgetall(KEYS.prefix + name))
        return {field.decode(): value for field, value in kept.items()}

    async def newcomers(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's waiting jobs that have not begun, in order."""
        return [place[PLACE_BYTES:] for place in await self.members(f"queue:{tenant}")]

    async def begun(self) -> list[str]:
        """Return the ids of the waiting jobs that go before newcomers, in order."""
        return await self.members("again")

    async def waiting(self) -> dict[str, WaitingJob]:
        """Return the waiting jobs by their ids."""
        jobs = {}
        for job_id in await self.members("waiting"):
            facts = (await self.fields(f"job:{job_id}"))["facts"]
            jobs[job_id] = msgspec.msgpack.decode(_FACTS_BEGIN + facts, type=WaitingJob)
        return jobs

    async def names(self) -> set[str]:
        """Redis's keys, without the cell's prefix."""
        keys = await self.redis.keys("*")
        return {key.decode().removeprefix(KEYS.prefix) for key in keys if isinstance(key, bytes)}

    async def totals(self) -> dict[str, list[float]]:
        """Return the records of broker/lua/tenants.lua, by tenant; that of the cell is called `/cell`."""
        return {
            name: msgspec.msgpack.decode((b"\x97" if name == "/cell" else b"\x96") + packed, type=list[float])
            for name, packed in (await self.fields("totals")).items()
        }
