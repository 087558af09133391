"""The queue of one cell: enqueue, claim, charge, finish, and the wake-up that spares workers from polling.

Every script is atomic. Those that drain are flagged allow-oom, so that a full Redis can still empty itself.
`broker.policy` is the same in Python.
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
from broker.claims import CLAIM
from broker.codec import decode_job, decode_wanted
from broker.keys import Keys
from broker.lua import script
from broker.messages import Capacity, Job
from broker.terms import Claimed, Entry, Placement, QueueLimits, Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

# More wake-ups than idle workers help nobody.
WAKE_LIMIT = 64
# A script holds up everybody else.
CHARGES_AT_ONCE = 64


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


# ARGV: prefix, id, priority, deadline_ms, the four limits, wake limit, and the entry's fields with their values.
_ENQUEUE = f"""
local id, priority, deadline_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local entry = {{}}
for i = 10, #ARGV, 2 do entry[ARGV[i]] = ARGV[i + 1] end
local key, queue, first = P .. 'job:' .. id, P .. 'queue:' .. entry.tenant, entry.attempt == '1'
local held = redis.call('HGET', key, 'attempt')
if held and tonumber(held) >= tonumber(entry.attempt) then return {{'known'}} end
if held then forget(id) end
local size, deadline, place = #entry.body, deadline_ms > 0 and now + deadline_ms or 0, id
local work = {terms.PROMPT_WEIGHT} * entry.prompt + {terms.OUTPUT_WEIGHT} * (entry.tokens - entry.prompt)
if first then
  local bytes = redis.call('HMGET', BYTES, 'all', 'of:' .. entry.tenant, 'work:' .. entry.tenant)
  local count = redis.call('ZCARD', queue)
  if redis.call('ZCARD', WAITING) >= tonumber(ARGV[5]) then return {{'full', 'jobs', ''}} end
  if tonumber(bytes[1] or 0) + size > tonumber(ARGV[6]) then return {{'full', 'bytes', ''}} end
  if count >= tonumber(ARGV[7]) then return {{'full', 'tenant_jobs', entry.tenant}} end
  if tonumber(bytes[2] or 0) + size > tonumber(ARGV[8]) then return {{'full', 'tenant_bytes', entry.tenant}} end
  -- Members of one score lie in the order of their bytes: priority, deadline, arrival.
  place = string.format('%03d%015d%016d:', {terms.PRIORITY_LIMIT} - priority,
    deadline > 0 and deadline or 999999999999999, redis.call('INCR', P .. 'arrivals')) .. id
  local pace = redis.call('HMGET', PACE, 'since', 'work', 'pace')
  local best, measured_ms = tonumber(pace[3] or 0), now - tonumber(pace[1] or now)
  if measured_ms >= {terms.PACE_LEAST_MS} then best = math.max(best, tonumber(pace[2]) / measured_ms) end
  if deadline > 0 and best > 0 and count > 0 then
    -- As though the whole cell worked for this tenant.
    local ahead = redis.call('ZLEXCOUNT', queue, '-', '(' .. place)
    local wait_ms = ahead * tonumber(bytes[3] or 0) / count / best
    if wait_ms > {terms.DOUBT} * deadline_ms then return {{'late', math.floor(wait_ms)}} end
  end
end
redis.call('HSET', key, 'body', entry.body, 'wanted', entry.wanted, 'tenant', entry.tenant, 'attempt', entry.attempt,
  'place', place, 'size', size, 'work', work)
-- What a claim looks at, in one piece.
entry.body, entry.wanted = nil, nil
entry.queued, entry.deadline, entry.work = now, deadline, work
redis.call('HSET', key, 'facts', cmsgpack.pack(entry))
redis.call('ZADD', WAITING, deadline > 0 and deadline or '+inf', id)
count(entry.tenant, size, work)
if first then
  redis.call('ZADD', queue, 0, place)
  enter(entry.tenant)
else
  redis.call('ZADD', AGAIN, redis.call('INCR', P .. 'arrivals'), id)
end
-- Wakes the worker for which it would be held, or anybody.
local wake = WAKE
for other in string.gmatch(first and entry.prefer or '', '[^\\n]+') do
  if room_of(other) > 0 then
    wake = WAKE .. ':' .. other
    break
  end
end
if redis.call('LLEN', wake) < tonumber(ARGV[9]) then redis.call('LPUSH', wake, 1) end
if wake ~= WAKE then redis.call('PEXPIRE', wake, {terms.ROOM_MS}) end
return {{'queued'}}
"""

# ARGV: prefix, then of each report: id, attempt, tokens, whether it ended, whether it ran.
# Only what is more than the last report of that attempt is charged.
_CHARGE = f"""
for i = 2, #ARGV, 5 do
  local key = P .. 'charged:' .. ARGV[i]
  local known = redis.call('HMGET', key, 'tenant', 'weight', 'attempt', 'tokens', 'prompt')
  if known[1] and tonumber(known[3]) == tonumber(ARGV[i + 1]) then
    local made = tonumber(ARGV[i + 2]) - tonumber(known[4])
    if made > 0 then
      charge(known[1], {terms.OUTPUT_WEIGHT} * made / tonumber(known[2]))
      redis.call('HSET', key, 'tokens', ARGV[i + 2])
    end
    if ARGV[i + 3] == '1' then
      if ARGV[i + 4] == '0' then charge(known[1], -tonumber(known[5])) end
      redis.call('DEL', key)
    else
      redis.call('PEXPIRE', key, {terms.CHARGED_MS})
    end
  end
end
"""

# ARGV: prefix, id, attempt
_FINISH = """
local held = redis.call('HGET', P .. 'job:' .. ARGV[2], 'attempt')
if not held or tonumber(held) <= tonumber(ARGV[3]) then forget(ARGV[2]) end
local charged = redis.call('HGET', P .. 'charged:' .. ARGV[2], 'attempt')
if charged and tonumber(charged) <= tonumber(ARGV[3]) then redis.call('DEL', P .. 'charged:' .. ARGV[2]) end
"""


class JobQueue:
    """One cell's queue, as a router uses it with its limits, and a worker under its id."""

    def __init__(self, redis: Redis, keys: Keys, *, limits: QueueLimits | None = None, worker_id: str = "") -> None:
        self._redis = redis
        self.keys = keys
        self._limits = limits or QueueLimits()
        self._worker_id = worker_id
        self._enqueue = redis.register_script(script(_ENQUEUE))
        self._claim = redis.register_script(script(CLAIM, drains=True))
        self._charge = redis.register_script(script(_CHARGE, drains=True))
        self._finish = redis.register_script(script(_FINISH, drains=True))

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

    async def claim(self, base_digest: str, capacity: Capacity) -> Claimed:
        """Take the next jobs of a base model that suit a worker, up to its free rows: they are its own from now on."""
        room = (capacity.rows, capacity.rows_limit, capacity.tokens, capacity.max_tokens, capacity.max_rank)
        skip, hold_ms = 0, 0
        ahead: list[bytes] = []
        while True:
            waiting, bodies, wanted, held_ms, skip = await self._claim(
                keys=[self.keys.waiting],
                args=[self.keys.prefix, self._worker_id, base_digest, *room, skip, *capacity.adapters],
            )
            hold_ms = min(hold_ms or held_ms, held_ms or hold_ms)
            ahead = ahead or wanted
            if not skip:  # else nobody so far has a job that it can take
                break
        # What can't be read its router dispatches again, for a worker that can read it.
        return Claimed(_readable(bodies, decode_job), int(waiting), _readable(ahead, decode_wanted), hold_ms)

    async def charge(self, reports: Sequence[Usage]) -> None:
        """Charge tenants what their jobs made since the last report. Idempotent by job, attempt and count."""
        for at in range(0, len(reports), CHARGES_AT_ONCE):
            arguments: list[str | int] = [self.keys.prefix]
            for one in reports[at : at + CHARGES_AT_ONCE]:
                arguments += [one.job_id, one.attempt, one.tokens, int(one.ended), int(one.ran)]
            await self._charge(keys=[self.keys.waiting], args=arguments)

    async def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job that waits, up to this attempt. Idempotent."""
        await self._finish(keys=[self.keys.waiting], args=[self.keys.prefix, job_id, attempt])

    async def waiting(self, job_ids: Sequence[str]) -> list[bool]:
        """Which of these jobs still wait; the others were claimed, or lost, or their deadline passed."""
        scores = await self._redis.zmscore(self.keys.waiting, list(job_ids))
        return [score is not None for score in scores]

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
