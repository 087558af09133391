-- The waiting jobs, and the turns that jobs of a tenant's API keys have among each other.
local jobs, turns = {}, {}

-- Fields about a tenant's API keys, in a hash that is removed with the tenant's queue:
--   jobs:KEY, bytes:KEY    newcomers of a key whose plan bounds or weighs them
--   turn:PRIORITY          the highest turn of the jobs that were claimed
--   finish:PRIORITY:KEY    the end of a key's last turn
-- From the first job of a key with a weight on, until the queue is empty, every job that comes has a turn. Turns are
-- the start tags of Goyal et al., Start-Time Fair Queueing, 1996: a key's next turn begins with the job that is being
-- claimed, or at the end of the key's last turn if that is later, and ends as much later as the job has work for the
-- key's weight. Calls without a key, and with keys that have no weight, have turns in common, as one key of weight 1.
-- Each priority has turns of its own.

-- Return the name of the hash.
function turns.hash_of(call, tenant) return call.prefix .. 'queue:' .. tenant .. '/keys' end

-- Count a key's newcomers.
function turns.count(call, tenant, key, count, bytes)
  local name, jobs_field, bytes_field = turns.hash_of(call, tenant), 'jobs:' .. key, 'bytes:' .. key
  local known = redis.call('HMGET', name, jobs_field, bytes_field)
  count = number_of(known[1]) + count
  if count > 0 then
    redis.call('HSET', name, jobs_field, count, bytes_field, math.max(0, number_of(known[2]) + bytes))
  else
    redis.call('HDEL', name, jobs_field, bytes_field)
  end
end

-- Return the fields of a priority, given as the beginning of a place, and of the key, '' for all those without a
-- weight.
function turns.fields(place, key, key_weight)
  local priority = string.sub(place, 1, TURN_BYTE - 1)
  return 'turn:' .. priority, 'finish:' .. priority .. ':' .. (key_weight > 0 and key or '')
end

-- Return how long a turn lasts.
function turns.length(work, key_weight) return work / (key_weight > 0 and key_weight or 1) end

-- Return the turn that a place of a newcomer has; nil for one that has a deadline instead.
function turns.of(place)
  if string.sub(place, TURN_BYTE, TURN_BYTE) == ':' then
    return number_of(string.sub(place, TURN_BYTE + 1, ARRIVAL_BYTE - 1))
  end
end

-- Note that a job is claimed: no later job has an earlier turn.
function turns.note_claim(call, tenant, place)
  local turn = turns.of(place)
  if not turn then return end
  local name, field = turns.hash_of(call, tenant), turns.fields(place, '', 0)
  if turn > number_of(redis.call('HGET', name, field)) then redis.call('HSET', name, field, turn) end
end

-- Give the turn of a job that leaves without a claim back to its key: the next one begins earlier.
function turns.give_back(call, tenant, place, work, key, key_weight)
  if not turns.of(place) then return end
  local name, _, field = turns.hash_of(call, tenant), turns.fields(place, key, key_weight)
  local finish = redis.call('HGET', name, field)
  if not finish then return end
  redis.call('HSET', name, field, math.max(0, number_of(finish) - turns.length(work, key_weight)))
end

-- A job's facts are what a claim needs to know of it: those that its router has packed (broker/terms.py), and
-- after them place, size, work, queued and deadline. The order is a format: in a rolling upgrade one version reads what
-- another has written. They are unpacked into locals, because a table for each job costs a scan a fifth of its time.

-- Return facts as they are. Raises an error on those that enqueue.lua cannot have packed.
function jobs.checked(_, tenant, base, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, rank, rows, load,
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

-- Record an arrival; returns its number. `news` has the ids of the last ones: a worker that has looked at all others,
-- and found none that suits it, looks at these alone. It is cut to NEWS_LIMIT when it has twice as many.
function jobs.record_arrival(call, id)
  local arrival = increment(call.keys.arrivals)
  redis.call('RPUSH', call.keys.news, id)
  if arrival % NEWS_LIMIT == 0 then redis.call('LTRIM', call.keys.news, -NEWS_LIMIT, -1) end
  return arrival
end

-- Take a job out of its tenant's queue, or out of the jobs that have begun, where its place is its id. Returns whether
-- the tenant became idle, whose key of `turns.hash_of` is to be deleted then; its `counter` may be known, and that it
-- `has_more` jobs.
function jobs.leave_queue(call, id, tenant, place, size, work, key, counter, has_more)
  tenants.count_waiting(call, tenant, -size, -work, place == id)
  if place == id then
    redis.call('ZREM', call.keys.again, place)
    return false
  end
  if key ~= '' then turns.count(call, tenant, key, -1, -size) end
  local queue = call.prefix .. 'queue:' .. tenant
  if redis.call('ZREM', queue, place) ~= 1 or has_more or redis.call('EXISTS', queue) == 1 then return false end
  tenants.deactivate(call, tenant, counter)
  return true
end

-- Delete a waiting job, or the mark of one that was displaced.
function jobs.forget(call, id)
  local key = call.prefix .. 'job:' .. id
  local is_readable, tenant, _, _, _, _, _, _, _, _, _, _, _, _, of_key, key_weight, place, size, work =
    read_packed(jobs.checked, redis.call('HGET', key, 'facts'))
  redis.call('ZREM', call.keys.waiting, id)
  if is_readable and jobs.leave_queue(call, id, tenant, place, size, work, of_key) then
    redis.call('DEL', key, turns.hash_of(call, tenant))
    return
  end
  redis.call('DEL', key)
  if is_readable and place ~= id then turns.give_back(call, tenant, place, work, of_key, key_weight) end
end

-- Forget a job, up to an attempt: it waits no more, and its charges need no record.
register('finish', function(_, arguments)
  local call, id, last_attempt = new_call(arguments), arguments[2], tonumber(arguments[3])
  local key = call.prefix .. 'job:' .. id
  local waiting_attempt = redis.call('HGET', key, 'attempt')
  if not waiting_attempt then -- claimed; or displaced, which has left a mark; or the key was lost
    redis.call('DEL', key)
    redis.call('ZREM', call.keys.waiting, id)
  elseif number_of(waiting_attempt) <= last_attempt then
    jobs.forget(call, id)
    tenants.flush(call)
  end
  charges.forget(call, id, last_attempt)
end)

-- Replace the body and the adapter request of a waiting attempt, unless it was claimed or replaced meanwhile.
register('renew_job', function(keys, arguments)
  if redis.call('HGET', keys[1], 'attempt') == arguments[1] then
    redis.call('HSET', keys[1], 'body', arguments[2], 'wanted', arguments[3])
  end
end)
