"""The claims of one worker: a function of bounded cost, called again for as long as it finds no job and may find one.

A claim that looked at many jobs in vain would look at the same ones again. Until it may find something else, the worker
rests: its claims look at newer arrivals alone, which cost Redis next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from msgspec import DecodeError
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from loraplex.contracts.broker.functions import Library, is_missing
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import (
    SUSPECT_STRIKES,
    AdapterRequest,
    Capacity,
    Job,
    RowToShare,
    SealError,
    decode_job,
    decode_record,
)
from loraplex.contracts.broker.terms import ADAPTER_DIGITS, SCANS_PER_CLAIM, Claimed, UsageReport, unread_job

if TYPE_CHECKING:
    from loraplex.contracts.broker.seals import Seals

log = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum bytes of jobs that are read on the event loop, in some milliseconds.
_SHORT_BYTES = 1 << 18
# Minimum number of jobs that a claim looked at in vain for a rest: fewer cost hardly more than the claim itself.
LOOKS_LIMIT = 16
# Seconds of rest for each job that was looked at in vain, and each live worker. Redis takes some 4 us for a look, so
# that the workers of a cell together take about 2% of a core, however many they are.
REST_PER_LOOK_S = 0.000_2
# Maximum seconds of a rest.
REST_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """The extent of the next claim: after `seen`, only newer arrivals (`news_only`), or at most so many scans."""

    seen: int
    news_only: bool
    scans: int


class ClaimMemory:
    """The memory of one worker. `clock` returns seconds; the monotonic clock by default."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        *,
        looks_limit: int = LOOKS_LIMIT,
        rest_per_look_s: float = REST_PER_LOOK_S,
    ) -> None:
        self._clock = clock or time.monotonic
        self._looks_limit = looks_limit
        self._rest_per_look_s = rest_per_look_s
        # The number of the last arrival that needs no second look.
        self._seen = 0
        self._rests_until = -1.0
        self._kind: Hashable = None

    def plan(self, base_digest: str, capacity: Capacity, *, freed: bool) -> ClaimPlan:
        """Return the extent of the next claim. A worker that takes other kinds of jobs than before does not rest.

        `freed`: capacity has become free that a waiting job may need, which is worth one scan.
        """
        kind = (base_digest, capacity.max_tokens, capacity.max_rank, capacity.routers)
        if kind != self._kind:
            self._kind, self._seen, self._rests_until = kind, 0, -1.0
        # A full worker looks at few jobs.
        rests = capacity.rows > 0 and self._clock() < self._rests_until
        return ClaimPlan(self._seen, rests and not freed, 1 if rests else SCANS_PER_CLAIM)

    def note(
        self, plan: ClaimPlan, capacity: Capacity, *, jobs_found: bool, seen: int, looks: int, live_workers: int
    ) -> None:
        """Record the outcome of a claim: whether it brought jobs, else how many looks its last scan took."""
        if capacity.rows < 1:
            return
        if jobs_found:
            if not plan.news_only:  # there may be more
                self._rests_until = -1.0
            return
        self._seen = seen
        if not plan.news_only and looks > self._looks_limit:
            rest_s = looks * max(1, live_workers) * self._rest_per_look_s
            self._rests_until = self._clock() + min(rest_s, REST_LIMIT_S)


class _ScanAnswer(NamedTuple):
    """The answer of broker/lua/claim.lua."""

    waiting: int
    bodies: list[bytes]
    adapter_requests: list[bytes]
    hold_ms: int
    skip: int
    # 1: no reason to scan again.
    done: int
    # Routers of jobs that suit the worker but for its missing link.
    unlinked: list[bytes]
    looks: int
    # 1: a job suits the worker once it has more free rows or tokens.
    crowded: int
    # Of a scan that found no job: the number of the last arrival that needs no second look, and of live workers.
    seen: int
    live_workers: int
    # 1: the last of the jobs is of a suspect tenant and adapter.
    last_apart: int
    # Of each job, what the queue has noted of it (broker/lua/jobs.lua).
    facts: list[bytes]
    # Redis's time in ms since 1970.
    now_ms: int


@dataclass(eq=False)
class Claims:
    """The claims of a worker in one cell."""

    redis: Redis
    keys: Keys
    worker_id: str
    library: Library
    memory: ClaimMemory
    seals: Seals | None = None

    def __post_init__(self) -> None:
        """Begin without scans."""
        # Scans so far, and the tenants that the last claim has passed over without finding a job.
        self._scan_number, self._skipped_tenants = 0, 0
        self._wake_lists = [self.keys.wake_of(self.worker_id), self.keys.wake]
        self._claim = self.library.function(self.redis, "claim")

    async def claim(
        self, base_digest: str, capacity: Capacity, reports: Sequence[UsageReport], *, wait_s: float, freed: bool
    ) -> Claimed:
        """See JobQueue.claim."""
        if self.seals is not None:
            self.seals.look()
        plan = self.memory.plan(base_digest, capacity, freed=freed)
        worker, terms = _claimant(self.worker_id, base_digest, capacity)
        links = "*" if capacity.routers is None else "\n".join(capacity.routers)
        hold_ms, skip, looks = 0, 0, 0
        requests: list[bytes] = []
        unlinked: dict[bytes, None] = {}
        for scan in range(plan.scans):
            # Look at the arrivals after `seen`: at these alone, not yet, or now if the scan finds no other job.
            when = "only" if plan.news_only else "later" if scan < plan.scans - 1 else "now"
            place = (self._scan_number, skip, links, plan.seen, when, bool(wait_s))
            arguments = [self.keys.prefix, worker, _packed(*place), packed_reports(reports), *terms]
            self._scan_number += 1
            answer = await (self._scan_once_woken(arguments, wait_s) if wait_s else self._scan(arguments))
            reports, wait_s, looks = (), 0.0, looks + answer.looks
            hold_ms = min(hold_ms or answer.hold_ms, answer.hold_ms or hold_ms)
            requests, skip = requests or answer.adapter_requests, answer.skip
            unlinked.update(dict.fromkeys(answer.unlinked))
            if answer.done:
                skip = 0
                break
            if scan == 0:  # the tenants with the lowest counters are always seen; then go on where the last claim ended
                skip = max(skip, self._skipped_tenants)
        if not plan.news_only:
            self._skipped_tenants = skip
        jobs_found = bool(answer.bodies)
        self.memory.note(
            plan, capacity, jobs_found=jobs_found, seen=answer.seen, looks=looks, live_workers=answer.live_workers
        )
        is_short = sum(map(len, answer.bodies)) <= _SHORT_BYTES
        jobs, unread, refused_here = self._read(answer) if is_short else await asyncio.to_thread(self._read, answer)
        read_request = partial(decode_record, AdapterRequest)
        requested = [one for data in requests if (one := _readable(data, read_request)) is not None]
        routers = tuple(router.decode(errors="replace") for router in unlinked)
        return Claimed(jobs, answer.waiting, requested, hold_ms, routers, bool(answer.crowded), unread, refused_here)

    def _read(self, answer: _ScanAnswer) -> tuple[list[Job], tuple[Job, ...], int]:
        """Return the jobs of an answer, records of unreadable ones, and how many of these other workers may read."""
        jobs, unread, refused_here = list[Job](), list[Job](), 0
        last = len(answer.bodies) - 1 if answer.last_apart else -1
        for number, (body, facts) in enumerate(zip(answer.bodies, answer.facts, strict=True)):
            job, expired_at_ms = None, 0
            try:
                if self.seals is None:
                    job = _readable(body, decode_job)
                else:
                    job = self.seals.open_job(self.keys.prefix, body, facts)
            except SealError as error:
                if not error.may_be_ours:  # its router misses it and dispatches it again
                    continue
                expired_at_ms = error.expired_at_ms
            if job is not None:
                jobs.append(begin_apart(job) if number == last else job)
            elif (known := unread_job(facts)) is not None:
                unread.append(known)
                refused_here += not 0 < expired_at_ms <= answer.now_ms
        return jobs, tuple(unread), refused_here

    async def _scan(self, arguments: Sequence[str | bytes | int]) -> _ScanAnswer:
        return _ScanAnswer(*await self._claim(self.keys.waiting, arguments))

    async def _scan_once_woken(self, arguments: Sequence[str | bytes | int], wait_s: float) -> _ScanAnswer:
        """Send the wait and the scan together: the server scans as soon as it wakes, without another round trip."""
        if isinstance(self.redis, RedisCluster):  # its pipelines take no functions
            await self.wait_for_work(wait_s)
            return await self._scan(arguments)
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.blpop(self._wake_lists, timeout=wait_s)
            pipe.execute_command(*self._claim.command(self.keys.waiting, arguments))
            try:
                _, answer = await pipe.execute()
            except ResponseError as error:
                if not is_missing(error):
                    raise
                return await self._scan(arguments)
        return _ScanAnswer(*answer)

    async def wait_for_work(self, timeout_s: float) -> bool:
        """See JobQueue."""
        return await self.redis.blpop(self._wake_lists, timeout=timeout_s) is not None


def begin_apart(job: Job) -> Job:
    """Return a job of a suspect tenant and adapter as the worker handles it: like one with a strike."""
    return replace(job, strikes=max(job.strikes, SUSPECT_STRIKES))


def _readable(message: bytes, decode: Callable[[bytes], T]) -> T | None:
    """Decode a message; None for one that another version has written and this one cannot read."""
    try:
        return decode(message)
    except DecodeError as error:
        log.error("cannot read a message of %d bytes in the queue: %s", len(message), error)
    return None


def _claimant(worker_id: str, base_digest: str, capacity: Capacity) -> tuple[bytes, list[str | bytes | int]]:
    """Return the arguments of broker/lua/claim.lua that all scans of a claim share: the worker and its capacity."""
    limits = (capacity.rows, capacity.rows_limit, capacity.tokens, capacity.max_tokens, capacity.max_rank)
    row = capacity.row_to_share or RowToShare("", 0, ())
    return _packed(worker_id, base_digest, *limits), [
        _packed(row.tenant, row.rows_left, capacity.only_tenant),
        "\n".join(("", *(adapter[-ADAPTER_DIGITS:] for adapter in capacity.adapters), "")),
        *(part for pair in row.tenant_rows for part in pair),
    ]


def packed_reports(reports: Sequence[UsageReport]) -> bytes:
    """Return the fields of reports, one after the other, as broker/lua/charges.lua reads them."""
    fields: list[str | int | bool] = []
    for report in reports:
        fields += [report.job_id, report.attempt, report.tokens, report.ended, report.ran]
    return msgspec.msgpack.encode(fields)


def _packed(*values: str | float) -> bytes:
    """Return at most 15 values in MessagePack, without the array's one byte."""
    return msgspec.msgpack.encode(values)[1:]
