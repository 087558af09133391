"""The queue of one cell: enqueue, claim, finish, and the wake-up that spares workers from polling.

Jobs wait in `waiting` ordered by arrival, re-dispatched ones in front. Every script is atomic. Those that drain are
flagged allow-oom, so that a full Redis can still empty itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from broker.codec import decode_job, decode_wanted, encode_job, encode_wanted
from broker.keys import Keys
from broker.messages import Capacity, Job, Wanted

log = logging.getLogger(__name__)

T = TypeVar("T")

# How many waiting jobs a claim looks at: what fits nobody is passed over, never in front of others for long.
CLAIM_WINDOW = 64
# How many more, whose adapters are worth fetching beforehand, and how many adapters it names.
AHEAD_WINDOW = 16
WANTED_LIMIT = 4
# More wake-ups than idle workers help nobody.
WAKE_LIMIT = 64


class QueueFullError(Exception):
    """The queue's bound, or Redis's memory, is reached."""


# KEYS: waiting, job, arrivals, wake.
# ARGV: id, body, attempt, tokens, prefill, rank, deadline_ms, waiting limit, wake limit, rows, base digest, wanted
_ENQUEUE = """#!lua
local attempt = tonumber(ARGV[3])
local held = redis.call('HGET', KEYS[2], 'attempt')
if held and tonumber(held) >= attempt then return 1 end
if attempt == 1 and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[8]) then return 0 end
local score = redis.call('INCR', KEYS[3])
if attempt > 1 then score = score - 2^52 end
redis.call('HSET', KEYS[2], 'body', ARGV[2], 'attempt', attempt, 'tokens', ARGV[4], 'prefill', ARGV[5],
  'rank', ARGV[6], 'rows', ARGV[10], 'base', ARGV[11], 'wanted', ARGV[12])
if tonumber(ARGV[7]) > 0 then redis.call('PEXPIRE', KEYS[2], ARGV[7]) end
redis.call('ZADD', KEYS[1], score, ARGV[1])
if redis.call('LLEN', KEYS[4]) < tonumber(ARGV[9]) then redis.call('LPUSH', KEYS[4], 1) end
return 1
"""

# KEYS: waiting, wake.
# ARGV: job prefix, window, free rows, free tokens, max tokens, max rank, all rows, base digest, look ahead, most wanted
# The first in line may take more tokens than are free: the engine lets nobody overtake it, or it might wait for ever.
# Of those that must wait, it counts the adapters: the ones that most wait for come back first.
_CLAIM = """#!lua flags=allow-oom
local rows, free = tonumber(ARGV[3]), tonumber(ARGV[4])
local bodies, first, ahead = {}, true, tonumber(ARGV[9])
local wanted, counts, order = {}, {}, {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[2]) - 1)) do
  if rows < 1 then
    if ahead < 1 then break end
    ahead = ahead - 1
  end
  local key = ARGV[1] .. id
  local job = redis.call('HMGET', key, 'tokens', 'prefill', 'rank', 'rows', 'base', 'wanted')
  if not job[1] then
    redis.call('ZREM', KEYS[1], id)
  elseif tonumber(job[1]) <= tonumber(ARGV[5]) and tonumber(job[3]) <= tonumber(ARGV[6]) and job[5] == ARGV[8] then
    if (first or tonumber(job[2]) <= free) and math.min(tonumber(job[4]), tonumber(ARGV[7])) <= rows then
      free = free - tonumber(job[2])
      rows = rows - tonumber(job[4])
      redis.call('ZREM', KEYS[1], id)
      bodies[#bodies + 1] = redis.call('HGET', key, 'body')
      redis.call('DEL', key)
    elseif job[6] and job[6] ~= '' then
      if not counts[job[6]] then
        wanted[#wanted + 1] = job[6]
        counts[job[6]], order[job[6]] = 0, #wanted
      end
      counts[job[6]] = counts[job[6]] + 1
    end
    first = false
  end
end
local waiting = redis.call('ZCARD', KEYS[1])
if waiting == 0 then
  redis.call('DEL', KEYS[2])
elseif #bodies > 0 and redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('LPUSH', KEYS[2], 1)
end
table.sort(wanted, function(a, b)
  if counts[a] ~= counts[b] then return counts[a] > counts[b] end
  return order[a] < order[b]
end)
while #wanted > tonumber(ARGV[10]) do table.remove(wanted) end
return {waiting, bodies, wanted}
"""

# KEYS: waiting, job. ARGV: id, attempt
_FINISH = """#!lua flags=allow-oom
local held = redis.call('HGET', KEYS[2], 'attempt')
if not held then
  redis.call('ZREM', KEYS[1], ARGV[1])
elseif tonumber(held) <= tonumber(ARGV[2]) then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim took, how many jobs still wait after it, and the adapters that the next of these want most."""

    jobs: list[Job]
    waiting: int
    wanted: list[Wanted]


class JobQueue:
    """One cell's queue."""

    def __init__(self, redis: Redis, keys: Keys, *, waiting_limit: int = 10_000) -> None:
        self._redis = redis
        self.keys = keys
        self._waiting_limit = waiting_limit
        self._enqueue = redis.register_script(_ENQUEUE)
        self._claim = redis.register_script(_CLAIM)
        self._finish = redis.register_script(_FINISH)

    async def enqueue(self, job: Job) -> None:
        """Put a job in; a newer attempt takes an older one's place. Raises QueueFullError (first attempts only)."""
        keys = self.keys
        arguments: list[str | bytes | int] = [job.job_id, encode_job(job), job.attempt, job.tokens]
        arguments += [
            job.prefill_tokens,
            job.rank,
            job.deadline_ms,
            self._waiting_limit,
            WAKE_LIMIT,
            job.rows,
            job.base_digest,
            encode_wanted(job),
        ]
        try:
            accepted = await self._enqueue(
                keys=[keys.waiting, keys.job(job.job_id), keys.arrivals, keys.wake], args=arguments
            )
        except OutOfMemoryError as error:
            raise QueueFullError("Redis is out of memory") from error
        if not accepted:
            raise QueueFullError(f"{self._waiting_limit} jobs are waiting")

    async def claim(self, base_digest: str, capacity: Capacity) -> Claimed:
        """Take the next jobs of a base model that suit a worker, up to its free rows: they are its own from now on."""
        keys = self.keys
        waiting, bodies, wanted = await self._claim(
            keys=[keys.waiting, keys.wake],
            args=[
                keys.job(""),
                CLAIM_WINDOW,
                capacity.rows,
                capacity.tokens,
                capacity.max_tokens,
                capacity.max_rank,
                capacity.rows_limit,
                base_digest,
                AHEAD_WINDOW,
                WANTED_LIMIT,
            ],
        )
        # What can't be read its router dispatches again, for a worker that can read it.
        return Claimed(_readable(bodies, decode_job), int(waiting), _readable(wanted, decode_wanted))

    async def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job that waits, up to this attempt. Idempotent."""
        await self._finish(keys=[self.keys.waiting, self.keys.job(job_id)], args=[job_id, attempt])

    async def waiting(self, job_ids: Sequence[str]) -> list[bool]:
        """Which of these jobs still wait; the others were claimed, or lost."""
        scores = await self._redis.zmscore(self.keys.waiting, list(job_ids))
        return [score is not None for score in scores]

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Block until there may be work; False when the time passed without a wake-up."""
        return await self._redis.blpop([self.keys.wake], timeout=timeout_s) is not None

    async def count_waiting(self) -> int:
        """How many jobs wait."""
        return int(await self._redis.zcard(self.keys.waiting))


def _readable(bodies: Sequence[bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Those that this version can read."""
    read = []
    for body in bodies:
        try:
            read.append(decode(body))
        except DecodeError:
            log.exception("%d bytes in the queue can't be read", len(body))
    return read
