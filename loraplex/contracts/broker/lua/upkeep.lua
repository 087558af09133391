-- Repair of a queue that has lost some of its keys, evicted by a server with the wrong policy or deleted; and what
-- routers keep and remove: dead letters, operators' commands, pins, resume keys, a tenant's data.
local upkeep = {}

-- Number of waiting jobs that a census looks for, and of tenants whose queue's type it checks, both drawn by chance.
local LOST_IDS_PER_CENSUS, QUEUES_PER_CENSUS = 4, 64

-- Forget how many jobs of each of a tenant's keys wait: its queue was lost.
function upkeep.forget_counts_of_keys(call, tenant)
  local key = turns.hash_of(call, tenant)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.match(field, '^jobs:') or string.match(field, '^bytes:') then redis.call('HDEL', key, field) end
  end
end

-- Put a waiting job that has its own key back where other keys have lost it. Returns whether it was missing; nil for
-- one that cannot be read, which is forgotten.
function upkeep.restore_job(call, id, facts)
  local is_readable, tenant, _, _, _, _, _, weight, _, _, _, _, _, _, key, _, place, size, work, _, deadline =
    read_packed(jobs.checked, facts)
  if not is_readable then return jobs.forget(call, id) end
  redis.call('ZADD', call.keys.waiting, 'NX', deadline > 0 and deadline or '+inf', id)
  if place == id then
    if redis.call('ZSCORE', call.keys.again, id) then return false end
    redis.call('ZADD', call.keys.again, jobs.record_arrival(call, id), id)
    tenants.count_waiting(call, tenant, size, work, true)
    return true
  end
  local queue = call.prefix .. 'queue:' .. tenant
  local is_new = redis.call('ZADD', queue, 'NX', 0, place) == 1
  if is_new then
    if redis.call('ZCARD', queue) == 1 then
      tenants.clear(call, tenant)
      tenants.flush(call)
      upkeep.forget_counts_of_keys(call, tenant)
    end
    tenants.count_waiting(call, tenant, size, work, false)
    if key ~= '' then turns.count(call, tenant, key, 1, size) end
    if turns.of(place) then tenants.set_terms(call, tenant, nil, 1) end
    jobs.record_arrival(call, id)
  end
  if not redis.call('ZSCORE', call.keys.tenants, tenant) then tenants.activate(call, tenant, weight) end
  return is_new
end

-- Drop what lost keys have left behind and nobody would find: totals of jobs that have begun, and ids of waiting jobs,
-- some of them found by chance. A router dispatches a lost job again, and forgets it in the end; a dead one does not.
function upkeep.drop_remains(call)
  if redis.call('EXISTS', call.keys.again) == 0 then
    tenants.read(call)
    for _, tenant in ipairs(call.cell.begun_bytes > 0 and redis.call('HKEYS', call.keys.totals) or {}) do
      if tenant ~= CELL_FIELD then
        tenants.read(call, tenant)
        local of = call.totals[tenant]
        tenants.count_waiting(call, tenant, -of.begun_bytes, -of.begun_work, true)
        tenants.flush(call) -- one command has no room for thousands of tenants
      end
    end
    call.cell.begun_bytes = 0
    tenants.flush(call)
  end
  for _, id in ipairs(redis.call('ZRANDMEMBER', call.keys.waiting, LOST_IDS_PER_CENSUS)) do
    if redis.call('EXISTS', call.prefix .. 'job:' .. id) == 0 then redis.call('ZREM', call.keys.waiting, id) end
  end
end

-- Return which of the incarnations at every second place have no key, from `first` to `last`, in `dead`. Those that all
-- live are asked for at once: a command takes as long as a hundred keys.
function upkeep.find_dead(call, found, first, last, dead)
  local keys = {}
  for i = first, last, 2 do keys[#keys + 1] = call.prefix .. 'worker:' .. found[i] end
  if redis.call('EXISTS', unpack(keys)) == #keys then return end
  if #keys == 1 then dead[found[first]] = true return end
  local middle = first + 2 * math.floor(#keys / 2)
  upkeep.find_dead(call, found, first, middle - 2, dead)
  upkeep.find_dead(call, found, middle, last, dead)
end

-- Return a line of each live incarnation: with its row, if it has any. Those whose key has expired are taken off.
function upkeep.read_workers(call)
  local rows, living, lapsed, dead = {}, {}, {}, {}
  local found = redis.call('HGETALL', call.keys.workers)
  for first = 1, #found, 200 do upkeep.find_dead(call, found, first, math.min(first + 198, #found - 1), dead) end
  for i = 1, #found, 2 do
    local incarnation = found[i]
    local worker, row = string.match(found[i + 1], '^([^\n]*)\n?(.*)')
    if dead[incarnation] then
      redis.call('HDEL', call.keys.workers, incarnation)
      redis.call('HDEL', call.keys.cards, incarnation)
      lapsed[#lapsed + 1] = worker
    else
      rows[#rows + 1] = incarnation .. ' ' .. row
      living[worker] = true
    end
  end
  for _, worker in ipairs(lapsed) do
    if not living[worker] then workers.clear_free_rows(call, worker) end
  end
  return rows
end

-- Return {waiting jobs, their work, the work that the cell claims in a second, 0 where nothing tells, tenants with a
-- queue, the number of the last arrival}, from which a router chooses a cell.
function upkeep.load(call)
  local keys = call.keys
  tenants.read(call)
  return {redis.call('ZCARD', keys.waiting), string.format('%.17g', call.cell.work),
    string.format('%.17g', 1000 * tenants.claim_rate(call)), redis.call('ZCARD', keys.tenants),
    number_of(redis.call('GET', keys.arrivals))}
end

-- Repair what lost keys have left.
function upkeep.repair(call)
  for _, tenant in ipairs(redis.call('ZRANDMEMBER', call.keys.tenants, QUEUES_PER_CENSUS)) do
    redis.call('ZADD', call.keys.uses, 'NX', '+inf', tenant) -- one that was lost: too high, it is corrected
  end
  tenants.rebase_counters(call)
  upkeep.drop_remains(call)
  charges.drop_old(call)
  workers.drop_old_rooms(call)
end

-- Write a roll and return it: a line with its time and the number of workers, one with the server's run and the name of
-- its data, and one of each live worker: its incarnation and row.
function upkeep.make_roll(call, key, new_data_name)
  redis.call('SET', call.keys.born, new_data_name, 'NX')
  local run, rows = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)'), upkeep.read_workers(call)
  table.insert(rows, 1, string.format('%.0f %d\n%s %s', call.now, #rows, run, redis.call('GET', call.keys.born)))
  local roll = table.concat(rows, '\n')
  redis.call('SET', key, roll, 'PX', WORKER_TTL_MS)
  return roll
end

-- Answers {roll, adapters with several homes and how many, the cell's load}. A router that asks is recorded as alive. The
-- roll is made once in ROLL_MS for all routers, and anew where their number has changed.
register('census', function(_, arguments)
  local call, router, new_data_name, busy = new_call(arguments), arguments[2], arguments[3], arguments[4]
  local key = call.prefix .. 'roll:' .. LIBRARY
  local head, known = redis.call('GETRANGE', key, 0, 31), redis.call('HLEN', call.keys.workers)
  local made_ms, count = string.match(head, '^(%d+) (%d+)\n')
  local age_ms = call.now - number_of(made_ms)
  local is_due = tonumber(count) ~= known or age_ms < 0 or age_ms >= ROLL_MS
  if is_due then upkeep.repair(call) end
  if router ~= '' then routers.beat(call, router) end
  local roll = is_due and upkeep.make_roll(call, key, new_data_name) or redis.call('GET', key)
  return {roll, demand.homes(call, is_due and busy or ''), upkeep.load(call)}
end)

-- Answers for each job, given by id and attempt, 1 if that attempt or a newer one waits, 2 if it was displaced, else 0.
-- A part of the jobs, by the number of this look, is put back where lost keys have taken it out of its queue.
register('look_up', function(_, arguments)
  local call, look_number = new_call(arguments), tonumber(arguments[2])
  local answers, is_restored = {}, false
  for i = 3, #arguments, 2 do
    local key, values = call.prefix .. 'job:' .. arguments[i], nil
    if (#answers + look_number) % LOOKS_PER_CHECK == 0 then
      values = redis.call('HMGET', key, 'attempt', 'displaced', 'facts')
      if values[3] then
        local was_missing = upkeep.restore_job(call, arguments[i], values[3])
        if was_missing == nil then values = {} end
        is_restored = was_missing or is_restored
      end
    else
      values = redis.call('HMGET', key, 'attempt', 'displaced')
    end
    local waits = values[1] and number_of(values[1]) >= tonumber(arguments[i + 1])
    answers[#answers + 1] = waits and 1 or values[2] and 2 or 0
  end
  tenants.flush(call)
  if is_restored then workers.wake_any(call) end
  return answers
end)

-- Return since when a waiting job has waited, in ms; the time of the call for one that cannot be read.
function upkeep.queued_at(call, id)
  local facts = {read_packed(jobs.checked, redis.call('HGET', call.prefix .. 'job:' .. id, 'facts'))}
  return facts[1] and facts[20] or call.now
end

-- Answers {waiting jobs, their work, time in ms for which the oldest has waited of those that are next: the first of
-- each of the first tenants, and the first that has begun; sums of the work that has ever arrived and was ever claimed}.
register('queue_load', function(_, arguments)
  local call = new_call(arguments)
  local keys, since = call.keys, call.now
  tenants.read(call)
  for _, id in ipairs(redis.call('ZRANGE', keys.again, 0, 0)) do since = math.min(since, upkeep.queued_at(call, id)) end
  for _, tenant in ipairs(redis.call('ZRANGE', keys.tenants, 0, TENANTS_PER_ESTIMATE - 1)) do
    local places = redis.call('ZRANGE', call.prefix .. 'queue:' .. tenant, 0, 0)
    if places[1] then since = math.min(since, upkeep.queued_at(call, string.sub(places[1], PLACE_BYTES + 1))) end
  end
  return {redis.call('ZCARD', keys.waiting), string.format('%.17g', call.cell.work), call.now - since,
    string.format('%.17g', number_of(redis.call('GET', keys.arrived_work))),
    string.format('%.17g', number_of(redis.call('GET', keys.claimed_work)))}
end)

-- Remove what a cell has of a tenant: at most `most` newcomers that wait; of `most` jobs that have begun, from rank
-- `first` on, those of the tenant; dead letters, given as they are; and what is kept under its name. Answers how many
-- jobs and records were removed, and the rank from which to look in the next call, -1 for none.
register('forget_tenant', function(_, arguments)
  local call, tenant, first, most = new_call(arguments), arguments[2], tonumber(arguments[3]), tonumber(arguments[4])
  local keys, queue, jobs_gone, records, others = call.keys, call.prefix .. 'queue:' .. tenant, 0, 0, 0
  for _, place in ipairs(redis.call('ZRANGE', queue, 0, most - 1)) do
    jobs.forget(call, string.sub(place, PLACE_BYTES + 1))
    redis.call('ZREM', queue, place) -- one whose key was lost
    jobs_gone = jobs_gone + 1
  end
  local begun = redis.call('ZRANGE', keys.again, first, first + most - 1)
  for _, id in ipairs(begun) do
    local is_readable, of = read_packed(jobs.checked, redis.call('HGET', call.prefix .. 'job:' .. id, 'facts'))
    if is_readable and of == tenant then
      jobs.forget(call, id)
      jobs_gone = jobs_gone + 1
    else
      others = others + 1
    end
  end
  -- An arrival's place in the list is its number: the id goes, and its place stays.
  for at, id in ipairs(redis.call('LRANGE', keys.news, 0, -1)) do
    if string.sub(id, 1, #tenant + 1) == tenant .. '/' then redis.call('LSET', keys.news, at - 1, '') end
  end
  for i = 5, #arguments do records = records + redis.call('LREM', keys.dead, 0, arguments[i]) end

  local is_empty = redis.call('EXISTS', queue) == 0
  if is_empty then
    for _, key in ipairs({keys.tenants, keys.idle, keys.uses}) do records = records + redis.call('ZREM', key, tenant) end
    records = records + redis.call('DEL', turns.hash_of(call, tenant))
    tenants.clear(call, tenant)
    tenants.set_terms(call, tenant, 1, 0)
  end
  records = records + suspects.forget_tenant(call, tenant)
  tenants.flush(call)
  return {jobs_gone, records, (not is_empty or #begun == most) and first + others or -1}
end)

-- Keep a dead letter in a list, the newest first; the oldest are dropped where there are more than `max_records` or
-- they take more than so many bytes. A record that equals the newest, a repeated call, is not kept again.
register('dead_push', function(keys, arguments)
  local record, max_records, bytes_left = arguments[1], tonumber(arguments[2]), tonumber(arguments[3])
  if redis.call('LINDEX', keys[1], 0) == record then return 0 end
  redis.call('LPUSH', keys[1], record)
  for position, letter in ipairs(redis.call('LRANGE', keys[1], 0, max_records)) do
    bytes_left = bytes_left - #letter
    if position > 1 and (position > max_records or bytes_left < 0) then
      redis.call('LTRIM', keys[1], 0, position - 2)
      break
    end
  end
  return 1
end)

-- Add an operator's command to a list for so many ms. Of more than `max_commands` the oldest are dropped.
register('send_command', function(keys, arguments)
  local command, max_commands, ttl_ms = arguments[1], tonumber(arguments[2]), arguments[3]
  if redis.call('RPUSH', keys[1], command) > max_commands then redis.call('LTRIM', keys[1], -max_commands, -1) end
  redis.call('PEXPIRE', keys[1], ttl_ms)
end)

-- Replace a pin, unless it was unpinned meanwhile.
register('renew_pin', function(keys, arguments)
  if redis.call('HEXISTS', keys[1], arguments[1]) == 1 then redis.call('HSET', keys[1], arguments[1], arguments[2]) end
end)

-- Bring a router's resume keys and the stored ones together; answers all stored keys, newest first. The first argument
-- is the key that the router made for itself; the keys that it has used follow, newest first.
register('resume_keys', function(keys, arguments)
  local stored = redis.call('LRANGE', keys[1], 0, -1)
  for i = 2, #arguments do
    for _, key in ipairs(stored) do
      if key == arguments[i] then return stored end
    end
  end
  -- None is known here. Where others are, another router was first after a loss: its key signs from now on, ours are
  -- still accepted.
  if #stored == 0 and #arguments == 1 then redis.call('RPUSH', keys[1], arguments[1]) end
  for i = 2, #arguments do redis.call('RPUSH', keys[1], arguments[i]) end
  redis.call('LTRIM', keys[1], 0, RESUME_KEYS_LIMIT - 1)
  return redis.call('LRANGE', keys[1], 0, -1)
end)

-- Put a new key of resume tokens in front: it signs from each router's next look on, and the others stay valid.
register('rotate_resume_keys', function(keys, arguments)
  redis.call('LPUSH', keys[1], arguments[1])
  redis.call('LTRIM', keys[1], 0, RESUME_KEYS_LIMIT - 1)
  return #redis.call('LRANGE', keys[1], 0, -1)
end)

-- Remove all keys of resume tokens but the one that signs. Answers how many.
register('withdraw_resume_keys', function(keys)
  local stored = #redis.call('LRANGE', keys[1], 0, -1)
  redis.call('LTRIM', keys[1], 0, 0)
  return math.max(0, stored - 1)
end)

-- Note that a cell, the first argument, is drained; its other cells follow. Answers 0 where all of these are drained:
-- then it stays open, so that two calls at once cannot drain them all.
register('drain_cell', function(keys, arguments)
  for i = 2, #arguments do
    if redis.call('HEXISTS', keys[1], arguments[i]) == 0 then
      if redis.call('HEXISTS', keys[1], arguments[1]) == 0 then
        redis.call('HSET', keys[1], arguments[1], read_clock())
      end
      return 1
    end
  end
  return 0
end)

-- Note that a cell is open again.
register('open_cell', function(keys, arguments) return redis.call('HDEL', keys[1], arguments[1]) end)
