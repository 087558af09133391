"""A simulation of one worker and two tenants in virtual time, for bench.fairness.

The queue is the real one, on a Redis in this process; the engine is the real scheduler with a KV cache.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean

from bench.in_process.queue import TimedQueue
from loraplex.contracts.broker.messages import Capacity, Job, RowToShare
from loraplex.contracts.broker.terms import OUTPUT_WEIGHT, PROMPT_WEIGHT, Placement, QueueLimits, UsageReport
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.hash_engine import HashAdapterMemory
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine.scheduling.scheduler import Scheduler
from loraplex.worker.engine_api import EngineLimits, NewSequence, Output
from loraplex.worker.io.intake import FULL_S, row_to_share
from loraplex.worker.io.results import REPORT_S

BASE = "sha256:0"


@dataclass(frozen=True)
class FairnessSetup:
    """Sizes of a simulation. Rates are requests a second; quiet and loud tenant each have half of the engine."""

    minutes: float
    rates: Mapping[str, float] = field(default_factory=lambda: {"one": 1.5, "two": 3.0})
    quiet_rate: float = 0.2
    loud_times_share: float = 10.0
    prompt: int = 256
    answer: int = 256
    kv_tokens: int = 10_000
    rows: int = 32
    block_size: int = 16
    step_tokens: int = 512
    step_ms: float = 40.0
    token_ms: float = 0.1
    # Tokens of an answer of the tenant called long, whose answers hold their rows for longer than all others, the rate
    # of its requests, and the KV cache beside it: rows are what is scarce.
    long_answer: int = 1_000
    long_rate: float = 4.0
    long_kv_tokens: int = 48_000

    def answer_of(self, tenant: str) -> int:
        """Return the tokens of a tenant's answers."""
        return self.long_answer if tenant == "long" else self.answer


@dataclass(frozen=True)
class FairnessRun:
    """A simulation's result. `difference` is the largest service difference while every tenant had waiting work."""

    tokens_per_s: float
    ttft_s: Mapping[str, tuple[float, ...]]
    difference: float
    turnover_s: float


class FairnessSimulation:
    """A queue with one worker; the tenants' requests arrive at random, at their rates."""

    def __init__(self, setup: FairnessSetup, rates: Mapping[str, float], *, fair: bool, shared: bool = True) -> None:
        self._setup = setup
        self._fair = fair
        self._shared = shared
        self._now_ms = 0.0
        self._beat_ms = 0.0
        self._queue = TimedQueue(QueueLimits(jobs=1 << 30, tenant_jobs=1 << 30, bytes=1 << 50, tenant_bytes=1 << 50))
        blocks = setup.kv_tokens // setup.block_size
        self._limits = EngineLimits(setup.rows, blocks * setup.block_size, 64, 1 << 20, setup.block_size, blocks, 1)
        adapters = AdapterCache[int](1, HashAdapterMemory(), LoaderThreads(lambda: None), 1 << 20)
        self._scheduler = Scheduler(self._limits, (), setup.step_tokens, adapters)
        self._arrivals = sorted(
            (at_ms, tenant) for tenant, rate in rates.items() for at_ms in _times(tenant, rate, setup.minutes * 60e3)
        )
        self._tenant_of: dict[str, str] = {}
        self._arrived_ms: dict[str, float] = {}
        self._claimed_ms: dict[str, float] = {}
        self._made: dict[str, int] = {}
        self._jobs: dict[str, Job] = {}
        # The row to share after the last claim of the full worker, and the claim's time.
        self._last_claim: tuple[RowToShare | None, float] = None, 0.0
        self._served: dict[str, float] = dict.fromkeys(rates, 0.0)
        self._waiting: dict[str, int] = dict.fromkeys(rates, 0)
        self._ttft_s: dict[str, list[float]] = {tenant: [] for tenant in rates}
        self._held_s: list[float] = []
        self._tokens = 0
        # Counted since every tenant has had waiting work without a break.
        self._leads: list[float] = []
        self._difference = 0.0

    def run(self) -> FairnessRun:
        """Simulate until the time is over."""
        coming = iter([*self._arrivals, (float("inf"), "")])
        at_ms, tenant = next(coming)
        end_ms = self._setup.minutes * 60e3
        while self._now_ms < end_ms:
            while at_ms <= self._now_ms:
                self._arrive(tenant, at_ms)
                at_ms, tenant = next(coming)
            self._claim()
            if not self._step():
                self._now_ms = min(at_ms, end_ms)
            self._watch()
        self._queue.close()
        return FairnessRun(
            tokens_per_s=self._tokens / self._now_ms * 1e3,
            ttft_s={tenant: tuple(times) for tenant, times in self._ttft_s.items()},
            difference=self._difference,
            turnover_s=mean(self._held_s),
        )

    def _arrive(self, tenant: str, at_ms: float) -> None:
        setup, job_id = self._setup, f"{len(self._tenant_of)}"
        # A single tenant's queue is first come, first served.
        job = Job(
            job_id=job_id,
            tenant=tenant if self._fair else "all",
            model="model",
            base_digest=BASE,
            reply_to="router",
            # Every prompt has different ids, so that none is found in the prefix cache.
            prompt_ids=tuple(range(len(self._tenant_of), len(self._tenant_of) + setup.prompt)),
            stopping=StoppingParams(setup.answer_of(tenant)),
            sampling=SamplingParams(seed=1),
        )
        self._jobs[job_id] = job
        self._tenant_of[job_id] = tenant
        self._arrived_ms[job_id] = at_ms
        self._waiting[tenant] += 1
        self._queue.enqueue(job, Placement(), at_ms)

    def _claim(self) -> None:
        while self._queue.count_waiting(self._now_ms) and (capacity := self._capacity()) is not None:
            claimed = self._queue.claim("worker", BASE, capacity, self._now_ms)
            for job in claimed.jobs:
                self._take_in(job.job_id)
            if capacity.rows < 1:
                self._last_claim = self._row_to_share(), self._now_ms
            if capacity.rows > 0 or not claimed.jobs:
                return

    def _capacity(self) -> Capacity | None:
        """Return what the worker can take; None while it is full and it is not time for a claim."""
        setup, stats = self._setup, self._scheduler.stats()
        free = (stats.blocks_free + stats.blocks_cached) * setup.block_size
        entering = stats.rows_waiting * setup.prompt
        tokens = max(0, free - entering) if self._made else setup.kv_tokens
        rows, share = setup.rows - len(self._made), self._row_to_share()
        row, claimed_ms = self._last_claim
        if rows < 1 and (share is None or (share == row and self._now_ms - claimed_ms < FULL_S * 1e3)):
            return None
        return Capacity(rows, setup.rows, tokens, self._limits.max_tokens, 64, row_to_share=share)

    def _row_to_share(self) -> RowToShare | None:
        crowded = len(self._made) >= 2 * self._setup.rows
        if crowded or not self._shared:
            return None
        return row_to_share((self._jobs[job_id] for job_id in self._made), self._setup.rows)

    def _take_in(self, job_id: str) -> None:
        setup, tenant, job = self._setup, self._tenant_of[job_id], self._jobs[job_id]
        self._waiting[tenant] -= 1
        self._served[tenant] += PROMPT_WEIGHT * setup.prompt
        self._tokens += setup.prompt
        self._made[job_id] = 0
        self._claimed_ms[job_id] = self._now_ms
        stopping = StoppingParams(setup.answer_of(tenant), ignore_eos=True)
        shares = job.tenant if self._shared else ""
        self._scheduler.add_sequence(NewSequence(job_id, job.prompt_ids, stopping=stopping, tenant=shares))

    def _step(self) -> bool:
        outputs = self._scheduler.take_arrivals()
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        self._now_ms += self._setup.step_ms + self._setup.token_ms * batch.tokens
        outputs += self._scheduler.commit(batch, [1] * sum(row.samples for row in batch.rows))
        ended = [self._take(output) for output in outputs]
        reports = [report for report in ended if report]
        if self._now_ms >= self._beat_ms:
            self._beat_ms = self._now_ms + REPORT_S * 1e3
            reports += [UsageReport(job_id, 1, made) for job_id, made in self._made.items()]
        self._queue.charge(reports, self._now_ms)
        return True

    def _take(self, output: Output) -> UsageReport | None:
        """Count a step's output; returns the last usage report of a sequence that has ended."""
        job_id, tenant = output.sequence_id, self._tenant_of[output.sequence_id]
        if not self._made[job_id]:
            self._ttft_s[tenant].append((self._now_ms - self._arrived_ms[job_id]) / 1e3)
        self._made[job_id] += len(output.token_ids)
        self._tokens += len(output.token_ids)
        self._served[tenant] += OUTPUT_WEIGHT * len(output.token_ids)
        if output.finish is None:
            return None
        self._held_s.append((self._now_ms - self._claimed_ms[job_id]) / 1e3)
        return UsageReport(job_id, 1, self._made.pop(job_id), ended=True)

    def _watch(self) -> None:
        if not all(self._waiting.values()):
            self._leads.clear()
            return
        served = list(self._served.values())
        lead = served[-1] - served[0]
        self._leads = [min([lead, *self._leads]), max([lead, *self._leads])]
        self._difference = max(self._difference, self._leads[1] - self._leads[0])


def _times(tenant: str, rate: float, end_ms: float) -> list[float]:
    chance, times, at_ms = random.Random(tenant), list[float](), 0.0
    while (at_ms := at_ms + chance.expovariate(rate / 1e3)) < end_ms:
        times.append(at_ms)
    return times
