-- Which routers live: each for ROUTER_TTL_MS after its last beat.
--- @include "keys"
--- @include "clock"

-- Return whether no router has beaten for ROUTERS_QUIET_MS, or the key is lost: then no router is taken for dead.
local function are_routers_quiet()
  local latest = redis.call('ZRANGE', ROUTERS, -1, -1, 'WITHSCORES')[2]
  return not latest or tonumber(latest) - ROUTER_TTL_MS + ROUTERS_QUIET_MS < now
end

-- Record a router's beat, unless the last one was within ROUTER_BEAT_MS. The first beat after an outage gives all
-- routers their full time again.
local function beat_router(router)
  local known = redis.call('ZSCORE', ROUTERS, router)
  if known and tonumber(known) > now + ROUTER_TTL_MS - ROUTER_BEAT_MS then return end
  if are_routers_quiet() then
    for _, other in ipairs(redis.call('ZRANGE', ROUTERS, 0, -1)) do
      redis.call('ZADD', ROUTERS, now + ROUTER_TTL_MS, other)
    end
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
