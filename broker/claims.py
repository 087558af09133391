"""The claim: which waiting jobs a worker gets, in one atomic script. `bench.queue_model` decides the same in
Python.

Re-dispatched jobs first. Then always the tenant with the lowest counter, which what it gets raises: of its jobs the
next by priority, deadline, arrival. What doesn't fit is passed over, within windows: a scan's work is O(window + rows).
"""

from __future__ import annotations

from broker import terms
from broker.lua import UNPACK
from broker.usage import CHARGE_REPORTS

# ARGV: prefix, worker, base digest, free rows, all rows, free tokens, most tokens, largest rank, which scan of this
# worker's it is, tenants to skip, how many reports of what its jobs have made, these (see broker.usage), and the
# adapters on its device.
# Answers {waiting, bodies, wanted, hold_ms, tenants to skip next, whether there is no reason for another scan}.
CLAIM = f"""
{CHARGE_REPORTS}
local worker, base = ARGV[2], ARGV[3]
local rows, rows_limit, free = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local most_tokens, most_rank, turn, skip = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
-- They count for whose turn it is.
local reports_end = 11 + charge_reports(12, tonumber(ARGV[11]))
local resident = {{}}
for i = reports_end + 1, #ARGV do resident[ARGV[i]] = true end
local bodies, work, hold_ms, saturated, first, deeper = {{}}, 0, 0, false, skip == 0, false
local passes, ahead, rooms, routers = {terms.PASS_WINDOW}, {terms.AHEAD_WINDOW}, {{}}, {{}}
local wanted, counts, order = {{}}, {{}}, {{}}
local gone, gone_keys = {{}}, {{}}

-- How long it still waits for a worker that its adapter prefers and that has room.
local function held_for_ms(adapter, attempt, queued, prefer)
  if adapter == '' or attempt > 1 or resident[adapter] then return 0 end
  local left = queued + {terms.HOLD_MS} - now
  if left <= 0 then return 0 end
  for other in string.gmatch(prefer, '[^\\n]+') do
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

-- What the tenant whose turn it is pays for a job. One that was claimed before has been charged.
local function charge_claim(id, tenant, weight, attempt, prompt, load)
  local key, again = P .. 'charged:' .. id, attempt > 1
  local cost = again and 0 or {terms.PROMPT_WEIGHT} * prompt / weight
  local charged = cmsgpack.pack(tenant.name, weight, attempt, 0, cost)
  if again then
    redis.call('SET', key, charged, 'PX', {terms.CHARGED_MS})
  elseif redis.call('SET', key, charged, 'PX', {terms.CHARGED_MS}, 'NX') then
    tenant.counter = tenant.counter + (cost + load / weight)
    redis.call('ZADD', TENANTS, exact(tenant.counter), tenant.name)
  end
end

local function lives(router)
  if routers[router] == nil then routers[router] = router_lives(router) end
  return routers[router]
end

local function drop(id, key, ...)
  gone[#gone + 1], gone_keys[#gone_keys + 1] = id, key
  unqueue(...)
end

-- Looks at the next job of a tenant, or at one that was dispatched again. True: it left the queue for this worker;
-- false: it was passed over; nil: it is gone, or nothing is known of it.
local function look(id, tenant)
  local key = P .. 'job:' .. id
  local values = redis.call('HMGET', key, 'facts', 'reserved', 'reserved_until')
  if not values[1] then
    redis.call('ZREM', WAITING, id)
    return nil
  end
  {UNPACK}(values[1])
  if job_deadline > 0 and job_deadline <= now or not lives(job_router) then
    drop(id, key, job_tenant, job_place, job_size, job_attempt, job_work)
    return nil
  end
  if job_tokens > most_tokens or job_rank > most_rank or job_base ~= base then return false end
  local reserved = values[2]
  if reserved and reserved ~= worker and tonumber(values[3]) > now then return false end
  local held = held_for_ms(job_adapter, job_attempt, job_queued, job_prefer)
  if held > 0 then
    if hold_ms == 0 or held < hold_ms then hold_ms = held end
    return false
  end
  local need = math.min(job_rows, rows_limit)
  local overdue = (first or reserved == worker) and now - job_queued >= {terms.PATIENCE_MS}
  first = false
  if need <= rows and (job_prefill <= free or overdue) then
    rows, free, work = rows - need, free - job_prefill, work + job_work
    bodies[#bodies + 1] = redis.call('HGET', key, 'body')
    -- Before it is gone: a tenant without waiting jobs keeps what it was charged.
    charge_claim(id, tenant or {{name = job_tenant}}, job_weight, job_attempt, job_prompt,
      resident[job_adapter] and 0 or job_load)
    drop(id, key, job_tenant, job_place, job_size, job_attempt, job_work)
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

-- Where this scan goes on in a queue of which it has seen the first half of the window.
local function turn_to(length, window)
  deeper = true
  return window / 2 + turn * window / 2 % (length - window / 2)
end

local late = redis.call('ZRANGEBYSCORE', WAITING, '-inf', now, 'LIMIT', 0, {terms.SWEEP_LIMIT})
for _, id in ipairs(late) do forget(id) end
local length, half = redis.call('ZCARD', AGAIN), {terms.AGAIN_WINDOW} / 2
local again = redis.call('ZRANGE', AGAIN, 0, length > 2 * half and half - 1 or 2 * half - 1)
if length > 2 * half then
  local place = turn_to(length, 2 * half)
  for _, id in ipairs(redis.call('ZRANGE', AGAIN, place, place + half - 1)) do again[#again + 1] = id end
end
for _, id in ipairs(again) do
  if not may_look() then break end
  if look(id) == nil then redis.call('ZREM', AGAIN, id) end
end

-- The tenants with the lowest counters, in order. Once all of these are beyond the next one, the next scan goes on.
local near, walked, at = {{}}, 0, 1
local found = redis.call('ZRANGE', TENANTS, skip, skip + {terms.TENANTS_WINDOW - 1}, 'WITHSCORES')
for i = 1, #found, 2 do
  near[#near + 1] = {{name = found[i], counter = tonumber(found[i + 1]), number = i, passed = 0, place = 0}}
end
local beyond = #near == {terms.TENANTS_WINDOW} and near[#near].counter or math.huge
local function before(one, other)
  return one.counter < other.counter or one.counter == other.counter and one.number < other.number
end
while near[at] and near[at].counter <= beyond and may_look() do
  local tenant = near[at]
  local queue = P .. 'queue:' .. tenant.name
  tenant.left = tenant.left or redis.call('ZCARD', queue)
  local place = redis.call('ZRANGE', queue, tenant.place, tenant.place)[1]
  local taken = place and look(string.sub(place, 36), tenant)
  if not taken then passes = passes - 1 end
  if taken == false then
    tenant.passed, tenant.place = tenant.passed + 1, tenant.place + 1
    if tenant.passed == {terms.TENANT_WINDOW} / 2 and tenant.left > {terms.TENANT_WINDOW} then
      tenant.place = turn_to(tenant.left, {terms.TENANT_WINDOW})
    end
  else
    -- Nothing is known of a job whose keys somebody has deleted.
    local lost = not place or not taken and redis.call('ZREM', queue, place) == 1
    if lost and redis.call('EXISTS', queue) == 0 then leave(tenant.name) end
    tenant.left = tenant.left - 1
  end
  if not place or tenant.passed >= {terms.TENANT_WINDOW} or tenant.place >= tenant.left then
    at = at + 1
    if tenant.left > 0 then walked = walked + 1 end
  else
    -- It goes behind those that have less now; of equals the earlier one stays before the other.
    local to = at
    while near[to + 1] and before(near[to + 1], tenant) do
      near[to] = near[to + 1]
      to = to + 1
    end
    near[to] = tenant
  end
end
if #gone > 0 then
  redis.call('ZREM', WAITING, unpack(gone))
  redis.call('DEL', unpack(gone_keys))
end
settle()

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
local more = passes < 1 or beyond < math.huge
local done = #bodies > 0 or rows < 1 or not (more or deeper)
return {{waiting, bodies, wanted, hold_ms, more and skip + walked or 0, done and 1 or 0}}
"""
