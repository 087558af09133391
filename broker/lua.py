"""What the queue's scripts have in common: time, tenants' counters, who lives, and how a waiting job is forgotten.

Every script gets the prefix of the cell's keys as ARGV[1]; KEYS[1] is one of these, so that it runs on their shard.
"""

from __future__ import annotations

from broker import terms

# Redis's own clock, in milliseconds.
NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# What is kept of a waiting job for claims, in this order: the fields of terms.Entry but for the bodies, and then what
# the enqueue adds.
NUMBERS = ("attempt", "weight", "tokens", "prefill", "prompt", "rank", "rows", "load")
FACTS = ("tenant", "base", "adapter", "prefer", "router", *NUMBERS, "place", "size", "work", "queued", "deadline")
UNPACK = f"local {', '.join('job_' + name for name in FACTS)} = cmsgpack.unpack"
PACK = f"cmsgpack.pack({', '.join('entry.' + name for name in FACTS)})"

# Counters go back to Redis with all their digits: by itself Lua would write 14 of them.
_COMMON = f"""
local P = ARGV[1]
local WAITING, TENANTS, IDLE, FLOOR = P .. 'waiting', P .. 'tenants', P .. 'idle', P .. 'floor'
local AGAIN, BYTES, WAKE, PACE = P .. 'again', P .. 'bytes', P .. 'wake', P .. 'pace'
local ROUTERS, ROUTER_MS, QUIET_MS = P .. 'routers', {terms.ROUTER_MS}, {terms.QUIET_MS}

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
-- of its full length. Added up here; `settle` writes it, at the end of every script that counts.
local changes = {{all = 0}}
local function count(tenant, size, work)
  local bytes_of, work_of = 'of:' .. tenant, 'work:' .. tenant
  changes.all = changes.all + size
  changes[bytes_of] = (changes[bytes_of] or 0) + size
  changes[work_of] = (changes[work_of] or 0) + work
end

local function settle()
  for field, change in pairs(changes) do
    if change ~= 0 and redis.call('HINCRBY', BYTES, field, change) <= 0 then redis.call('HDEL', BYTES, field) end
  end
end

-- Takes a job out of its queue.
local function unqueue(tenant, place, size, attempt, work)
  count(tenant, -size, -work)
  if attempt > 1 then
    redis.call('ZREM', AGAIN, place)
    return
  end
  local queue = P .. 'queue:' .. tenant
  if redis.call('ZREM', queue, place) == 1 and redis.call('EXISTS', queue) == 0 then leave(tenant) end
end

-- A job waits no more, whatever the reason.
local function forget(id)
  local facts = redis.call('HGET', P .. 'job:' .. id, 'facts')
  redis.call('ZREM', WAITING, id)
  if not facts then return end
  redis.call('DEL', P .. 'job:' .. id)
  {UNPACK}(facts)
  unqueue(job_tenant, job_place, job_size, job_attempt, job_work)
end

local function room_of(worker) return tonumber(redis.call('GET', P .. 'room:' .. worker) or 0) end

-- A worker takes no work now. What it was told of work, somebody else is told.
local function no_room(worker)
  redis.call('DEL', P .. 'room:' .. worker, WAKE .. ':' .. worker)
  if redis.call('ZCARD', WAITING) > 0 and redis.call('EXISTS', WAKE) == 0 then redis.call('LPUSH', WAKE, 1) end
end

-- Whether no router has said for long that it lives: then it was Redis that was away.
local function quiet()
  local newest = redis.call('ZRANGE', ROUTERS, -1, -1, 'WITHSCORES')[2]
  return newest and tonumber(newest) - ROUTER_MS + QUIET_MS < now
end

-- A router lives. After an outage all of them get their time again.
local function router_beats(router)
  if quiet() then
    for _, other in ipairs(redis.call('ZRANGE', ROUTERS, 0, -1)) do
      redis.call('ZADD', ROUTERS, now + ROUTER_MS, other)
    end
  end
  redis.call('ZADD', ROUTERS, now + ROUTER_MS, router)
  redis.call('ZREMRANGEBYSCORE', ROUTERS, '-inf', now)
end

local function router_lives(router)
  return tonumber(redis.call('ZSCORE', ROUTERS, router) or 0) > now or quiet()
end
"""


def script(body: str, *, drains: bool = False) -> str:
    """A whole script. One that drains runs though memory is full."""
    return "#!lua" + (" flags=allow-oom" if drains else "") + NOW + _COMMON + body
