"""The queue of one cell: enqueue, claim, charge, finish, and the wake-up that spares workers from polling.

Each operation is one atomic script of broker/lua; the arguments are listed here as the script reads them.
bench/queue_model decides the same in Python, for simulations and for the tests that compare both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoScriptError, OutOfMemoryError

from broker.batched_script import BatchedScript
from broker.claim_arguments import report_arguments, scan_arguments
from broker.codec import decode_adapter_request, decode_job
from broker.commands import CommandQueue
from broker.dead import DeadLetters
from broker.keys import Keys
from broker.messages import Capacity, Job
from broker.pins import PinnedAdapters
from broker.scripts import SCRIPTS, Scripts
from broker.terms import (
    FREE_ROWS_MS,
    SCANS_PER_CLAIM,
    Claimed,
    Entry,
    Placement,
    QueueLimits,
    QueueState,
    UsageReport,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
# Jobs that still wait, bodies, adapter requests, hold_ms, tenants to skip, 1 for no reason to scan again, routers of
# jobs that the worker has no link to.
ScanAnswer = tuple[int, list[bytes], list[bytes], int, int, int, list[bytes]]

# Maximum usage reports and maximum jobs that one script handles: it stops the whole server while it runs.
CHARGES_AT_ONCE = 64
LOOKS_AT_ONCE = 256


_ENTRY_FIELDS = tuple(field.name for field in fields(Entry))


class QueueFullError(Exception):
    """A limit of the queue, or Redis's memory, is reached; `tenant` is empty unless the limit is this tenant's."""

    def __init__(self, message: str, tenant: str = "") -> None:
        super().__init__(message)
        self.tenant = tenant


class DeadlineUnattainableError(Exception):
    """The tenant's own jobs before this one take longer than its deadline."""

    def __init__(self, wait_ms: int) -> None:
        super().__init__(f"about {wait_ms / 1e3:.0f} s until its turn")
        self.wait_ms = wait_ms


class JobQueue:
    """The queue of a cell: a router uses it with its limits, a worker with its id."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        *,
        limits: QueueLimits | None = None,
        worker_id: str = "",
        scripts: Scripts = SCRIPTS,
    ) -> None:
        self._redis = redis
        self.keys = keys
        self.dead = DeadLetters(redis, keys)
        self.commands = CommandQueue(redis, keys)
        self.pins = PinnedAdapters(redis, keys)
        self._limits = limits or QueueLimits()
        self._limit_arguments = [
            part for name, limit in asdict(self._limits).items() for part in (f"max_{name}", limit)
        ]
        self._worker_id = worker_id
        # Scans so far, and the tenants that the last claim has passed over without finding a job.
        self._scan_number, self._skipped_tenants = 0, 0
        self._wake_lists = [keys.wake_of(worker_id), keys.wake]
        self._enqueue = BatchedScript(redis, scripts.register(redis, "enqueue"), keys.waiting)
        self._claim = scripts.register(redis, "claim")
        self._charge = scripts.register(redis, "charge")
        self._finish = BatchedScript(redis, scripts.register(redis, "finish"), keys.waiting)
        self._look_up = scripts.register(redis, "look_up")
        self._stop_claiming = scripts.register(redis, "stop_claiming")

    async def enqueue(self, job: Job, placement: Placement | None = None) -> None:
        """Put a job into the queue; a newer attempt replaces an older one.

        Only newcomers are refused, whose answer has not begun: raises QueueFullError or DeadlineUnattainableError.
        """
        entry = Entry.from_job(job, placement or Placement())
        arguments = [
            self.keys.prefix,
            job.job_id,
            job.deadline_ms,
            *self._limit_arguments,
            *(part for name in _ENTRY_FIELDS for part in (name, getattr(entry, name))),
        ]
        try:
            answer = await self._enqueue(arguments)
        except OutOfMemoryError as error:
            raise QueueFullError("Redis is out of memory") from error
        if answer[0] == b"late":
            raise DeadlineUnattainableError(int(answer[1]))
        if answer[0] == b"full":
            raise _full(answer[1].decode(), answer[2].decode(), self._limits)

    async def claim(
        self, base_digest: str, capacity: Capacity, reports: Sequence[UsageReport] = (), *, wait_s: float = 0.0
    ) -> Claimed:
        """Take the next jobs of a base model that suit a worker, up to its free rows; from now on they are its own.

        `reports` are charged first, as `charge` does it, so that they count for whose turn it is. With `wait_s` the
        server waits up to so many seconds for a wake-up before it claims; `stop_waiting` ends the wait.
        """
        await self.charge(reports[:-CHARGES_AT_ONCE])
        reports = reports[-CHARGES_AT_ONCE:]
        hold_ms, waiting, skip = 0, 0, 0
        bodies: list[bytes] = []
        requests: list[bytes] = []
        unlinked: dict[bytes, None] = {}
        for scan in range(SCANS_PER_CLAIM):
            place = (self._scan_number, skip)
            self._scan_number += 1
            arguments = [self.keys.prefix, self._worker_id, *scan_arguments(base_digest, capacity, reports, *place)]
            answer = await (self._scan_once_woken(arguments, wait_s) if wait_s else self._scan(arguments))
            waiting, bodies, demanded, held_ms, skip, done, without_link = answer
            reports, wait_s = (), 0.0
            unlinked.update(dict.fromkeys(without_link))
            hold_ms = min(hold_ms or held_ms, held_ms or hold_ms)
            requests = requests or demanded
            if done:
                skip = 0
                break
            if scan == 0:  # the tenants with the lowest counters are always seen; then go on where the last claim ended
                skip = max(skip, self._skipped_tenants)
        self._skipped_tenants = skip
        # The router of a body that cannot be read dispatches it again, for a worker of its own version.
        jobs = _readable(bodies, decode_job)
        requested = _readable(requests, decode_adapter_request)
        return Claimed(jobs, waiting, requested, hold_ms, tuple(router.decode() for router in unlinked))

    async def _scan(self, arguments: Sequence[str | int | float]) -> ScanAnswer:
        answer: ScanAnswer = await self._claim(keys=[self.keys.waiting], args=arguments)
        return answer

    async def _scan_once_woken(self, arguments: Sequence[str | int | float], wait_s: float) -> ScanAnswer:
        """Send the wait and the scan together: the server scans as soon as it wakes, without another round trip."""
        if isinstance(self._redis, RedisCluster):  # its pipelines take no scripts
            await self.wait_for_work(wait_s)
            return await self._scan(arguments)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.blpop(self._wake_lists, timeout=wait_s)
            pipe.evalsha(self._claim.sha, 1, self.keys.waiting, *arguments)
            try:
                answer: ScanAnswer = (await pipe.execute())[1]
            except NoScriptError:  # the server has restarted
                return await self._scan(arguments)
        return answer

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Block until a wake-up comes; False when the time passed without one."""
        return await self._redis.blpop(self._wake_lists, timeout=timeout_s) is not None

    async def stop_waiting(self) -> None:
        """End the wait of this worker's claim, which then is made at once."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.lpush(self.keys.wake_of(self._worker_id), 1)
            pipe.pexpire(self.keys.wake_of(self._worker_id), FREE_ROWS_MS)
            await pipe.execute()

    async def charge(self, reports: Sequence[UsageReport]) -> None:
        """Charge tenants what their jobs have made since the last report. Idempotent by job, attempt and tokens."""
        for at in range(0, len(reports), CHARGES_AT_ONCE):
            arguments = [self.keys.prefix, *report_arguments(reports[at : at + CHARGES_AT_ONCE])]
            await self._charge(keys=[self.keys.waiting], args=arguments)

    async def stop_claiming(self) -> None:
        """Claim no more for now: jobs are not held for this worker, and its wake-ups go to another."""
        await self._stop_claiming(keys=[self.keys.waiting], args=[self.keys.prefix, self._worker_id])

    async def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job, up to this attempt. Idempotent."""
        await self._finish([self.keys.prefix, job_id, attempt])

    async def look_up(self, jobs: Sequence[tuple[str, int]]) -> list[QueueState]:
        """Return the state of each attempt, by job id and attempt; a newer attempt of the same job counts too."""
        states: list[QueueState] = []
        for at in range(0, len(jobs), LOOKS_AT_ONCE):
            arguments = [self.keys.prefix, *(part for job in jobs[at : at + LOOKS_AT_ONCE] for part in job)]
            states += map(QueueState, await self._look_up(keys=[self.keys.waiting], args=arguments))
        return states

    async def count_waiting(self) -> int:
        """Return how many jobs wait."""
        return int(await self._redis.zcard(self.keys.waiting))


def _full(limit: str, tenant: str, limits: QueueLimits) -> QueueFullError:
    unit = limit.rpartition("_")[2]
    return QueueFullError(f"{getattr(limits, limit)} {unit} may wait{f' of {tenant}' if tenant else ''}", tenant)


def _readable(messages: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Decode messages, without those that another version has written and this one cannot read."""
    decoded = []
    for message in messages:
        try:
            decoded.append(decode(message))
        except DecodeError:
            log.exception("cannot read a message of %d bytes in the queue", len(message))
    return decoded
