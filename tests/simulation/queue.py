"""The broker's classes over a simulated server, for the processes of the simulated cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec

from bench.queue_model.decisions import Refusal
from broker.claims import ClaimMemory, ClaimPlan, begin_apart
from broker.codec import decode_adapter_request, decode_job, encode_dead_job
from broker.commands import Command
from broker.keys import Keys
from broker.ledger import ReserveCall
from broker.liveness import Census
from broker.messages import AdapterRequest, Capacity, DeadJob, Job, WorkerState
from broker.queue import DeadlineUnattainableError, QuarantinedError, QueueFullError, RemovedRecords, UnreservedError
from broker.queue_entry import Entry
from broker.terms import FREE_ROWS_MS, WORKER_TTL_MS, Claimed, Placement, QueueLimits, QueueState, UsageReport
from tests.simulation.ledger import SimulatedReserve
from tests.simulation.redis import SimulatedRedis


class SimulatedQueue:
    """Stands in for broker.queue.JobQueue."""

    def __init__(
        self,
        redis: SimulatedRedis,
        keys: Keys,
        *,
        limits: QueueLimits | None = None,
        worker_id: str = "",
        seals: None = None,
    ) -> None:
        self.keys = keys
        self.dead = SimulatedDeadLetters(redis)
        self.commands = SimulatedCommands(redis)
        self.pins = NoPins()
        self._redis = redis
        self._worker_id = worker_id
        # Few jobs wait here at a time: workers rest after a few of them.
        self._memory = ClaimMemory(looks_limit=2, rest_per_look_s=0.02)

    def make_entry(self, job: Job, placement: Placement) -> Entry:
        """See JobQueue."""
        return Entry.from_job(job, placement)

    async def enqueue(
        self,
        job: Job,
        placement: Placement | None = None,
        entry: Entry | None = None,
        reserve: ReserveCall | None = None,
    ) -> None:
        """See JobQueue; the model makes the entry itself, and one that was made before must be the same."""
        redis = self._redis
        assert entry is None or entry == self.make_entry(job, placement or Placement())
        first = cast("SimulatedReserve | None", reserve)
        refusal = await redis.call(lambda: self._enqueue(job, placement or Placement(), first))
        redis.wake_all()
        if refusal is not None and refusal.why == "quarantined":
            raise QuarantinedError(refusal.wait_ms)
        if refusal is not None and refusal.why == "late":
            raise DeadlineUnattainableError(refusal.wait_ms)
        if refusal is not None:
            key = placement.key.key if placement is not None and refusal.why.startswith("key_") else ""
            raise QueueFullError(refusal.why, key=key)

    def _enqueue(self, job: Job, placement: Placement, reserve: SimulatedReserve | None) -> Refusal | None:
        if reserve is not None:
            reserve.answer = reserve.reserve()
            if "reservation" not in msgspec.msgpack.decode(reserve.answer):
                raise UnreservedError
        data = self._redis.data
        refusal = data.queue.enqueue(job, placement, self._redis.now_ms)
        one = data.queue.waiting.find(job.job_id)
        if one is not None and one.entry.attempt == job.attempt:
            data.bodies[job.job_id], data.sealed_ms[job.job_id] = one.entry.body, self._redis.now_ms
            self._redis.enqueued(job)
        return refusal

    async def claim(
        self,
        base_digest: str,
        capacity: Capacity,
        reports: Sequence[UsageReport] = (),
        *,
        wait_s: float = 0.0,
        freed: bool = False,
    ) -> Claimed:
        """See JobQueue."""
        if wait_s:
            await self.wait_for_work(wait_s)
        plan = self._memory.plan(base_digest, capacity, freed=freed)
        return await self._redis.call(lambda: self._claim(base_digest, capacity, reports, plan))

    def _claim(self, base_digest: str, capacity: Capacity, reports: Sequence[UsageReport], plan: ClaimPlan) -> Claimed:
        data, now_ms = self._redis.data, self._redis.now_ms
        data.queue.charge(reports, now_ms)
        for worker, at_ms in tuple(data.claimed_ms.items()):
            if abs(now_ms - at_ms) > FREE_ROWS_MS:
                data.queue.clear_free_rows(worker)
                del data.claimed_ms[worker]
        data.claimed_ms[self._worker_id] = now_ms
        decision = data.queue.claim(self._worker_id, base_digest, capacity, now_ms, plan)
        found, looks, workers = bool(decision.job_ids), decision.looks, len(data.living)
        self._memory.note(plan, capacity, found=found, seen=decision.seen, looks=looks, live_workers=workers)
        jobs = [decode_job(data.bodies.pop(job_id)) for job_id in decision.job_ids]
        if jobs and decision.apart is not None:
            jobs[-1] = begin_apart(jobs[-1])
        expired = {one for one in decision.job_ids if now_ms - data.sealed_ms.pop(one) >= self._redis.seal_s * 1e3}
        self._redis.seals_expired += len(expired)
        jobs = [] if self._worker_id in self._redis.refusing else [job for job in jobs if job.job_id not in expired]
        for job in jobs:
            self._redis.claimed(job, capacity.adapters)
        self._redis.scanned()
        requests = [decode_adapter_request(data) for data in decision.adapter_requests]
        return Claimed(jobs, decision.waiting, requests, decision.hold_ms, decision.unlinked, crowded=decision.crowded)

    async def charge(self, reports: Sequence[UsageReport]) -> None:
        """See JobQueue."""
        if reports:
            await self._redis.call(lambda: self._redis.data.queue.charge(reports, self._redis.now_ms))

    async def stop_claiming(self) -> None:
        """See JobQueue."""
        await self._redis.call(lambda: self._redis.data.queue.clear_free_rows(self._worker_id))
        self._redis.wake_all()

    async def finish(self, job_id: str, attempt: int) -> None:
        """See JobQueue."""
        await self._redis.call(lambda: self._redis.data.queue.finish(job_id, attempt))

    async def look_up(self, jobs: Sequence[tuple[str, int]]) -> list[QueueState]:
        """See JobQueue."""
        return await self._redis.call(lambda: [self._redis.data.queue.look_up(*job) for job in jobs])

    async def renew(self, job: Job, placement: Placement) -> None:
        """See JobQueue."""
        await self._redis.call(lambda: self._renew(job))

    def _renew(self, job: Job) -> None:
        waiting = self._redis.data.queue.waiting.find(job.job_id)
        if waiting is not None and waiting.entry.attempt == job.attempt:
            self._redis.data.sealed_ms[job.job_id] = self._redis.now_ms

    async def wait_for_work(self, timeout_s: float) -> bool:
        """See JobQueue."""
        return await self._redis.work_within(timeout_s)

    async def stop_waiting(self) -> None:
        """See JobQueue."""
        await self._redis.call(self._redis.wake_all)

    async def record_death(self, tenant: str, adapter: str, job_id: str) -> int:
        """See JobQueue."""
        redis = self._redis
        return await redis.call(lambda: redis.data.queue.record_death(tenant, adapter, job_id, redis.now_ms))

    async def forget_tenant(self, tenant: str) -> RemovedRecords:
        """See JobQueue."""
        redis = self._redis
        return RemovedRecords(await redis.call(lambda: redis.data.queue.forget_tenant(tenant, redis.now_ms)))

    async def count_waiting(self) -> int:
        """See JobQueue."""
        return await self._redis.call(lambda: len(self._redis.data.queue.waiting))


class SimulatedDeadLetters:
    """Stands in for broker.dead.DeadLetters."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def push(self, dead: DeadJob) -> None:
        """See DeadLetters."""
        await self._redis.call(lambda: self._redis.data.dead.insert(0, dead))

    async def list(self) -> list[DeadJob]:
        """See DeadLetters."""
        return [dead for _, dead in await self.records()]

    async def records(self) -> Sequence[tuple[bytes, DeadJob]]:
        """See DeadLetters."""
        return await self._redis.call(lambda: [(encode_dead_job(dead), dead) for dead in self._redis.data.dead])


class SimulatedLiveness:
    """Stands in for broker.liveness.Liveness."""

    def __init__(self, redis: SimulatedRedis, keys: Keys) -> None:
        self._redis = redis

    async def beat(self, state: WorkerState) -> list[str]:
        """See Liveness."""
        return await self._redis.call(lambda: self._beat(state))

    def _beat(self, state: WorkerState) -> list[str]:
        redis, data = self._redis, self._redis.data
        data.living[state.incarnation] = (redis.now_ms + WORKER_TTL_MS, state)
        return data.queue.live_routers(redis.now_ms)

    async def declare_dead(self, incarnation: str) -> None:
        """See Liveness."""
        await self._redis.call(lambda: self._declare_dead(incarnation))

    def _declare_dead(self, incarnation: str) -> None:
        data = self._redis.data
        _, state = data.living.pop(incarnation, (0, None))
        if state is not None:
            data.queue.clear_free_rows(state.worker_id)

    async def take_census(self, router: str = "") -> Census:
        """See Liveness."""
        return await self._redis.call(lambda: self._take_census(router))

    def _take_census(self, router: str) -> Census:
        redis, data = self._redis, self._redis.data
        if router:
            data.queue.beat_router(router, redis.now_ms)
        latest_ms = redis.now_ms + WORKER_TTL_MS  # later where the clock went back
        data.living = {name: (min(until_ms, latest_ms), state) for name, (until_ms, state) in data.living.items()}
        lapsed = [state for until_ms, state in data.living.values() if until_ms <= redis.now_ms]
        for state in lapsed:
            del data.living[state.incarnation]
        states = [state for _, state in data.living.values()]
        for worker_id in {state.worker_id for state in lapsed} - {state.worker_id for state in states}:
            data.queue.clear_free_rows(worker_id)
        return Census(f"{redis.run} {data.born}", sorted(states, key=lambda state: state.worker_id))

    async def live_routers(self) -> list[str]:
        """See Liveness."""
        redis = self._redis
        return await redis.call(lambda: sorted(redis.data.queue.live_routers(redis.now_ms)))

    async def live_workers(self) -> list[WorkerState]:
        """See Liveness."""
        return (await self.take_census()).workers


class SimulatedCommands:
    """Stands in for broker.commands.CommandQueue."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def send(self, incarnation: str, command: Command) -> None:
        """See CommandQueue."""
        await self._redis.call(lambda: self._redis.data.commands.setdefault(incarnation, []).append(command))

    async def next(self, incarnation: str, timeout_s: float) -> Command | None:
        """See CommandQueue."""
        await asyncio.sleep(timeout_s)
        told = await self._redis.call(lambda: self._redis.data.commands.get(incarnation))
        return told.pop(0) if told else None


class NoPins:
    """Stands in for broker.pins.PinnedAdapters; nothing is pinned here."""

    async def list(self) -> list[AdapterRequest]:
        """See PinnedAdapters."""
        return []
