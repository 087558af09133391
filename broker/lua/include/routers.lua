-- Which routers live: each for ROUTER_TTL_MS after its last beat. The clock may go back: where another server takes over, or
-- it was wrong before. Then the last beat is later than now.
--- @include "keys"
--- @include "clock"

-- Return the time of the last beat; nothing where none is known.
local function last_beat()
  local latest = redis.call('ZRANGE', ROUTERS, -1, -1, 'WITHSCORES')[2]
  return latest and tonumber(latest) - ROUTER_TTL_MS
end

-- Return whether no router has beaten for ROUTERS_QUIET_MS, or the key is lost: then no router is taken for dead.
local function are_routers_quiet()
  local last = last_beat()
  return not last or last + ROUTERS_QUIET_MS < now
end

-- Shorten what was to expire by the clock before it went back: the keys of workers, and their free rows.
local function shorten_workers()
  local workers = redis.call('HGETALL', WORKERS)
  for i = 1, #workers, 2 do
    redis.call('PEXPIRE', PREFIX .. 'worker:' .. workers[i], WORKER_TTL_MS)
    redis.call('HDEL', ROOMS, workers[i + 1])
  end
end

-- Record a router's beat, unless the last one was within ROUTER_BEAT_MS. The first beat after an outage, or after the
-- clock went back, gives all routers their full time again.
local function beat_router(router)
  local known = tonumber(redis.call('ZSCORE', ROUTERS, router) or 0)
  if known > now + ROUTER_TTL_MS - ROUTER_BEAT_MS and known <= now + ROUTER_TTL_MS then return end
  local last = last_beat() or 0
  if last + ROUTERS_QUIET_MS < now or last > now then
    for _, other in ipairs(redis.call('ZRANGE', ROUTERS, 0, -1)) do
      redis.call('ZADD', ROUTERS, now + ROUTER_TTL_MS, other)
    end
    if last > now then shorten_workers() end
  end
  redis.call('ZADD', ROUTERS, now + ROUTER_TTL_MS, router)
  redis.call('ZREMRANGEBYSCORE', ROUTERS, '-inf', now)
end

-- Return the addresses of the live routers.
local function live_routers()
  return redis.call('ZRANGEBYSCORE', ROUTERS, are_routers_quiet() and '-inf' or '(' .. now, '+inf')
end

local function is_router_alive(router)
  return tonumber(redis.call('ZSCORE', ROUTERS, router) or 0) > now or are_routers_quiet()
end
