-- The virtual counters of service (see broker/terms.py). A tenant with waiting jobs is active and stands in TENANTS;
-- IDLE keeps the counters of the others that are above the lowest active one.
--- @include "keys"

-- Write a number with all its digits; Lua's own conversion writes 14.
local function exact(number) return string.format('%.17g', number) end

-- Return the lowest counter of an active tenant; without one, that of the tenant that was active last.
local function lowest_counter()
  local lowest = redis.call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')
  return tonumber(lowest[2] or redis.call('GET', FLOOR) or 0)
end

-- Return a tenant's counter; the lowest for a tenant without one.
local function counter_of(tenant)
  return tonumber(redis.call('ZSCORE', TENANTS, tenant) or redis.call('ZSCORE', IDLE, tenant) or lowest_counter())
end

-- Make a tenant active. An idle counter below the lowest is lifted to it, so nothing below needs to be kept.
local function activate_tenant(tenant)
  if redis.call('ZSCORE', TENANTS, tenant) then return end
  local lowest = lowest_counter()
  local counter = math.max(lowest, tonumber(redis.call('ZSCORE', IDLE, tenant) or lowest))
  redis.call('ZREM', IDLE, tenant)
  redis.call('ZREMRANGEBYSCORE', IDLE, '-inf', exact(lowest))
  redis.call('ZADD', TENANTS, exact(counter), tenant)
end

-- Make a tenant idle whose last waiting job has left.
local function deactivate_tenant(tenant)
  local counter = tonumber(redis.call('ZSCORE', TENANTS, tenant))
  redis.call('ZREM', TENANTS, tenant)
  redis.call('ZREM', USES, tenant)
  if redis.call('ZCARD', TENANTS) == 0 then redis.call('SET', FLOOR, exact(counter)) end
  if counter > lowest_counter() then redis.call('ZADD', IDLE, exact(counter), tenant) end
end

-- Add to a tenant's counter; `cost` is in charged tokens over the tenant's weight.
local function charge_tenant(tenant, cost)
  local counter = redis.call('ZSCORE', TENANTS, tenant)
  if counter then
    redis.call('ZADD', TENANTS, exact(tonumber(counter) + cost), tenant)
    return
  end
  local lowest = lowest_counter()
  counter = tonumber(redis.call('ZSCORE', IDLE, tenant) or lowest) + cost
  if counter > lowest then
    redis.call('ZADD', IDLE, exact(counter), tenant)
  else
    redis.call('ZREM', IDLE, tenant)
  end
end
