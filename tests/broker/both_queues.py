"""A queue on Redis and its model in Python, driven alike: whatever they decide must be the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from bench.queue_model.decisions import ClaimDecision
from bench.queue_model.queue_model import QueueModel
from broker.claims import ClaimMemory
from broker.codec import decode_adapter_request
from broker.functions import load
from broker.keys import Keys
from broker.liveness import Liveness
from broker.messages import AdapterRef, Capacity, Job
from broker.queue import DeadlineUnattainableError, JobQueue, QuarantinedError, QueueFullError, RemovedRecords
from broker.scripts import Scripts
from broker.terms import Claimed, Placement, QueueLimits, QueueState, UsageReport
from options import SamplingParams, StoppingParams
from tests.broker.scripts_clock import CLOCK, SCRIPTS_ON_TEST_CLOCK, START_MS

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


@dataclass
class BothQueues:
    """Both; every method compares what they say."""

    redis: Redis
    limits: QueueLimits = field(default_factory=QueueLimits)
    now_ms: int = START_MS
    scripts: Scripts = SCRIPTS_ON_TEST_CLOCK
    # Minimum number of jobs looked at in vain for a rest of the worker; tests of what claims find let nobody rest.
    looks_limit: int = 1 << 30
    # A router's and a worker's clients, where they are not to do all that the server's own user may.
    roles: tuple[Redis, Redis] | None = None

    def __post_init__(self) -> None:
        self.model = QueueModel(self.limits)
        self._queues: dict[str, JobQueue] = {}
        self._router, self._worker = self.roles or (self.redis, self.redis)
        self._charges = JobQueue(self._worker, KEYS, scripts=self.scripts)
        self._liveness = Liveness(self._router, KEYS, scripts=self.scripts)
        # The model's workers remember their claims as those of the queue do.
        self._memories: dict[str, ClaimMemory] = {}
        # Time by the workers' own clocks, which do not go back.
        self.elapsed_ms = 0
        self.found_in_news = 0
        # Jobs that were enqueued with a strike.
        self._struck: set[str | None] = set()

    def _queue(self, worker: str = "") -> JobQueue:
        if worker not in self._queues:
            self._memories[worker] = self._new_memory()
            self._queues[worker] = JobQueue(
                self._worker if worker else self._router,
                KEYS,
                limits=self.limits,
                worker_id=worker,
                scripts=self.scripts,
                memory=self._new_memory(),
            )
        return self._queues[worker]

    def _new_memory(self) -> ClaimMemory:
        return ClaimMemory(lambda: self.elapsed_ms / 1e3, looks_limit=self.looks_limit, rest_per_look_s=0.05)

    async def start(self) -> None:
        """Empty the database and set its clock."""
        await self.redis.flushall()
        await load(self.redis, self.scripts.library)
        await self.advance(0)

    async def advance(self, ms: int) -> None:
        """Let time pass; less than 0: Redis's clock goes back."""
        self.now_ms, self.elapsed_ms = self.now_ms + ms, self.elapsed_ms + max(ms, 0)
        await self.redis.set(CLOCK, self.now_ms)

    async def enqueue(self, job: Job, placement: Placement | None = None) -> str:
        """Empty, or why it was refused: a bound, or `late`. Later attempts have begun, unless `placement` says else."""
        placement = placement or Placement(begun=job.attempt > 1)
        if job.suspect:
            self._struck.add(job.job_id)
        refusal = self.model.enqueue(job, placement, self.now_ms)
        why = refusal.why if refusal else ""
        message, wait_ms = "", 0
        try:
            await self._queue().enqueue(job, placement)
        except QueueFullError as error:
            message = str(error)
        except DeadlineUnattainableError as error:
            message, wait_ms = "late", error.wait_ms
        except QuarantinedError as error:
            message, wait_ms = "quarantined", error.left_ms
        if why not in ("", "late", "quarantined"):
            whose, _, unit = why.rpartition("_")
            owner = {"tenant": f" of {job.tenant}", "key": f" of API key {placement.key.key}"}.get(whose, "")
            assert message == f"{getattr(self.limits.for_placement(placement), why)} {unit} may wait{owner}"
        else:
            assert (message, wait_ms) == (why, refusal.wait_ms if refusal else 0)
        return why

    async def claim(self, worker: str, capacity: Capacity, *reports: UsageReport, freed: bool = False) -> Claimed:
        """Claim as the worker, which reports what jobs have made."""
        claimed = await self._queue(worker).claim(BASE, capacity, reports, freed=freed)
        decided = self._decide(worker, capacity, reports, freed=freed)
        assert decided.job_ids == tuple(job.job_id for job in claimed.jobs)
        suspects = [job.job_id for job in claimed.jobs if job.suspect]
        assert decided.apart is None or decided.apart == suspects[-1]
        assert set(suspects) <= self._struck | {decided.apart}
        assert (decided.waiting, decided.hold_ms) == (claimed.waiting, claimed.hold_ms)
        assert (decided.unlinked, decided.crowded) == (claimed.unlinked, claimed.crowded)
        assert [decode_adapter_request(data) for data in decided.adapter_requests] == claimed.adapter_requests
        return claimed

    def _decide(self, worker: str, capacity: Capacity, reports: Sequence[UsageReport], *, freed: bool) -> ClaimDecision:
        self.model.charge(reports, self.now_ms)
        memory = self._memories[worker]
        plan = memory.plan(BASE, capacity, freed=freed)
        decided = self.model.claim(worker, BASE, capacity, self.now_ms, plan)
        self.found_in_news += plan.news_only and len(decided.job_ids)
        found = bool(decided.job_ids)
        memory.note(plan, capacity, found=found, seen=decided.seen, looks=decided.looks, live_workers=0)
        return decided

    async def charge(self, *reports: UsageReport) -> None:
        """Report what jobs have made."""
        self.model.charge(reports, self.now_ms)
        await self._charges.charge(reports)

    async def finish(self, job_id: str, attempt: int) -> None:
        """A job ended."""
        self.model.finish(job_id, attempt)
        await self._queue().finish(job_id, attempt)

    async def forget_tenant(self, tenant: str) -> None:
        """A tenant is purged."""
        found = await self._queue().forget_tenant(tenant)
        assert found.jobs == self.model.forget_tenant(tenant, self.now_ms)
        assert await self._queue().forget_tenant(tenant) == RemovedRecords()

    async def look_up(self, *jobs: tuple[str, int]) -> list[QueueState]:
        """The states of attempts, by job id and attempt."""
        states = await self._queue().look_up(jobs)
        assert states == [self.model.look_up(*job) for job in jobs]
        return states

    async def record_death(self, tenant: str, adapter: str, job_id: str) -> int:
        """A job ended because engines died of it."""
        refused_ms = self.model.record_death(tenant, adapter, job_id, self.now_ms)
        assert await self._queue().record_death(tenant, adapter, job_id) == refused_ms
        return refused_ms

    async def clear_free_rows(self, worker: str) -> None:
        """A worker has not claimed for long."""
        self.model.clear_free_rows(worker)
        await self.redis.hdel(KEYS.prefix + "rooms", worker)

    async def beat_router(self, router: str) -> None:
        """A router says that it lives."""
        self.model.beat_router(router, self.now_ms)
        await self._liveness.take_census(router)

    async def counter(self, tenant: str) -> float:
        """A tenant's counter."""
        await self.check([tenant])
        return self.model.counter_of(tenant)

    async def names(self) -> set[str]:
        """Redis's keys, without the cell's prefix."""
        keys = await self.redis.keys("*")
        return {key.decode().removeprefix(KEYS.prefix) for key in keys if isinstance(key, bytes)}

    async def tenants_with_totals(self) -> list[str | bytes]:
        """The tenants of which something is counted."""
        return [name for name in await self.redis.hkeys(KEYS.prefix + "totals") if name != b"/cell"]

    async def check(self, tenants: Sequence[str]) -> None:
        """Compare what is not in the answers."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for tenant in tenants:
                pipe.zscore(KEYS.prefix + "tenants", tenant)
                pipe.zscore(KEYS.prefix + "idle", tenant)
            pipe.zcard(KEYS.waiting)
            *scores, waiting = await pipe.execute()
        for tenant, active, idle in zip(tenants, scores[::2], scores[1::2], strict=True):
            kept = [score for score in (active, idle) if score is not None]
            # An idle tenant's counter below the lowest is kept for a while, and counts as the lowest.
            assert not kept or max(kept[0], self.model.waiting.counters.lowest()) == self.model.counter_of(tenant)
        assert waiting == len(self.model.waiting)
