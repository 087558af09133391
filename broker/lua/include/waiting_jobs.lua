-- How a waiting job leaves its queue.
--
-- A job's facts are what a claim needs to know of it: those that its router has packed (broker/queue_entry.py), and after
-- them place, size, work, queued and deadline. The order is a format: in a rolling upgrade one version reads what another
-- has written. They are unpacked into locals, because a table for each job costs a scan a fifth of its time.
--- @include "keys"
--- @include "tenant_counters"
--- @include "totals"
--- @include "key_turns"
--- @include "packed"

-- Return facts as they are. Raises an error on those that enqueue.lua cannot have packed.
local function checked_facts(tenant, base, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, rank, rows, load,
    key, key_weight, place, size, work, queued, deadline)
  local is_text = tenant >= '' and base >= '' and adapter >= '' and prefer >= '' and router >= '' and place >= ''
    and key >= ''
  if is_text and attempt >= 0 and weight > 0 and tokens >= 0 and prefill >= 0 and prompt >= 0 and rank >= 0 and rows >= 0
      and load >= 0 and size >= 0 and work >= 0 and queued >= 0 and deadline >= 0 and key_weight >= 0 and attempt + weight
      + tokens + prefill + prompt + rank + rows + load + size + work + queued + deadline + key_weight < math.huge then
    return tenant, base, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, rank, rows, load, key,
      key_weight, place, size, work, queued, deadline
  end
  error('unreadable')
end

-- Take a job out of its tenant's queue, or out of the jobs that have begun, where its place is its id. Returns whether
-- the tenant became idle, whose key of `keys_of` is to be deleted then; its `counter` may be known, and that it `has_more`
-- jobs. A queue of another type, which a census sets aside, stays.
local function leave_queue(id, tenant, place, size, work, key, counter, has_more)
  count_waiting(tenant, -size, -work, place == id)
  if place == id then
    redis.call('ZREM', REDISPATCHED, place)
    return false
  end
  if key ~= '' then count_of_key(tenant, key, -1, -size) end
  local queue = PREFIX .. 'queue:' .. tenant
  if redis.pcall('ZREM', queue, place) ~= 1 or has_more or redis.call('EXISTS', queue) == 1 then return false end
  deactivate_tenant(tenant, counter)
  return true
end

-- Delete a waiting job, or the mark of one that was displaced.
local function forget_job(id)
  local key = PREFIX .. 'job:' .. id
  local is_readable, tenant, _, _, _, _, _, _, _, _, _, _, _, _, of_key, key_weight, place, size, work =
    read_packed(checked_facts, hash_fields(key, 'facts')[1])
  redis.call('ZREM', WAITING, id)
  if is_readable and leave_queue(id, tenant, place, size, work, of_key) then
    redis.call('DEL', key, keys_of(tenant))
    return
  end
  redis.call('DEL', key)
  if is_readable and place ~= id then give_turn_back(tenant, place, work, of_key, key_weight) end
end
