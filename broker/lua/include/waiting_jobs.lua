-- How a waiting job leaves its queue.
--
-- A job's facts are what a claim needs to know of it, packed in this order: tenant, base, adapter, prefer, router,
-- attempt, weight, tokens, prefill, prompt, rank, rows, load, place, size, work, queued, deadline. The order is a format:
-- in a rolling upgrade one version reads what another has written. They are unpacked into locals, because a table for
-- each job costs a scan a fifth of its time.
--- @include "keys"
--- @include "tenant_counters"
--- @include "totals"

-- Take a job out of its tenant's queue, or out of the jobs that have begun, where its place is its id. Returns whether
-- the tenant became idle; its `counter` may be known.
local function leave_queue(id, tenant, place, size, work, counter)
  count_waiting(tenant, -size, -work, place == id)
  if place == id then
    redis.call('ZREM', REDISPATCHED, place)
    return false
  end
  local queue = PREFIX .. 'queue:' .. tenant
  if redis.call('ZREM', queue, place) == 0 or redis.call('EXISTS', queue) == 1 then return false end
  deactivate_tenant(tenant, counter)
  return true
end

-- Delete a waiting job, or the mark of one that was displaced.
local function forget_job(id)
  local key = PREFIX .. 'job:' .. id
  local facts = redis.call('HGET', key, 'facts')
  redis.call('ZREM', WAITING, id)
  redis.call('DEL', key)
  if not facts then return end
  local tenant, _, _, _, _, _, _, _, _, _, _, _, _, place, size, work = cmsgpack.unpack(facts)
  leave_queue(id, tenant, place, size, work)
end
