"""The claim: which waiting jobs a worker gets, in one atomic script. `broker.policy` decides the same in Python.

Re-dispatched jobs first. Then always the tenant with the lowest counter, which what it gets raises: of its jobs the
next by priority, deadline, arrival. What doesn't fit is passed over, within windows: the work is O(window + rows).
"""

from __future__ import annotations

from broker import terms

# ARGV: prefix, worker, base digest, free rows, all rows, free tokens, most tokens, largest rank, tenants to skip,
# and the adapters on its device. Answers {waiting, bodies, wanted, hold_ms, tenants to skip next time}.
CLAIM = f"""
local worker, base = ARGV[2], ARGV[3]
local rows, rows_limit, free = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local most_tokens, most_rank, skip = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local resident = {{}}
for i = 10, #ARGV do resident[ARGV[i]] = true end
local bodies, work, hold_ms, saturated, first = {{}}, 0, 0, false, skip == 0
local passes, ahead, rooms = {terms.PASS_WINDOW}, {terms.AHEAD_WINDOW}, {{}}
local wanted, counts, order = {{}}, {{}}, {{}}

-- How long it still waits for a worker that its adapter prefers and that has room.
local function held_for_ms(job)
  if job.adapter == '' or tonumber(job.attempt) > 1 or resident[job.adapter] then return 0 end
  local left = job.queued + {terms.HOLD_MS} - now
  if left <= 0 then return 0 end
  for other in string.gmatch(job.prefer, '[^\\n]+') do
    if other == worker then return 0 end
    rooms[other] = rooms[other] or room_of(other)
    if rooms[other] > 0 then return left end
  end
  return 0
end

local function want(adapter)
  if adapter == '' then return end
  if not counts[adapter] then
    wanted[#wanted + 1] = adapter
    counts[adapter], order[adapter] = 0, #wanted
  end
  counts[adapter] = counts[adapter] + 1
end

-- What it costs the tenant. A job that was claimed before has been charged.
local function charge_claim(id, job)
  local key, cost = P .. 'charged:' .. id, 0
  if job.attempt == '1' then
    if redis.call('EXISTS', key) == 1 then return end
    cost = {terms.PROMPT_WEIGHT} * tonumber(job.prompt) / tonumber(job.weight)
    local load = resident[job.adapter] and 0 or tonumber(job.load) / tonumber(job.weight)
    charge(job.tenant, cost + load)
  end
  redis.call('HSET', key, 'tenant', job.tenant, 'weight', job.weight, 'attempt', job.attempt, 'tokens', 0,
    'prompt', exact(cost))
  redis.call('PEXPIRE', key, {terms.CHARGED_MS})
end

-- True: the job left the queue; false: it was passed over; nil: nothing is known of it.
local function look(id)
  local key = P .. 'job:' .. id
  local values = redis.call('HMGET', key, 'facts', 'reserved', 'reserved_until')
  if not values[1] then
    forget(id)
    return nil
  end
  local job, reserved = cmsgpack.unpack(values[1]), values[2]
  if job.deadline > 0 and job.deadline <= now then
    forget(id)
    return true
  end
  if tonumber(job.tokens) > most_tokens or tonumber(job.rank) > most_rank or job.base ~= base then return false end
  if reserved and reserved ~= worker and tonumber(values[3]) > now then return false end
  local held = held_for_ms(job)
  if held > 0 then
    if hold_ms == 0 or held < hold_ms then hold_ms = held end
    return false
  end
  local need = math.min(tonumber(job.rows), rows_limit)
  local overdue = (first or reserved == worker) and now - job.queued >= {terms.PATIENCE_MS}
  first = false
  if need <= rows and (tonumber(job.prefill) <= free or overdue) then
    rows, free, work = rows - need, free - tonumber(job.prefill), work + job.work
    bodies[#bodies + 1] = redis.call('HGET', key, 'body')
    -- Before it is forgotten: a tenant without waiting jobs keeps what it was charged.
    charge_claim(id, job)
    forget(id)
    return true
  end
  saturated = true
  want(redis.call('HGET', key, 'wanted'))
  if overdue and rows > 0 then
    redis.call('HSET', key, 'reserved', worker, 'reserved_until', now + {terms.RESERVE_MS})
    rows = 0
  end
  return false
end

-- Without a free row it looks a little further, at what could be fetched beforehand.
local function may_look()
  if rows > 0 then return passes > 0 end
  ahead = ahead - 1
  return ahead >= 0
end

local late = redis.call('ZRANGEBYSCORE', WAITING, '-inf', now, 'LIMIT', 0, {terms.SWEEP_LIMIT})
for _, id in ipairs(late) do forget(id) end
for _, id in ipairs(redis.call('ZRANGE', AGAIN, 0, {terms.AGAIN_WINDOW - 1})) do
  if not may_look() then break end
  if look(id) == nil then redis.call('ZREM', AGAIN, id) end
end

-- The tenants with the lowest counters. Once all of these are beyond the next one, the next claim goes on.
local near, walked = {{}}, 0
local found = redis.call('ZRANGE', TENANTS, skip, skip + {terms.TENANTS_WINDOW - 1}, 'WITHSCORES')
for i = 1, #found, 2 do near[#near + 1] = {{name = found[i], counter = tonumber(found[i + 1]), passed = 0}} end
local beyond = #near == {terms.TENANTS_WINDOW} and near[#near].counter or math.huge
while true do
  local tenant
  for _, one in ipairs(near) do
    if one.passed and (not tenant or one.counter < tenant.counter) then tenant = one end
  end
  if not tenant or tenant.counter > beyond or not may_look() then break end
  local queue = P .. 'queue:' .. tenant.name
  tenant.left = tenant.left or redis.call('ZCARD', queue)
  local place = redis.call('ZRANGE', queue, tenant.passed, tenant.passed)[1]
  local taken = place and look(string.sub(place, 36))
  if taken == false then
    tenant.passed = tenant.passed + 1
    passes = passes - 1
  else
    -- Nothing is known of a job whose keys somebody has deleted.
    if taken == nil and place then redis.call('ZREM', queue, place) end
    if taken == nil and redis.call('EXISTS', queue) == 0 then leave(tenant.name) end
    tenant.left = tenant.left - 1
    tenant.counter = tonumber(redis.call('ZSCORE', TENANTS, tenant.name) or 0)
  end
  if tenant.passed >= {terms.TENANT_WINDOW} or tenant.passed >= tenant.left then
    tenant.passed = nil
    walked = walked + 1
  end
end

local waiting = redis.call('ZCARD', WAITING)
if rows < 1 then saturated = true end
if waiting == 0 or not saturated then
  redis.call('DEL', PACE)
else
  local pace = redis.call('HMGET', PACE, 'since', 'work')
  work = tonumber(pace[2] or 0) + work
  if not pace[1] then
    redis.call('HSET', PACE, 'since', now, 'work', 0)
  elseif now - tonumber(pace[1]) >= {terms.PACE_MS} then
    redis.call('HSET', PACE, 'since', now, 'work', 0, 'pace', exact(work / (now - tonumber(pace[1]))))
  else
    redis.call('HSET', PACE, 'work', work)
  end
end
if waiting == 0 then
  redis.call('DEL', WAKE)
elseif #bodies > 0 and redis.call('EXISTS', WAKE) == 0 then
  redis.call('LPUSH', WAKE, 1)
end
if worker ~= '' then
  redis.call('DEL', WAKE .. ':' .. worker)
  redis.call('SET', P .. 'room:' .. worker, math.max(rows, 0), 'PX', {terms.ROOM_MS})
end
table.sort(wanted, function(a, b)
  if counts[a] ~= counts[b] then return counts[a] > counts[b] end
  return order[a] < order[b]
end)
while #wanted > {terms.WANTED_LIMIT} do table.remove(wanted) end
local more = 0
if #bodies == 0 and rows > 0 and (beyond < math.huge or passes < 1) then more = skip + math.max(walked, 1) end
return {{waiting, bodies, wanted, hold_ms, more}}
"""
