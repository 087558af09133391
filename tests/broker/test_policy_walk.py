"""Random walks over the scripts and their model: the same decisions, and what must hold of every one of them.

`BROKER_WALKS=100` walks longer than the gate does.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from hypothesis.strategies import integers
from redis.asyncio import Redis

from broker import terms
from broker.connection import connect
from broker.messages import Capacity, RowToShare
from broker.terms import NO_KEY, KeyTerms, Placement, QueueLimits, QueueState, UsageReport
from tests.broker.both_queues import BASE, BothQueues, make_job
from tests.broker.role_clients import role_clients
from tests.broker.scripts_clock import CLOCK, scripts_on_test_clock

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
T = TypeVar("T")


class Walk(RuleBasedStateMachine):
    """Walk one cell with three workers and four tenants."""

    runner: asyncio.Runner
    redis: Redis
    roles: tuple[Redis, Redis]
    # Number of events of each kind in all walks together.
    happened: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        # In every other walk workers rest after they have looked at more than one job in vain.
        looks_limit = 1 if self.happened["walks"] % 2 else 1 << 30
        self.both = BothQueues(
            self.redis,
            LIMITS[self.happened["walks"] % len(LIMITS)],
            scripts=scripts_on_test_clock(**LEADS),
            looks_limit=looks_limit,
            roles=self.roles,
        )
        self.weights = WEIGHTS[self.happened["walks"] % len(WEIGHTS)]
        self.happened["walks"] += 1
        self.run(self.both.start())
        self.count = 0
        # Job ids that were let in, with their attempts; those that are claimed, and what they have made.
        self.waiting: dict[str, int] = {}
        self.running: dict[tuple[str, int], int] = {}
        self.displaced: dict[str, int] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Drive the queue on Redis; hypothesis knows no coroutines."""
        return self.runner.run(work)

    @rule(seed=integers(0, 1 << 32))
    def some(self, seed: int) -> None:
        """Some operations; hypothesis chooses how many times, and with which seeds."""
        chance = random.Random(seed)
        operations = (
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
        for _ in range(25):
            (operation,) = chance.choices(operations, weights=(12, 6, 1, 3, 1, 2, 0.3, 0.3, 0.1, 0.1))
            operation(chance)
        # Counters and totals only ever grow apart: a difference shows later too.
        self.run(self.both.check(TENANTS))

    def enqueue(self, chance: random.Random) -> None:
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
        key = chance.choice(KEY_TERMS)
        refused = self.run(self.both.enqueue(job, Placement(self.weights[tenant], prefer, 20.5, key=key)))
        self.happened[refused or "queued"] += 1
        self.happened["resumed"] += job.job_id in {job_id for _, job_id in self.both.model.waiting.redispatched}
        self.happened["resumed as a newcomer"] += job.resumed and job.job_id in self._newcomers(tenant)
        if not refused:
            self.waiting[job.job_id] = 1
            waiting = self.both.model.waiting.find(job.job_id)
            self.happened["turns"] += waiting is not None and waiting.turn is not None and waiting.turn > 0
        states = self.run(self.both.look_up(*self.waiting.items()))
        for job_id, state in zip(tuple(self.waiting), states, strict=True):
            if state is QueueState.DISPLACED:
                self.displaced[job_id] = self.waiting.pop(job_id)
                self.happened["displaced"] += 1

    def _newcomers(self, tenant: str) -> set[str]:
        return {job_id for _, job_id in self.both.model.waiting.queue(tenant)}

    def dispatch_again(self, chance: random.Random) -> None:
        attempts = [*self.running, *self.waiting.items()]
        if attempts:
            job_id = chance.choice(attempts)[0]
            attempt = max(attempt for other, attempt in attempts if other == job_id)
            job = make_job(job_id, job_id[0], adapter=chance.choice(ADAPTERS), attempt=attempt + 1)
            emitted: dict[int, tuple[int, ...]] = {0: (7,)} if chance.random() < 0.5 else {}
            job = replace(job, strikes=chance.choice((0, 0, 1, 2)), emitted=emitted)
            placement = Placement(self.weights[job_id[0]], key=chance.choice(KEY_TERMS), begun=chance.random() < 0.5)
            refused = self.run(self.both.enqueue(job, placement))
            assert refused in ("", "quarantined")
            self.waiting.pop(job_id, None)
            if not refused:
                self.waiting[job_id] = attempt + 1
                self.happened["waits again as a newcomer"] += job_id in self._newcomers(job_id[0])

    def claim(self, chance: random.Random) -> None:
        worker, rows = chance.choice(WORKERS), chance.randint(0, 4)
        resident = chance.choice(((), ("sha256:x",), ("sha256:y", "sha256:z")))
        # A worker rests only while it takes the same kinds of jobs; the last one changes with every claim.
        links = chance.choice((None, None, ROUTERS, ROUTERS[:1], ()))
        max_rank, routers = {"w1": (64, None), "w2": (8, ROUTERS[:1])}.get(worker, (chance.choice((8, 64, 64)), links))
        here = tuple((tenant, chance.randint(0, 3)) for tenant in TENANTS)
        share = RowToShare(chance.choice(TENANTS), chance.choice((1.0, 2.0)), here) if chance.random() < 0.5 else None
        only_tenant = chance.choice(("", *TENANTS))
        capacity = Capacity(rows, 4, chance.choice((0, 10, 100)), 60, max_rank, resident, routers, share, only_tenant)
        reports = self._reports(chance) if chance.random() < 0.5 else ()
        self.happened["reported"] += any(report.tokens for report in reports)
        before = len(self.both.model.waiting)
        claimed = self.run(self.both.claim(worker, capacity, *reports, freed=chance.random() < 0.2))
        self.happened["suspects"] += sum(job.suspect for job in claimed.jobs)
        self.happened["apart"] += sum(job.suspect and job.attempt == 1 for job in claimed.jobs)
        over = sum(min(job.rows, 4) for job in claimed.jobs) - rows
        assert over <= (0 if share is None else 3)
        self.happened["shared"] += over > 0
        self.happened["dropped"] += before - len(claimed.jobs) - claimed.waiting
        self.happened["held"] += claimed.hold_ms > 0
        self.happened["ahead"] += bool(claimed.adapter_requests)
        self.happened["unlinked"] += bool(claimed.unlinked)
        waiting = map(self.both.model.waiting.find, self.waiting)
        self.happened["reserved"] += any(one.reserved_for == worker for one in waiting if one is not None)
        for job in claimed.jobs:
            assert self.waiting.pop(job.job_id) == job.attempt, "handed out twice, or an older attempt"
            assert job.rank <= max_rank
            assert job.base_digest == BASE
            assert routers is None or job.reply_to in routers
            self.happened["again" if job.attempt > 1 else "claimed"] += 1
            self.running[job.job_id, job.attempt] = 0

    def charge(self, chance: random.Random) -> None:
        reports = self._reports(chance)
        for _ in range(chance.choice((1, 2))):
            self.run(self.both.charge(*reports))

    def _reports(self, chance: random.Random) -> tuple[UsageReport, ...]:
        if not self.running:
            return ()
        key = chance.choice(sorted(self.running))
        self.running[key] += chance.choice((0, 0, 1, 8))
        report = UsageReport(*key, self.running[key], ended=chance.random() < 0.5, ran=self.running[key] > 0)
        self.happened["refunded"] += report.ended and not report.ran
        if report.ended:
            del self.running[key]
        return (report,)

    def finish(self, chance: random.Random) -> None:
        if self.waiting:
            job_id = chance.choice(sorted(self.waiting))
            self.run(self.both.finish(job_id, self.waiting.pop(job_id)))

    def advance(self, chance: random.Random) -> None:
        self.run(self.both.advance(chance.choice((1, 30, 60, 600, 3_000, -600_000, 600_000))))

    def clear(self, chance: random.Random) -> None:
        self.run(self.both.clear_free_rows(chance.choice(WORKERS)))

    def beat(self, chance: random.Random) -> None:
        self.run(self.both.beat_router(chance.choice(ROUTERS)))

    def convict(self, chance: random.Random) -> None:
        self.count += 1
        self.run(self.both.record_death(chance.choice(TENANTS), chance.choice(ADAPTERS), f"killer/{self.count}"))

    def purge(self, chance: random.Random) -> None:
        tenant = chance.choice(TENANTS)
        self.happened["purged"] += any(job_id.startswith(tenant) for job_id in self.waiting)
        self.run(self.both.forget_tenant(tenant))
        self.waiting = {job_id: attempt for job_id, attempt in self.waiting.items() if not job_id.startswith(tenant)}

    def teardown(self) -> None:
        """Once everything has ended nothing is left of it."""
        self.happened["news"] += self.both.found_in_news
        for job_id, attempt in (self.waiting | self.displaced).items():
            self.run(self.both.finish(job_id, attempt))
        for key, made in self.running.items():
            self.run(self.both.charge(UsageReport(*key, made, ended=True)))
        left = self.run(self.both.names())
        kept = (
            "arrivals",
            "news",
            "floor",
            "idle",
            "wake",
            "rooms",
            "routers",
            "born",
            "passed_on",
            "deaths",
            "quarantine",
            "suspects",
            CLOCK,
        )
        stale = {name for name in left if not name.startswith((*kept, "charged", "totals"))}
        assert stale == set()
        assert self.run(self.both.tenants_with_totals()) == []


@pytest.fixture
def runner(valkey_url: str) -> Iterator[asyncio.Runner]:
    """A loop beside hypothesis, with a client."""
    with asyncio.Runner() as runner:
        Walk.runner, Walk.redis, Walk.happened = runner, runner.run(connect(valkey_url)), Counter()
        clients = role_clients(Walk.redis, valkey_url)
        Walk.roles = runner.run(clients.__aenter__())
        yield runner
        runner.run(clients.__aexit__(None, None, None))
        runner.run(Walk.redis.aclose())


def test_the_scripts_and_their_model_decide_alike(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, lead in LEADS.items():
        monkeypatch.setattr(terms, name, lead)
    run_state_machine_as_test(
        Walk,
        settings=settings(max_examples=WALKS, stateful_step_count=10, derandomize=True, deadline=None, database=None),
    )
    print(Walk.happened)
    for event in ("queued", "claimed", "again", "shared", "reported", "held", "ahead", "reserved", "late", "refunded",
                  "dropped", "unlinked", "news", "jobs", "bytes", "tenant_jobs", "tenant_bytes", "displaced", "resumed",
                  "resumed as a newcomer", "waits again as a newcomer", "quarantined", "suspects", "apart", "purged",
                  "turns", "key_jobs", "key_bytes"):  # fmt: skip
        assert Walk.happened[event], f"no walk has shown {event}"
