"""The claims of one worker: a script of bounded cost, called again for as long as it finds no job and may find one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from broker.claim_arguments import ScanPlace, scan_arguments
from broker.claim_memory import ClaimMemory
from broker.codec import decode_adapter_request, decode_job
from broker.functions import is_missing
from broker.keys import Keys
from broker.messages import SUSPECT_STRIKES, Capacity, Job
from broker.scripts import Scripts
from broker.terms import Claimed, UsageReport

if TYPE_CHECKING:
    from broker.seals import Seals

log = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum bytes of jobs that are read on the event loop, in some milliseconds.
_SHORT_BYTES = 1 << 18


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
    # Of each job, what the queue has noted of it (broker/lua/include/waiting_jobs.lua).
    facts: list[bytes]


class Claims:
    """The claims of a worker in one cell."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker_id: str,
        scripts: Scripts,
        memory: ClaimMemory,
        seals: Seals | None = None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._worker_id = worker_id
        self._memory = memory
        self._seals = seals
        # Scans so far, and the tenants that the last claim has passed over without finding a job.
        self._scan_number, self._skipped_tenants = 0, 0
        self._wake_lists = [keys.wake_of(worker_id), keys.wake]
        self._claim = scripts.register(redis, "claim")

    async def claim(
        self, base_digest: str, capacity: Capacity, reports: Sequence[UsageReport], *, wait_s: float, freed: bool
    ) -> Claimed:
        """See JobQueue.claim."""
        if self._seals is not None:
            self._seals.look()
        plan = self._memory.plan(base_digest, capacity, freed=freed)
        hold_ms, skip, looks = 0, 0, 0
        requests: list[bytes] = []
        unlinked: dict[bytes, None] = {}
        for scan in range(plan.scans):
            when = "only" if plan.news_only else "later" if scan < plan.scans - 1 else "now"
            place = ScanPlace(self._scan_number, skip, plan.seen, when, woken=bool(wait_s))
            arguments = [self._keys.prefix, *scan_arguments(self._worker_id, base_digest, capacity, reports, place)]
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
        found = bool(answer.bodies)
        self._memory.note(plan, capacity, found=found, seen=answer.seen, looks=looks, live_workers=answer.live_workers)
        jobs = await self._read(answer)
        requested = [request for request in _readable(requests, decode_adapter_request) if request is not None]
        routers = tuple(router.decode(errors="replace") for router in unlinked)
        return Claimed(jobs, answer.waiting, requested, hold_ms, routers, bool(answer.crowded))

    async def _read(self, answer: _ScanAnswer) -> list[Job]:
        """Read the jobs of an answer, large ones in a thread."""
        if sum(map(len, answer.bodies)) <= _SHORT_BYTES:
            return self._jobs(answer)
        return await asyncio.to_thread(self._jobs, answer)

    def _jobs(self, answer: _ScanAnswer) -> list[Job]:
        """Read the jobs of an answer. The router of one that cannot be read dispatches it again."""
        if self._seals is not None:
            pairs = zip(answer.bodies, answer.facts, strict=True)
            jobs = [self._seals.open_job(self._keys.prefix, body, facts) for body, facts in pairs]
        else:
            jobs = _readable(answer.bodies, decode_job)
        if answer.last_apart and (last := jobs[-1]) is not None:
            jobs[-1] = begin_apart(last)
        return [job for job in jobs if job is not None]

    async def _scan(self, arguments: Sequence[str | bytes | int]) -> _ScanAnswer:
        return _ScanAnswer(*await self._claim(self._keys.waiting, arguments))

    async def _scan_once_woken(self, arguments: Sequence[str | bytes | int], wait_s: float) -> _ScanAnswer:
        """Send the wait and the scan together: the server scans as soon as it wakes, without another round trip."""
        if isinstance(self._redis, RedisCluster):  # its pipelines take no scripts
            await self.wait_for_work(wait_s)
            return await self._scan(arguments)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.blpop(self._wake_lists, timeout=wait_s)
            pipe.execute_command(*self._claim.prepare((self._keys.waiting,), arguments).command)
            try:
                _, answer = await pipe.execute()
            except ResponseError as error:
                if not is_missing(error):
                    raise
                return await self._scan(arguments)
        return _ScanAnswer(*answer)

    async def wait_for_work(self, timeout_s: float) -> bool:
        """See JobQueue."""
        return await self._redis.blpop(self._wake_lists, timeout=timeout_s) is not None


def begin_apart(job: Job) -> Job:
    """Return a job of a suspect tenant and adapter as the worker handles it: like one with a strike."""
    return replace(job, strikes=max(job.strikes, SUSPECT_STRIKES))


def _readable(messages: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T | None]:
    """Decode messages; None for one that another version has written and this one cannot read."""
    decoded: list[T | None] = []
    for message in messages:
        try:
            decoded.append(decode(message))
        except DecodeError:
            log.exception("cannot read a message of %d bytes in the queue", len(message))
            decoded.append(None)
    return decoded
