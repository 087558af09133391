"""What the queue's scripts have in common: time, tenants' counters, and how a waiting job is forgotten.

Every script gets the prefix of the cell's keys as ARGV[1]; KEYS[1] is one of these, so that it runs on their shard.
"""

from __future__ import annotations

# Redis's own clock, in milliseconds.
NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# Counters go back to Redis with all their digits: by itself Lua would write 14 of them.
_COMMON = """
local P = ARGV[1]
local WAITING, TENANTS, IDLE, FLOOR = P .. 'waiting', P .. 'tenants', P .. 'idle', P .. 'floor'
local AGAIN, BYTES, WAKE, PACE = P .. 'again', P .. 'bytes', P .. 'wake', P .. 'pace'

local function exact(number) return string.format('%.17g', number) end

-- The lowest counter of a tenant with waiting jobs; without one, that of the last which had some.
local function lowest()
  local low = redis.call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')
  return tonumber(low[2] or redis.call('GET', FLOOR) or 0)
end

-- A tenant that has waiting jobs now. Who is idle and below the lowest would be lifted: nothing is to be kept of it.
local function enter(tenant)
  if redis.call('ZSCORE', TENANTS, tenant) then return end
  local low = lowest()
  local counter = math.max(low, tonumber(redis.call('ZSCORE', IDLE, tenant) or low))
  redis.call('ZREM', IDLE, tenant)
  redis.call('ZREMRANGEBYSCORE', IDLE, '-inf', exact(low))
  redis.call('ZADD', TENANTS, exact(counter), tenant)
end

-- A tenant whose last waiting job is gone.
local function leave(tenant)
  local counter = tonumber(redis.call('ZSCORE', TENANTS, tenant))
  redis.call('ZREM', TENANTS, tenant)
  if redis.call('ZCARD', TENANTS) == 0 then redis.call('SET', FLOOR, exact(counter)) end
  if counter > lowest() then redis.call('ZADD', IDLE, exact(counter), tenant) end
end

local function charge(tenant, tokens)
  local counter = redis.call('ZSCORE', TENANTS, tenant)
  if counter then
    redis.call('ZADD', TENANTS, exact(tonumber(counter) + tokens), tenant)
    return
  end
  local low = lowest()
  counter = tonumber(redis.call('ZSCORE', IDLE, tenant) or low) + tokens
  if counter > low then
    redis.call('ZADD', IDLE, exact(counter), tenant)
  else
    redis.call('ZREM', IDLE, tenant)
  end
end

-- What waits: bytes in all and of a tenant, and a tenant's work in tokens as they are charged, were every answer to be
-- of its full length.
local function count(tenant, size, work)
  for field, change in pairs({all = size, ['of:' .. tenant] = size, ['work:' .. tenant] = work}) do
    if redis.call('HINCRBY', BYTES, field, change) <= 0 then redis.call('HDEL', BYTES, field) end
  end
end

-- A job waits no more, whatever the reason.
local function forget(id)
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'tenant', 'place', 'size', 'attempt', 'work')
  redis.call('ZREM', WAITING, id)
  if not job[1] then return end
  redis.call('DEL', key)
  count(job[1], -tonumber(job[3]), -tonumber(job[5]))
  if tonumber(job[4]) > 1 then
    redis.call('ZREM', AGAIN, job[2])
    return
  end
  local queue = P .. 'queue:' .. job[1]
  if redis.call('ZREM', queue, job[2]) == 1 and redis.call('EXISTS', queue) == 0 then leave(job[1]) end
end

local function room_of(worker) return tonumber(redis.call('GET', P .. 'room:' .. worker) or 0) end
"""


def script(body: str, *, drains: bool = False) -> str:
    """A whole script. One that drains runs though memory is full."""
    return "#!lua" + (" flags=allow-oom" if drains else "") + NOW + _COMMON + body
