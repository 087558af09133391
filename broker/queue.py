"""The queue of one cell: enqueue, claim, charge, finish, and the wake-up that spares workers from polling.

Every script is atomic. Those that drain are flagged allow-oom, so that a full Redis can still empty itself.
`bench.queue_model` is the same in Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from broker import terms
from broker.arrivals import ENQUEUE
from broker.claims import CLAIM
from broker.codec import decode_adapter_request, decode_job
from broker.commands import CommandQueue
from broker.dead import DeadLetters
from broker.keys import Keys
from broker.lua import script
from broker.messages import Capacity, Job
from broker.pins import PinnedAdapters
from broker.terms import Claimed, Entry, Placement, QueueLimits, Usage
from broker.usage import CHARGE, report_arguments

log = logging.getLogger(__name__)

T = TypeVar("T")

# More wake-ups than idle workers help nobody.
WAKE_LIMIT = 64
# A script holds up everybody else.
CHARGES_AT_ONCE = 64
LOOKS_AT_ONCE = 256


class QueueFullError(Exception):
    """A bound of the queue, or Redis's memory, is reached. `whose`: the tenant's, or "" for the queue's own."""

    def __init__(self, message: str, whose: str = "") -> None:
        super().__init__(message)
        self.whose = whose


class DeadlineUnattainableError(Exception):
    """The tenant's own jobs before this one take longer than its deadline."""

    def __init__(self, wait_ms: int) -> None:
        super().__init__(f"about {wait_ms / 1e3:.0f} s until its turn")
        self.wait_ms = wait_ms


# ARGV: prefix, id, attempt
_FINISH = """
local held = redis.call('HGET', P .. 'job:' .. ARGV[2], 'attempt')
if not held or tonumber(held) <= tonumber(ARGV[3]) then forget(ARGV[2]) end
settle()
local charged = redis.call('GET', P .. 'charged:' .. ARGV[2])
if charged then
  local _, _, attempt = cmsgpack.unpack(charged)
  if attempt <= tonumber(ARGV[3]) then redis.call('DEL', P .. 'charged:' .. ARGV[2]) end
end
"""

# ARGV: prefix, then of each job: id, attempt
_WAITING = """
local waits = {}
for i = 2, #ARGV, 2 do
  local attempt = redis.call('HGET', P .. 'job:' .. ARGV[i], 'attempt')
  waits[#waits + 1] = attempt and tonumber(attempt) >= tonumber(ARGV[i + 1]) and 1 or 0
end
return waits
"""

# ARGV: prefix, worker
_WITHDRAW = "no_room(ARGV[2])"


class JobQueue:
    """One cell's queue, as a router uses it with its limits, and a worker under its id."""

    def __init__(self, redis: Redis, keys: Keys, *, limits: QueueLimits | None = None, worker_id: str = "") -> None:
        self._redis = redis
        self.keys = keys
        self.dead = DeadLetters(redis, keys)
        self.commands = CommandQueue(redis, keys)
        self.pins = PinnedAdapters(redis, keys)
        self._limits = limits or QueueLimits()
        self._worker_id = worker_id
        # How many scans there were, and how many tenants the last claim has passed over without finding anything.
        self._turn, self._skip = 0, 0
        self._enqueue = redis.register_script(script(ENQUEUE))
        self._claim = redis.register_script(script(CLAIM, drains=True))
        self._charge = redis.register_script(script(CHARGE, drains=True))
        self._finish = redis.register_script(script(_FINISH, drains=True))
        self._waiting = redis.register_script(script(_WAITING))
        self._withdraw = redis.register_script(script(_WITHDRAW, drains=True))

    async def enqueue(self, job: Job, placement: Placement | None = None) -> None:
        """Put a job in; a newer attempt takes an older one's place.

        First attempts alone are refused: raises QueueFullError or DeadlineUnattainableError.
        """
        entry = Entry.of(job, placement or Placement())
        limits = self._limits
        bounds = (limits.jobs, limits.bytes, limits.tenant_jobs, limits.tenant_bytes)
        fields = [part for pair in asdict(entry).items() for part in pair]
        arguments = [self.keys.prefix, job.job_id, entry.priority, job.deadline_ms, *bounds, WAKE_LIMIT, *fields]
        try:
            answer = await self._enqueue(keys=[self.keys.waiting], args=arguments)
        except OutOfMemoryError as error:
            raise QueueFullError("Redis is out of memory") from error
        if answer[0] == b"late":
            raise DeadlineUnattainableError(int(answer[1]))
        if answer[0] == b"full":
            raise _full(answer[1].decode(), answer[2].decode(), limits)

    async def claim(self, base_digest: str, capacity: Capacity, reports: Sequence[Usage] = ()) -> Claimed:
        """Take the next jobs of a base model that suit a worker, up to its free rows: they are its own from now on.

        `reports` are charged before, as `charge` does it, so that they count for whose turn it is.
        """
        await self.charge(reports[:-CHARGES_AT_ONCE])
        told = report_arguments(reports[-CHARGES_AT_ONCE:])
        who = (self.keys.prefix, self._worker_id, base_digest)
        room = (capacity.rows, capacity.rows_limit, capacity.tokens, capacity.max_tokens, capacity.max_rank)
        skip, hold_ms, waiting = 0, 0, 0
        ahead: list[bytes] = []
        bodies: list[bytes] = []
        for scan in range(terms.SCANS_LIMIT):
            waiting, bodies, wanted, held_ms, skip, done = await self._claim(
                keys=[self.keys.waiting],
                args=[*who, *room, self._turn, skip, *told, *capacity.adapters],
            )
            self._turn += 1
            told = report_arguments(())
            hold_ms = min(hold_ms or held_ms, held_ms or hold_ms)
            ahead = ahead or wanted
            if done:
                skip = 0
                break
            skip = max(skip, self._skip) if scan == 0 else skip
        self._skip = skip
        # What can't be read its router dispatches again, for a worker that can read it.
        return Claimed(_readable(bodies, decode_job), int(waiting), _readable(ahead, decode_adapter_request), hold_ms)

    async def charge(self, reports: Sequence[Usage]) -> None:
        """Charge tenants what their jobs made since the last report. Idempotent by job, attempt and count."""
        for at in range(0, len(reports), CHARGES_AT_ONCE):
            arguments = report_arguments(reports[at : at + CHARGES_AT_ONCE])
            await self._charge(keys=[self.keys.waiting], args=[self.keys.prefix, *arguments])

    async def withdraw(self) -> None:
        """Claim no more: nothing is to wait for it."""
        await self._withdraw(keys=[self.keys.waiting], args=[self.keys.prefix, self._worker_id])

    async def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job that waits, up to this attempt. Idempotent."""
        await self._finish(keys=[self.keys.waiting], args=[self.keys.prefix, job_id, attempt])

    async def waiting(self, jobs: Sequence[tuple[str, int]]) -> list[bool]:
        """Which of these still wait, by id and attempt; the others were claimed, or lost, or their deadline passed.

        Of a job that Redis knows by an older attempt alone nothing waits that its router would take.
        """
        waits: list[bool] = []
        for at in range(0, len(jobs), LOOKS_AT_ONCE):
            arguments = [self.keys.prefix, *(part for one in jobs[at : at + LOOKS_AT_ONCE] for part in one)]
            waits += map(bool, await self._waiting(keys=[self.keys.waiting], args=arguments))
        return waits

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Block until there may be work; False when the time passed without a wake-up."""
        lists = [self.keys.wake_of(self._worker_id), self.keys.wake] if self._worker_id else [self.keys.wake]
        return await self._redis.blpop(lists, timeout=timeout_s) is not None

    async def count_waiting(self) -> int:
        """How many jobs wait."""
        return int(await self._redis.zcard(self.keys.waiting))


def _full(bound: str, tenant: str, limits: QueueLimits) -> QueueFullError:
    unit = "bytes" if bound.endswith("bytes") else "jobs"
    return QueueFullError(f"{getattr(limits, bound)} {unit} may wait{f' of {tenant}' if tenant else ''}", tenant)


def _readable(bodies: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Those that this version can read."""
    read = []
    for body in bodies:
        try:
            read.append(decode(body))
        except DecodeError:
            log.exception("%d bytes in the queue can't be read", len(body))
    return read
