-- The virtual counters of service (see broker/terms.py). A tenant with waiting jobs is active and stands in TENANTS;
-- IDLE keeps the counters of the others that are above the lowest active one.
--- @include "keys"
--- @include "totals"

-- Return the lowest counter of an active tenant; without one, that of the tenant that was active last.
local function lowest_counter()
  local lowest = redis.call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')
  return number_of(lowest[2] or redis.pcall('GET', FLOOR))
end

-- Return a tenant's counter; the lowest for a tenant without one, or with a lower one.
local function counter_of(tenant)
  local counter = redis.call('ZSCORE', TENANTS, tenant)
  if counter then return number_of(counter) end
  local lowest = lowest_counter()
  return math.max(lowest, number_of(redis.call('ZSCORE', IDLE, tenant) or lowest))
end

-- Make a tenant active that was idle; a counter below the lowest is lifted. `flush_counts` comes after it. Redis orders
-- equal counters by name, so a tenant is lifted just above the lowest and above those that were lifted before it: of
-- tenants that are served alike the one that waits longest is next.
local function activate_tenant(tenant, weight)
  local active = redis.call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')[2]
  local lowest, idle = number_of(active or redis.pcall('GET', FLOOR)), redis.call('ZSCORE', IDLE, tenant)
  if idle then redis.call('ZREM', IDLE, tenant) end
  local counter = number_of(idle or lowest)
  if counter <= lowest then
    counter = lowest
    if active then
      if not cell then read_totals(tenant) end
      counter = cell.next_lift
      if counter <= lowest or counter > lowest + LIFTS_LIMIT / LIFTS_PER_TOKEN then
        counter = lowest + 1 / LIFTS_PER_TOKEN
      end
      cell.next_lift = counter + 1 / LIFTS_PER_TOKEN
    end
  end
  redis.call('ZADD', TENANTS, counter, tenant)
  set_terms(tenant, weight)
end

-- Make a tenant idle whose last waiting job has left, or whose queue was lost; `counter` where it is known.
local function deactivate_tenant(tenant, counter)
  counter = counter or number_of(redis.call('ZSCORE', TENANTS, tenant) or lowest_counter())
  redis.call('ZREM', TENANTS, tenant)
  if not cell then read_totals(tenant) end
  if cell.uses == 1 then redis.call('ZREM', USES, tenant) end
  local lowest = redis.call('ZRANGE', TENANTS, 0, 0, 'WITHSCORES')[2]
  if not lowest then
    redis.call('SET', FLOOR, counter)
    cell.next_lift = 0
  elseif counter > number_of(lowest) then
    redis.call('ZADD', IDLE, counter, tenant)
  end
  clear_totals(tenant)
  set_terms(tenant, 1, 0)
end

-- Add to the counters of tenants, given with the costs in turn; a cost is in charged tokens over the tenant's weight.
local function charge_tenants(costs)
  if #costs == 0 then return end
  local names, active, counters, lowest = {}, {}, {}, nil
  for i = 1, #costs, 2 do
    if not active[costs[i]] then names[#names + 1], active[costs[i]] = costs[i], true end
  end
  for i, counter in ipairs(redis.call('ZMSCORE', TENANTS, unpack(names))) do
    active[names[i]], counters[names[i]] = counter and true or false, counter and number_of(counter)
  end
  for i = 1, #costs, 2 do
    local name = costs[i]
    if not active[name] then
      lowest = lowest or lowest_counter()
      counters[name] = math.max(lowest, counters[name] or number_of(redis.call('ZSCORE', IDLE, name) or lowest))
    end
    counters[name] = counters[name] + costs[i + 1]
  end
  local raised = {}
  for _, name in ipairs(names) do
    if active[name] then
      raised[#raised + 1], raised[#raised + 2] = counters[name], name
    elseif counters[name] > lowest then
      redis.call('ZADD', IDLE, counters[name], name)
    else
      redis.call('ZREM', IDLE, name)
    end
  end
  if #raised > 0 then redis.call('ZADD', TENANTS, unpack(raised)) end
end

-- Subtract the lowest counter from all where one is beyond COUNTERS_LIMIT. One that then still is, of a tenant that was
-- charged by a weight which is allowed no more, becomes the lowest.
local function rebase_counters()
  local lowest, highest = lowest_counter(), 0
  for _, key in ipairs({TENANTS, IDLE}) do
    highest = math.max(highest, tonumber(redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2] or 0))
  end
  if math.max(lowest, highest) <= COUNTERS_LIMIT then return end
  for _, key in ipairs({TENANTS, IDLE}) do
    local counters = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    for i = 1, #counters, 2 do
      local lead = number_of(counters[i + 1]) - lowest
      redis.call('ZADD', key, lead > 0 and lead <= COUNTERS_LIMIT and lead or 0, counters[i])
    end
  end
  redis.call('SET', FLOOR, 0)
end

-- Forget the counters of idle tenants that would be lifted anyway.
local function prune_idle_tenants()
  redis.call('ZREMRANGEBYSCORE', IDLE, '-inf', lowest_counter())
end
