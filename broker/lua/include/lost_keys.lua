-- Repair of a queue that has lost some of its keys: evicted by a server with the wrong policy, or deleted.
--- @include "waiting_jobs"
--- @include "arrivals"

-- Forget how many jobs of each of a tenant's keys wait: its queue was lost.
local function forget_counts_of_keys(tenant)
  hash_fields(keys_of(tenant), 'jobs:')
  for _, field in ipairs(redis.call('HKEYS', keys_of(tenant))) do
    if string.match(field, '^jobs:') or string.match(field, '^bytes:') then redis.call('HDEL', keys_of(tenant), field) end
  end
end

-- Put a waiting job that has its own key back where other keys have lost it. Returns whether it was missing; nil for one
-- that cannot be read, which is forgotten.
local function restore_job(id, facts)
  local is_readable, tenant, _, _, _, _, _, weight, _, _, _, _, _, _, key, _, place, size, work, _, deadline =
    read_packed(checked_facts, facts)
  if not is_readable then return forget_job(id) end
  redis.call('ZADD', WAITING, 'NX', deadline > 0 and deadline or '+inf', id)
  if place == id then
    if redis.call('ZSCORE', REDISPATCHED, id) then return false end
    redis.call('ZADD', REDISPATCHED, record_arrival(id), id)
    count_waiting(tenant, size, work, true)
    return true
  end
  local queue = PREFIX .. 'queue:' .. tenant
  local is_new = redis.pcall('ZADD', queue, 'NX', 0, place) == 1 -- an error for another type, until a census
  if is_new then
    if redis.call('ZCARD', queue) == 1 then
      clear_totals(tenant)
      flush_counts()
      forget_counts_of_keys(tenant)
    end
    count_waiting(tenant, size, work, false)
    if key ~= '' then count_of_key(tenant, key, 1, size) end
    if turn_of(place) then set_terms(tenant, nil, 1) end
    record_arrival(id)
  end
  if not redis.call('ZSCORE', TENANTS, tenant) then activate_tenant(tenant, weight) end
  return is_new
end

-- Drop what lost keys have left behind and nobody would find: totals of jobs that have begun, and ids of waiting jobs,
-- some of them found by chance. A router dispatches a lost job again, and forgets it in the end; a dead one does not.
local function drop_remains()
  if redis.call('EXISTS', REDISPATCHED) == 0 then
    read_totals()
    for _, tenant in ipairs(cell.begun_bytes > 0 and redis.call('HKEYS', TOTALS) or {}) do
      if tenant ~= CELL_FIELD then
        read_totals(tenant)
        count_waiting(tenant, -totals[tenant].begun_bytes, -totals[tenant].begun_work, true)
        flush_counts() -- one command has no room for thousands of tenants
      end
    end
    cell.begun_bytes = 0
    flush_counts()
  end
  for _, id in ipairs(redis.call('ZRANDMEMBER', WAITING, LOST_IDS_PER_CENSUS)) do
    if redis.call('EXISTS', PREFIX .. 'job:' .. id) == 0 then redis.call('ZREM', WAITING, id) end
  end
end
