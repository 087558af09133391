"""Who lives: a key per worker that dies with its beats, a score per router. Time is Redis's own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_worker, encode_worker
from broker.keys import Keys
from broker.lua import script
from broker.messages import WorkerState

BEAT_MS = 500
TTL_MS = 3_000

# ARGV: prefix, incarnation, worker, state, ttl
_BEAT = """
redis.call('HSET', P .. 'workers', ARGV[2], ARGV[3])
redis.call('SET', P .. 'worker:' .. ARGV[2], ARGV[4], 'PX', ARGV[5])
"""

# ARGV: prefix, incarnation
_REMOVE = """
local worker = redis.call('HGET', P .. 'workers', ARGV[2])
redis.call('DEL', P .. 'worker:' .. ARGV[2])
redis.call('HDEL', P .. 'workers', ARGV[2])
if worker then no_room(worker) end
"""

# ARGV: prefix, the router that lives or '', a name that no data has yet. Answers {the server's run and data, states}.
_LOOK = """
if ARGV[2] ~= '' then router_beats(ARGV[2]) end
local states, living, lapsed = {}, {}, {}
local known = redis.call('HGETALL', P .. 'workers')
for i = 1, #known, 2 do
  local state = redis.call('GET', P .. 'worker:' .. known[i])
  if state then
    states[#states + 1] = state
    living[known[i + 1]] = true
  else
    redis.call('HDEL', P .. 'workers', known[i])
    lapsed[#lapsed + 1] = known[i + 1]
  end
end
for _, worker in ipairs(lapsed) do
  if not living[worker] then no_room(worker) end
end
redis.call('SET', P .. 'born', ARGV[3], 'NX')
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
return {run .. ' ' .. redis.call('GET', P .. 'born'), states}
"""


@dataclass(frozen=True, slots=True)
class Census:
    """The workers that live now, by id. `server` changes with a restart, a failover and the loss of all data."""

    server: str
    workers: list[WorkerState]


class Liveness:
    """The workers and routers of one cell."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._beat = redis.register_script(script(_BEAT, drains=True))
        self._remove = redis.register_script(script(_REMOVE, drains=True))
        self._look = redis.register_script(script(_LOOK, drains=True))

    async def beat(self, state: WorkerState) -> None:
        """Say that a worker lives, for the next TTL_MS."""
        await self._beat(
            keys=[self._keys.workers],
            args=[self._keys.prefix, state.incarnation, state.worker_id, encode_worker(state), TTL_MS],
        )

    async def remove(self, incarnation: str) -> None:
        """Say at once that an incarnation lives no more; nothing waits for its worker."""
        await self._remove(keys=[self._keys.workers], args=[self._keys.prefix, incarnation])

    async def look(self, router: str = "") -> Census:
        """Who lives; a router says with it that itself does."""
        args = [self._keys.prefix, router, secrets.token_hex(8)]
        server, states = await self._look(keys=[self._keys.workers], args=args)
        workers: list[WorkerState] = []
        for data in states:
            try:
                workers.append(decode_worker(data))
            except DecodeError:  # another version's; it is not ours to use
                continue
        return Census(server.decode(), sorted(workers, key=lambda state: state.worker_id))

    async def living(self) -> list[WorkerState]:
        """The workers that live now, by id."""
        return (await self.look()).workers
