-- What the queue keeps of tenants: totals over their waiting jobs, and their counters of service (see broker/terms.py).
local tenants = {}

-- Interval in ms over which the claim rate is measured, and the time after which a measurement tells nothing: claims had
-- stopped, or Redis's clock was put forward.
local CLAIM_RATE_MS, CLAIM_RATE_MAX_MS = 10000, 60000
-- Tenants that become active in one moment get counters that differ by a part of a token, in their order: the number of
-- them in a token, and their maximum number.
local LIFTS_PER_TOKEN, LIFTS_LIMIT = 1024, 65536

-- Totals are a packed record for each tenant with jobs: bytes and work of its newcomers and of its jobs that have
-- begun, its weight, and whether its newcomers have turns (see jobs.lua). Work is in charged tokens, as though every
-- answer had its full length. A record of the cell is beside them: the bytes of both kinds in all, the counter that the
-- next idle tenant is lifted to, the claim rate, and the work in all. A call adds its changes up and writes them once, with
-- `tenants.flush`. The bytes in all change as the tenants' do, and a tenant without a
-- queue has no newcomers, so that what a lost key has left behind goes with the last of them.
--
-- In the state of a call `totals` are the records that were read, by tenant, `changes` those to them, and `cell` is the
-- cell's record, in the field CELL_FIELD: no tenant's name has a slash.
local CELL_FIELD = '/cell'

-- Return a tenant's record. Raises an error on one that this library cannot have packed.
function tenants.checked(_, bytes, work, begun_bytes, begun_work, weight, turns)
  if bytes >= 0 and work >= 0 and begun_bytes >= 0 and begun_work >= 0 and weight > 0 and turns >= 0
      and bytes + work + begun_bytes + begun_work + weight + turns < math.huge then
    return {bytes = bytes, work = work, begun_bytes = begun_bytes, begun_work = begun_work, weight = weight, turns = turns}
  end
  error('unreadable')
end

-- Return the cell's record. Raises an error on one that this library cannot have packed.
function tenants.checked_cell(_, bytes, begun_bytes, next_lift, rate_since, rate_work, rate, work)
  work = work or 0 -- an older version of this library writes none
  if bytes >= 0 and begun_bytes >= 0 and next_lift >= 0 and rate_since >= 0 and rate_work >= 0 and rate >= 0
      and work >= 0 and bytes + begun_bytes + next_lift + rate_since + rate_work + rate + work < math.huge then
    return {bytes = bytes, begun_bytes = begun_bytes, next_lift = next_lift, rate_since = rate_since,
      rate_work = rate_work, rate = rate, work = work}
  end
  error('unreadable')
end

-- Read the records of tenants, and the cell's.
function tenants.read(call, ...)
  for i, packed in ipairs(redis.call('HMGET', call.keys.totals, CELL_FIELD, ...)) do
    local is_readable, record = false, nil
    if packed then is_readable, record = read_packed(i == 1 and tenants.checked_cell or tenants.checked, packed) end
    if i == 1 then
      record = is_readable and record
        or {bytes = 0, begun_bytes = 0, next_lift = 0, rate_since = 0, rate_work = 0, rate = 0, work = 0}
      call.cell = call.cell or record
    else
      record = is_readable and record
        or {bytes = 0, work = 0, begun_bytes = 0, begun_work = 0, weight = 1, turns = 0}
      call.totals[select(i - 1, ...)] = record
    end
    record.packed = packed or nil
  end
end

function tenants.change_of(call, tenant)
  local change = call.changes[tenant]
  if not change then
    change = {bytes = 0, work = 0, begun_bytes = 0, begun_work = 0}
    call.changes[tenant] = change
  end
  return change
end

-- Count `bytes` and `work` more; negative numbers count less.
function tenants.count_waiting(call, tenant, bytes, work, has_begun)
  local change = tenants.change_of(call, tenant)
  if has_begun then
    change.begun_bytes, change.begun_work = change.begun_bytes + bytes, change.begun_work + work
  else
    change.bytes, change.work = change.bytes + bytes, change.work + work
  end
end

-- Forget the totals of a tenant's newcomers: its queue is empty, or was lost.
function tenants.clear(call, tenant) tenants.change_of(call, tenant).is_cleared = true end

-- Set a tenant's weight, and whether its newcomers have turns; nil leaves what there is.
function tenants.set_terms(call, tenant, weight, turns)
  local change = tenants.change_of(call, tenant)
  change.weight, change.turns = weight or change.weight, turns or change.turns
end

-- Apply a tenant's changes to its record, and to the cell's.
function tenants.apply(cell, change, record)
  local bytes, begun_bytes, work = record.bytes, record.begun_bytes, record.work + record.begun_work
  record.bytes = change.is_cleared and 0 or math.max(0, bytes + change.bytes)
  record.work = change.is_cleared and 0 or math.max(0, record.work + change.work)
  record.begun_bytes = math.max(0, begun_bytes + change.begun_bytes)
  record.begun_work = math.max(0, record.begun_work + change.begun_work)
  record.weight, record.turns = change.weight or record.weight, change.turns or record.turns
  cell.bytes = math.max(0, cell.bytes + record.bytes - bytes)
  cell.begun_bytes = math.max(0, cell.begun_bytes + record.begun_bytes - begun_bytes)
  cell.work = math.max(0, cell.work + record.work + record.begun_work - work)
end

-- Add a record's field to those that are `written` or `gone`, if it has changed.
function tenants.add_record(written, gone, field, record, is_empty, ...)
  local packed = not is_empty and cmsgpack.pack(...) or nil
  if packed == record.packed then return end
  record.packed = packed
  if packed then
    written[#written + 1], written[#written + 2] = field, packed
  else
    gone[#gone + 1] = field
  end
end

-- Write the changes of a call.
function tenants.flush(call)
  local unread = {}
  for tenant in pairs(call.changes) do
    if not call.totals[tenant] then unread[#unread + 1] = tenant end
  end
  if #unread > 0 then tenants.read(call, unpack(unread)) end
  local cell, written, gone = call.cell, {}, {}
  if not cell then return end
  for tenant, change in pairs(call.changes) do
    local of = call.totals[tenant]
    tenants.apply(cell, change, of)
    local is_empty = of.bytes + of.work + of.begun_bytes + of.begun_work + of.turns == 0 and of.weight == 1
    tenants.add_record(written, gone, tenant, of, is_empty, of.bytes, of.work, of.begun_bytes, of.begun_work, of.weight,
      of.turns)
  end
  call.changes = {}
  cell.next_lift = cell.next_lift < math.huge and math.max(0, cell.next_lift) or 0
  if cell.bytes + cell.begun_bytes == 0 then cell.work = 0 end -- an older version may have lost count
  local is_empty = cell.bytes + cell.begun_bytes + cell.next_lift + cell.rate_since == 0
  tenants.add_record(written, gone, CELL_FIELD, cell, is_empty, cell.bytes, cell.begun_bytes, cell.next_lift,
    cell.rate_since, cell.rate_work, cell.rate, cell.work)
  if #written > 0 then redis.call('HSET', call.keys.totals, unpack(written)) end
  if #gone > 0 then redis.call('HDEL', call.keys.totals, unpack(gone)) end
end

-- Add to a sum of work, of all that has ever arrived or was ever claimed. It begins anew where it was lost.
function tenants.count_work(key, work)
  redis.call('SET', key, number_of(redis.call('GET', key)) + work)
end

-- The claim rate: how much work the cell claims in a ms while more waits than the workers take. Count claimed work. An
-- interval of CLAIM_RATE_MS replaces the one before. A queue that ran empty, or a worker that found no more, ends the
-- measurement. `tenants.flush` comes after it.
function tenants.measure_claim_rate(call, claimed_work, is_ended)
  if not call.cell then tenants.read(call) end
  local cell, now = call.cell, call.now
  local since, work = cell.rate_since, cell.rate_work + claimed_work
  if is_ended then
    cell.rate_since, cell.rate_work, cell.rate = 0, 0, 0
  elseif since == 0 or since > now then -- the clock went back
    cell.rate_since, cell.rate_work = now, 0
  elseif now - since >= CLAIM_RATE_MAX_MS then -- claims had stopped, or the clock was put forward
    cell.rate_since, cell.rate_work, cell.rate = now, 0, 0
  elseif now - since >= CLAIM_RATE_MS then
    cell.rate_since, cell.rate_work, cell.rate = now, 0, work / (now - since)
  else
    cell.rate_work = work
  end
end

-- Return the claim rate, work in ms: that of the last interval, or of the current one if it is higher; 0 where no work
-- waits for a row.
function tenants.claim_rate(call)
  local cell = call.cell
  local since, rate = cell.rate_since, cell.rate
  local age = call.now - since
  if age >= CLAIM_RATE_MAX_MS then return 0 end
  if since > 0 and age >= CLAIM_RATE_MIN_MS then rate = math.max(rate, cell.rate_work / age) end
  return rate
end

-- A tenant with waiting jobs is active and stands in `tenants`, by its counter; `idle` keeps the counters of the others
-- that are above the lowest active one.

-- Return the lowest counter of an active tenant; without one, that of the tenant that was active last.
function tenants.lowest_counter(call)
  local lowest = redis.call('ZRANGE', call.keys.tenants, 0, 0, 'WITHSCORES')
  return number_of(lowest[2] or redis.call('GET', call.keys.floor))
end

-- Return a tenant's counter; the lowest for a tenant without one, or with a lower one.
function tenants.counter_of(call, tenant)
  local counter = redis.call('ZSCORE', call.keys.tenants, tenant)
  if counter then return number_of(counter) end
  local lowest = tenants.lowest_counter(call)
  return math.max(lowest, number_of(redis.call('ZSCORE', call.keys.idle, tenant) or lowest))
end

-- Make a tenant active that was idle; a counter below the lowest is lifted. `tenants.flush` comes after it. Redis
-- orders equal counters by name, so a tenant is lifted just above the lowest and above those that were lifted before
-- it: of tenants that are served alike the one that waits longest is next.
function tenants.activate(call, tenant, weight)
  local keys = call.keys
  local active = redis.call('ZRANGE', keys.tenants, 0, 0, 'WITHSCORES')[2]
  local lowest, idle = number_of(active or redis.call('GET', keys.floor)), redis.call('ZSCORE', keys.idle, tenant)
  if idle then redis.call('ZREM', keys.idle, tenant) end
  local counter = number_of(idle or lowest)
  if counter <= lowest then
    counter = lowest
    if active then
      if not call.cell then tenants.read(call, tenant) end
      counter = call.cell.next_lift
      if counter <= lowest or counter > lowest + LIFTS_LIMIT / LIFTS_PER_TOKEN then
        counter = lowest + 1 / LIFTS_PER_TOKEN
      end
      call.cell.next_lift = counter + 1 / LIFTS_PER_TOKEN
    end
  end
  redis.call('ZADD', keys.tenants, counter, tenant)
  tenants.set_terms(call, tenant, weight)
end

-- Make a tenant idle whose last waiting job has left, or whose queue was lost; `counter` where it is known.
function tenants.deactivate(call, tenant, counter)
  local keys = call.keys
  counter = counter or number_of(redis.call('ZSCORE', keys.tenants, tenant) or tenants.lowest_counter(call))
  redis.call('ZREM', keys.tenants, tenant)
  if not call.cell then tenants.read(call, tenant) end
  redis.call('ZREM', keys.uses, tenant)
  local lowest = redis.call('ZRANGE', keys.tenants, 0, 0, 'WITHSCORES')[2]
  if not lowest then
    redis.call('SET', keys.floor, counter)
    call.cell.next_lift = 0
  elseif counter > number_of(lowest) then
    redis.call('ZADD', keys.idle, counter, tenant)
  end
  tenants.clear(call, tenant)
  tenants.set_terms(call, tenant, 1, 0)
end

-- Add to the counters of tenants, given with the costs in turn; a cost is in charged tokens over the tenant's weight.
function tenants.charge(call, costs)
  if #costs == 0 then return end
  local keys, names, active, counters, lowest = call.keys, {}, {}, {}, nil
  for i = 1, #costs, 2 do
    if not active[costs[i]] then names[#names + 1], active[costs[i]] = costs[i], true end
  end
  for i, counter in ipairs(redis.call('ZMSCORE', keys.tenants, unpack(names))) do
    active[names[i]], counters[names[i]] = counter and true or false, counter and number_of(counter)
  end
  for i = 1, #costs, 2 do
    local name = costs[i]
    if not active[name] then
      lowest = lowest or tenants.lowest_counter(call)
      counters[name] = math.max(lowest, counters[name] or number_of(redis.call('ZSCORE', keys.idle, name) or lowest))
    end
    counters[name] = counters[name] + costs[i + 1]
  end
  local raised = {}
  for _, name in ipairs(names) do
    if active[name] then
      raised[#raised + 1], raised[#raised + 2] = counters[name], name
    elseif counters[name] > lowest then
      redis.call('ZADD', keys.idle, counters[name], name)
    else
      redis.call('ZREM', keys.idle, name)
    end
  end
  if #raised > 0 then redis.call('ZADD', keys.tenants, unpack(raised)) end
end

-- Forget the counters of idle tenants that would be lifted anyway. Subtract the lowest counter from all where one is
-- beyond COUNTERS_LIMIT: one that then still is, of a tenant that was charged by a weight which is allowed no more,
-- becomes the lowest.
function tenants.rebase_counters(call)
  local of_active, of_idle = call.keys.tenants, call.keys.idle
  local lowest, highest = tenants.lowest_counter(call), 0
  for _, key in ipairs({of_active, of_idle}) do
    highest = math.max(highest, tonumber(redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2] or 0))
  end
  if math.max(lowest, highest) > COUNTERS_LIMIT then
    for _, key in ipairs({of_active, of_idle}) do
      local counters = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
      for i = 1, #counters, 2 do
        local lead = number_of(counters[i + 1]) - lowest
        redis.call('ZADD', key, lead > 0 and lead <= COUNTERS_LIMIT and lead or 0, counters[i])
      end
    end
    redis.call('SET', call.keys.floor, 0)
  end
  redis.call('ZREMRANGEBYSCORE', of_idle, '-inf', tenants.lowest_counter(call))
end
