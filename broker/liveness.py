"""Who lives: a key per worker that dies with its beats. Time is Redis's own."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_worker, encode_worker
from broker.keys import Keys
from broker.messages import WorkerState

BEAT_MS = 500
TTL_MS = 3_000

# KEYS: workers, worker. ARGV: incarnation, state, ttl
_BEAT = """#!lua flags=allow-oom
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""

# KEYS: workers. ARGV: worker prefix
_LIVING = """#!lua flags=allow-oom
local states = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local state = redis.call('GET', ARGV[1] .. id)
  if state then states[#states + 1] = state else redis.call('SREM', KEYS[1], id) end
end
return states
"""


class Liveness:
    """The workers of one cell."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._beat = redis.register_script(_BEAT)
        self._living = redis.register_script(_LIVING)

    async def beat(self, state: WorkerState) -> None:
        """Say that a worker lives, for the next TTL_MS."""
        keys = self._keys
        await self._beat(
            keys=[keys.workers, keys.worker(state.incarnation)],
            args=[state.incarnation, encode_worker(state), TTL_MS],
        )

    async def remove(self, incarnation: str) -> None:
        """Say at once that an incarnation lives no more."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._keys.worker(incarnation))
            pipe.srem(self._keys.workers, incarnation)
            await pipe.execute()

    async def living(self) -> list[WorkerState]:
        """The workers that live now, by id."""
        states: list[WorkerState] = []
        for data in await self._living(keys=[self._keys.workers], args=[self._keys.worker("")]):
            try:
                states.append(decode_worker(data))
            except DecodeError:  # another version's; it is not ours to use
                continue
        return sorted(states, key=lambda state: state.worker_id)
