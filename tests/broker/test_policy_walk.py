"""Random walks over the shipped functions, and what must hold after each step.

`BROKER_WALKS=100` walks longer than the gate does.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from dataclasses import replace

from loraplex.contracts.broker.messages import Capacity, Job, RowToShare
from loraplex.contracts.broker.terms import (
    ALL_ROWS,
    NO_KEY,
    PATIENCE_MS,
    KeyTerms,
    Placement,
    QueueLimits,
    QueueState,
    UsageReport,
)
from tests.broker.clocked_queue import BASE, CLOCK, KEYS, ClockedQueue, WaitingJob, library_on_test_clock, make_job

TENANTS = ("a", "b", "c", "d")
WORKERS = ("w1", "w2", "w3")
ROUTERS = ("r1", "r2")
ADAPTERS = ("", "", "sha256:x", "sha256:y", "sha256:z")
# Weights of the walks, in turn; plans of older versions may have any weight.
WEIGHTS = (
    {"a": 1.0, "b": 3.0, "c": 0.7, "d": 1.0},
    {"a": 1.0, "b": 1000.0, "c": 0.001, "d": 1.0},
    {"a": 1.0, "b": 3.0, "c": 1e-15, "d": 1e-300},
)
# Terms of API keys, of all tenants alike; many calls have none.
KEY_TERMS = (
    *(NO_KEY,) * 3,
    KeyTerms("k1", weight=3.0),
    KeyTerms("k2", weight=0.7),
    KeyTerms("k3", weight=1.5, queue_share=0.1),
    KeyTerms("k4", queue_share=0.4),
)
WALKS = int(os.environ.get("BROKER_WALKS", "8"))
# Limits of the walks, in turn.
LIMITS = (
    QueueLimits(jobs=6),
    QueueLimits(bytes=1_500),
    QueueLimits(tenant_jobs=8),
    QueueLimits(tenant_bytes=1_000),
)
# Low, so that some resumed jobs are beyond them.
LEADS = {"RESUME_LEAD_MS": 1_000, "RESUME_LEAD_WORK": 100}


class Walk:
    """Walk one cell with three workers and four tenants."""

    def __init__(self, seed: int, happened: Counter[str]) -> None:
        self.chance = random.Random(seed)
        # In every other walk workers rest after they have looked at more than one job in vain.
        looks_limit = 1 if seed % 2 else 1 << 30
        self.limits, self.weights = LIMITS[seed % len(LIMITS)], WEIGHTS[seed % len(WEIGHTS)]
        self.queue = ClockedQueue(limits=self.limits, library=library_on_test_clock(**LEADS), looks_limit=looks_limit)
        # Number of events of each kind in all walks together.
        self.happened = happened
        self.count = 0
        # Job ids that were let in, with their attempts; those that are claimed, and what they have made.
        self.waiting: dict[str, int] = {}
        self.running: dict[tuple[str, int], int] = {}
        self.displaced: dict[str, int] = {}
        self.jobs: dict[str, WaitingJob] = {}
        self.counters = dict.fromkeys(TENANTS, 0.0)
        # Whether this step may lower counters.
        self.lowers = False

    async def walk(self) -> None:
        """Take 250 steps, then end everything."""
        await self.queue.start()
        steps = (
            self.enqueue,
            self.claim,
            self.dispatch_again,
            self.charge,
            self.finish,
            self.advance,
            self.clear,
            self.beat,
            self.convict,
            self.purge,
        )
        for step in self.chance.choices(steps, weights=(12, 6, 1, 3, 1, 2, 0.3, 0.3, 0.1, 0.1), k=250):
            self.lowers = False
            await step(self.chance)
            await self.check()
        await self.end()

    async def check(self) -> None:
        """Compare what Redis counts with the waiting jobs, and these with those that were let in and not handed out."""
        self.jobs = await self.queue.waiting()
        assert {job_id: job.attempt for job_id, job in self.jobs.items()} == self.waiting
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
        of_keys: defaultdict[str, Counter[str]] = defaultdict(Counter)
        places = defaultdict(set)
        for job_id, job in self.jobs.items():
            begun = job.place == job_id
            sums[job.tenant][2 * begun] += job.size
            sums[job.tenant][2 * begun + 1] += job.work
            places["again" if begun else f"queue:{job.tenant}"].add(job.place)
            if job.key and not begun:
                of_keys[job.tenant].update({f"jobs:{job.key}": 1, f"bytes:{job.key}": job.size})
        totals = await self.queue.totals()
        cell = totals.pop("/cell", [0, 0])
        assert {tenant: record[:4] for tenant, record in totals.items()} == sums
        assert cell[:2] == [sum(one[0] for one in sums.values()), sum(one[2] for one in sums.values())]
        assert cell[6:] in ([], [sum(one[1] + one[3] for one in sums.values())])
        for name in ("again", *(f"queue:{tenant}" for tenant in TENANTS)):
            assert {*await self.queue.members(name)} == places[name]
        active = {*await self.queue.members("tenants")}
        assert active == {tenant for tenant in TENANTS if places[f"queue:{tenant}"]}
        for tenant in TENANTS:
            kept = await self.queue.fields(f"queue:{tenant}/keys")
            counts = {name: int(count) for name, count in kept.items() if name.startswith(("jobs", "bytes"))}
            assert counts == of_keys[tenant]
        counters = {tenant: await self.queue.counter(tenant) for tenant in TENANTS}
        assert self.lowers or all(counters[tenant] >= self.counters[tenant] for tenant in TENANTS)
        self.counters = counters

    async def enqueue(self, chance: random.Random) -> None:
        self.count += 1
        tenant, adapter = chance.choice(TENANTS), chance.choice(ADAPTERS)
        job = make_job(
            f"{tenant}/{self.count}",
            tenant,
            prompt=chance.choice((1, 5, 40)),
            adapter=adapter,
            rank=chance.choice((8, 8, 8, 64)),
            n=chance.choice((1, 1, 1, 3, 6)),
            priority=chance.choice((0, 0, 5, -100)),
            deadline_ms=chance.choice((0, 0, 400, 5_000)),
            base=chance.choice((BASE, BASE, BASE, BASE, "sha256:9")),
            router=chance.choice(ROUTERS),
            resumed=chance.random() < 0.3,
        )
        prefer = chance.choice(((), ("w1",), ("w2", "w1"), ("w3", "w2"))) if adapter else ()
        placement = Placement(self.weights[tenant], prefer, 20.5, key=chance.choice(KEY_TERMS))
        refused = await self.queue.enqueue(job, placement)
        self.happened[refused or "queued"] += 1
        if not refused:
            self.waiting[job.job_id] = 1
        states = await self.queue.look_up(*self.waiting.items())
        for job_id, state in zip(tuple(self.waiting), states, strict=True):
            if state is QueueState.DISPLACED:
                assert job_id[0] != tenant
                self.displaced[job_id] = self.waiting.pop(job_id)
                self.happened["displaced"] += 1
        if not refused:
            await self.check_limits(job, self.limits.for_placement(placement))

    async def check_limits(self, newcomer: Job, limits: QueueLimits) -> None:
        """Check that with a job which was let in the newcomers are within the limits."""
        jobs = await self.queue.waiting()
        job = jobs[newcomer.job_id]
        if job.place == newcomer.job_id:
            self.happened["resumed"] += 1
            return
        self.happened["resumed as a newcomer"] += newcomer.resumed
        self.happened["turns"] += job.place[3] == ":" and int(job.place[4:18]) > 0
        newcomers = [one for other, one in jobs.items() if one.place != other]
        for own, most_jobs, most_bytes in (
            (newcomers, limits.jobs, limits.bytes),
            ([one for one in newcomers if one.tenant == job.tenant], limits.tenant_jobs, limits.tenant_bytes),
            ([one for one in newcomers if (one.tenant, one.key) == (job.tenant, job.key) and job.key],
             limits.key_jobs, limits.key_bytes),
        ):  # fmt: skip
            assert len(own) <= most_jobs
            assert sum(one.size for one in own) <= most_bytes

    async def dispatch_again(self, chance: random.Random) -> None:
        attempts = [*self.running, *self.waiting.items()]
        if not attempts:
            return
        job_id = chance.choice(attempts)[0]
        attempt = max(attempt for other, attempt in attempts if other == job_id)
        job = make_job(job_id, job_id[0], adapter=chance.choice(ADAPTERS), attempt=attempt + 1)
        emitted: dict[int, tuple[int, ...]] = {0: (7,)} if chance.random() < 0.5 else {}
        job = replace(job, strikes=chance.choice((0, 0, 1, 2)), emitted=emitted)
        placement = Placement(self.weights[job_id[0]], key=chance.choice(KEY_TERMS), begun=chance.random() < 0.5)
        refused = await self.queue.enqueue(job, placement)
        assert refused in ("", "quarantined")
        self.waiting.pop(job_id, None)
        if not refused:
            self.waiting[job_id] = attempt + 1
            self.happened["waits again as a newcomer"] += job_id in await self.queue.newcomers(job_id[0])

    async def claim(self, chance: random.Random) -> None:
        worker, rows = chance.choice(WORKERS), chance.randint(0, 4)
        resident = chance.choice(((), ("sha256:x",), ("sha256:y", "sha256:z")))
        # A worker rests only while it takes the same kinds of jobs; the last one changes with every claim.
        links = chance.choice((None, None, ROUTERS, ROUTERS[:1], ()))
        max_rank, routers = {"w1": (64, None), "w2": (8, ROUTERS[:1])}.get(worker, (chance.choice((8, 64, 64)), links))
        here = tuple((tenant, chance.randint(0, 3)) for tenant in TENANTS)
        share = RowToShare(chance.choice(TENANTS), chance.choice((1.0, 2.0)), here) if chance.random() < 0.5 else None
        only_tenant = chance.choice(("", *TENANTS))
        capacity = Capacity(rows, 4, chance.choice((0, 10, 100)), 45, max_rank, resident, routers, share, only_tenant)
        reports = self._reports(chance) if chance.random() < 0.5 else ()
        self.happened["reported"] += any(report.tokens for report in reports)
        await self.hand_out(worker, capacity, *reports, freed=chance.random() < 0.2)
        names = [KEYS.job(job_id) for job_id in self.waiting]
        self.happened["reserved"] += sum([await self.queue.redis.hexists(name, "reserved") for name in names])

    async def hand_out(self, worker: str, capacity: Capacity, *reports: UsageReport, freed: bool = False) -> None:
        """Claim; each job must suit the worker, and wait no more. Others may only go because nobody can use them."""
        jobs = self.jobs
        useless = {job_id for job_id, job in jobs.items() if await self.is_useless(job)}
        claimed = await self.queue.claim(worker, capacity, *reports, freed=freed)
        young_tokens = 0
        for job in claimed.jobs:
            assert self.waiting.pop(job.job_id) == job.attempt, "handed out twice, or an older attempt"
            waited = jobs[job.job_id]
            assert job.job_id not in useless
            assert waited.tokens <= capacity.max_tokens
            assert waited.rank <= capacity.max_rank
            assert waited.base == BASE
            assert capacity.routers is None or waited.router in capacity.routers
            young_tokens += waited.prefill if 0 <= self.queue.now_ms - waited.queued < PATIENCE_MS else 0
            self.happened["again" if job.attempt > 1 else "claimed"] += 1
            self.running[job.job_id, job.attempt] = 0
        over = sum(min(job.rows, capacity.rows_limit) for job in claimed.jobs) - capacity.rows
        assert over <= (0 if capacity.row_to_share is None else capacity.rows_limit - 1)
        assert young_tokens <= capacity.tokens or capacity.row_to_share is not None
        assert claimed.waiting == await self.queue.count_waiting()
        for job_id in set(self.waiting) - set(await self.queue.waiting()):
            assert job_id in useless, "lost"
            del self.waiting[job_id]
            self.happened["dropped"] += 1
        self.happened["shared"] += over > 0
        self.happened["held"] += claimed.hold_ms > 0
        self.happened["ahead"] += bool(claimed.adapter_requests)
        self.happened["unlinked"] += bool(claimed.unlinked)
        self.happened["suspects"] += sum(job.suspect for job in claimed.jobs)
        self.happened["apart"] += sum(job.suspect and job.attempt == 1 for job in claimed.jobs)

    async def is_useless(self, job: WaitingJob) -> bool:
        """Return whether a claim drops a job: its deadline has passed, its router is dead, or it is in quarantine."""
        if 0 < job.deadline <= self.queue.now_ms or job.router not in await self.queue.live_routers():
            return True
        if job.attempt > 1 and job.prefill > job.prompt and job.rows < ALL_ROWS:
            return False
        return await self.queue.is_quarantined(job.tenant, job.adapter)

    async def charge(self, chance: random.Random) -> None:
        reports = self._reports(chance)
        for _ in range(chance.choice((1, 2))):
            await self.queue.charge(*reports)

    def _reports(self, chance: random.Random) -> tuple[UsageReport, ...]:
        if not self.running:
            return ()
        key = chance.choice(sorted(self.running))
        self.running[key] += chance.choice((0, 0, 1, 8))
        report = UsageReport(*key, self.running[key], ended=chance.random() < 0.5, ran=self.running[key] > 0)
        if report.ended:
            del self.running[key]
            self.lowers = not report.ran
            self.happened["refunded"] += not report.ran
        return (report,)

    async def finish(self, chance: random.Random) -> None:
        if self.waiting:
            job_id = chance.choice(sorted(self.waiting))
            await self.queue.finish(job_id, self.waiting.pop(job_id))

    async def advance(self, chance: random.Random) -> None:
        await self.queue.advance(chance.choice((1, 30, 60, 600, 3_000, -600_000, 600_000)))

    async def clear(self, chance: random.Random) -> None:
        await self.queue.clear_free_rows(chance.choice(WORKERS))

    async def beat(self, chance: random.Random) -> None:
        self.lowers = True  # where one is so high that all are rebased
        await self.queue.beat_router(chance.choice(ROUTERS))

    async def convict(self, chance: random.Random) -> None:
        self.count += 1
        await self.queue.record_death(chance.choice(TENANTS), chance.choice(ADAPTERS), f"killer/{self.count}")

    async def purge(self, chance: random.Random) -> None:
        self.lowers, tenant = True, chance.choice(TENANTS)
        waiting = {job_id: attempt for job_id, attempt in self.waiting.items() if job_id[0] != tenant}
        assert await self.queue.forget_tenant(tenant) == len(self.waiting) - len(waiting)
        self.happened["purged"] += len(self.waiting) > len(waiting)
        self.waiting = waiting

    async def end(self) -> None:
        """A worker with room for everything gets all jobs of its base; once they have ended nothing is left of them."""
        await self.queue.advance(100_000)
        roomy = Capacity(99, 99, 1 << 30, 1 << 30, 64)
        for _ in range(len(self.waiting)):
            await self.hand_out("w9", roomy)
            await self.queue.advance(1_000)
            await self.check()
        assert {job.base for job in self.jobs.values()} <= {"sha256:9"}
        self.happened["news"] += self.queue.found_in_news
        for job_id, attempt in (self.waiting | self.displaced).items():
            await self.queue.finish(job_id, attempt)
        for key, made in self.running.items():
            await self.queue.charge(UsageReport(*key, made, ended=True))
        kept = ("arrivals", "arrived_work", "claimed_work", "news", "floor", "idle", "wake", "rooms", "routers", "born",
                "demand", "roll:", "passed_on", "deaths", "quarantine", "suspects", "charged", "totals",
                CLOCK)  # fmt: skip
        assert {name for name in await self.queue.names() if not name.startswith(kept)} == set()
        assert set(await self.queue.totals()) <= {"/cell"}


async def test_what_holds_of_the_queue_holds_after_each_step() -> None:
    happened = Counter[str]()
    for seed in range(WALKS):
        print(f"seed {seed}")
        await Walk(seed, happened).walk()
    print(happened)
    for event in ("queued", "claimed", "again", "shared", "reported", "held", "ahead", "reserved", "late", "refunded",
                  "dropped", "unlinked", "news", "jobs", "bytes", "tenant_jobs", "tenant_bytes", "displaced", "resumed",
                  "resumed as a newcomer", "waits again as a newcomer", "quarantined", "suspects", "apart", "purged",
                  "turns", "key_jobs", "key_bytes"):  # fmt: skip
        assert happened[event], f"no walk has shown {event}"
