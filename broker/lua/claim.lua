#!lua flags=allow-oom
-- Give a worker the waiting jobs that suit it: jobs that have begun first, then always the next job of the tenant with the
-- lowest counter, which what it gets raises. A job that does not fit is passed over, within limits for each scan. A
-- worker that has lately looked at all it may without finding a job looks at newer arrivals alone.
-- Answers {jobs that still wait, bodies, adapter requests, hold_ms, tenants to skip in the next scan, 1 for no reason
-- to scan again, routers of jobs that suit the worker but for its missing link, jobs looked at, 1 for a job that more
-- free capacity suits; of a scan that found no job: arrivals that need no second look, live workers; and 1 where the last
-- of the jobs must begin apart from other tenants' jobs, because its tenant and adapter are suspect}. The same in Python,
-- decision for decision: bench.queue_model.ClaimScan.
--- @include "charges"
--- @include "quarantine"
--- @include "waiting_jobs"
--- @include "workers"
--- @include "routers"
--- @include "adapter_demand"
--- @include "arrivals"
--- @include "claim_rate"

local worker, base_digest = ARGV[2], ARGV[3]
local free_rows, all_rows, free_tokens = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local max_tokens, max_rank = tonumber(ARGV[7]), tonumber(ARGV[8])
local scan_number, skipped_tenants = tonumber(ARGV[9]), tonumber(ARGV[10])
-- Routers that the worker has a link to, one a line; '*': all.
local linked
if ARGV[11] ~= '*' then
  linked = {}
  for router in string.gmatch(ARGV[11], '[^\n]+') do linked[router] = true end
end
-- The number of the last arrival that needs no second look; whether to look at later ones alone, or, where nothing else
-- is found, in this scan or in a later one; and whether the worker has waited for a wake-up.
local seen, news, was_woken = tonumber(ARGV[12]), ARGV[13], ARGV[14] == '1'
local NEWS_ONLY, NEWS_LATER = 'only', 'later'
-- Usage is charged before the claim: it counts for whose turn it is.
local reports_end = 15 + charge_reports(16, tonumber(ARGV[15]))
-- The tenant whose row this worker would take for a tenant below its share, empty for none; the rows, over its weight,
-- that it then still has; and the rows that each tenant has here.
local row_of, rows_left, tenants_here = ARGV[reports_end + 1], tonumber(ARGV[reports_end + 2]), tonumber(ARGV[reports_end + 3])
local tenants_end = reports_end + 3 + 2 * tenants_here
-- The tenant of all jobs that the worker has; empty without any, or where they are of several.
local only_tenant = ARGV[tenants_end + 1]
-- Then the scan looks at more tenants, and at fewer jobs of each.
local looks_around = row_of ~= '' and free_rows < 1
local rows_here, resident = {}, {}
for i = reports_end + 4, tenants_end, 2 do rows_here[ARGV[i]] = tonumber(ARGV[i + 1]) end
for i = tenants_end + 2, #ARGV do resident[ARGV[i]] = true end

local TAKEN, PASSED, GONE, LOST = 1, 2, 3, 4
local passes_left, lookahead_left = PASSES_PER_SCAN, LOOKAHEAD_LIMIT
local bodies, claimed_work, looks = {}, 0, 0
-- Time until the first held job is free for all, and the arrival before the oldest held one.
local hold_ms, seen_before_held = 0, math.huge
local saturated, window_exceeded, was_full = false, false, free_rows < 1
local is_young_passed, is_last_apart = false, false
-- Only the job that is first in line may reserve a worker.
local is_first = skipped_tenants == 0
local gone_ids, gone_keys, is_gone = {}, {}, {}
local any_quarantined = redis.call('EXISTS', QUARANTINE) == 1

local free_rows_by_worker, router_alive = {}, {}
local unlinked, is_unlinked = {}, {}
local function has_free_rows(other)
  free_rows_by_worker[other] = free_rows_by_worker[other] or free_rows_of(other)
  return free_rows_by_worker[other] > 0
end
local function owner_lives(router)
  if router_alive[router] == nil then router_alive[router] = is_router_alive(router) end
  return router_alive[router]
end

-- Return whether the worker has a link to a router; one without is in the answer, so that the worker opens it.
local function has_link(router)
  if not linked or linked[router] then return true end
  if not is_unlinked[router] then unlinked[#unlinked + 1] = router end
  is_unlinked[router], saturated = true, true
  return false
end

-- Return how many ms a job is still held for a worker with free rows that its adapter prefers to this one.
local function held_for_ms(adapter, has_begun, queued, prefer)
  if adapter == '' or has_begun or resident[adapter] then return 0 end
  local left_ms = queued + HOLD_MS - now
  if left_ms <= 0 then return 0 end
  for other in string.gmatch(prefer, '[^\n]+') do
    if other == worker then return 0 end
    if has_free_rows(other) then return left_ms end
  end
  return 0
end

-- Return whether a job that does not fit may have a row that another tenant's job is using: its tenant has waited a
-- moment, was served less than the other, and has fewer rows here for its weight than the other keeps.
local function may_share_row(name, weight, rows, queued)
  return row_of ~= '' and rows < all_rows and now - queued >= BELOW_SHARE_MS
    and ((rows_here[name] or 0) + 1) / weight <= rows_left and counter_of(name) < counter_of(row_of)
end

-- Returns whether the tenant became idle; its `counter` may be known.
local function take_out(id, ...)
  gone_ids[#gone_ids + 1], gone_keys[#gone_keys + 1], is_gone[id] = id, PREFIX .. 'job:' .. id, true
  return leave_queue(id, ...)
end

-- Take a job, and charge its tenant for the claim; `tenant` is nil outside of a scan of the tenants.
local function take(id, tenant, name, weight, attempt, prompt, load, place, size, work)
  bodies[#bodies + 1] = redis.call('HGET', PREFIX .. 'job:' .. id, 'body')
  claimed_work = claimed_work + work
  local cost = charge_claim(id, name, weight, attempt, prompt, load)
  if tenant then
    tenant.counter = tenant.counter + cost
    local is_idle = take_out(id, name, place, size, work, tenant.counter)
    if cost > 0 and not is_idle then redis.call('ZADD', TENANTS, exact(tenant.counter), name) end
  else
    if cost > 0 then charge_tenant(name, cost) end
    take_out(id, name, place, size, work)
  end
end

-- Return the rows that a job takes which has no strike itself, but is of a suspect pair: those of a worker without jobs of
-- other tenants, while no other job of the pair is tried elsewhere; nil: the job waits.
local function rows_apart(id, tenant, adapter, rows)
  if only_tenant == tenant then return rows end
  if free_rows == all_rows and not is_another_tried(id, tenant, adapter) then return all_rows end
end

-- Take a job, pass it over, or drop one that is of no use any more. `line_place` is its member of a tenant's queue.
local function look(id, tenant, line_place)
  local key = PREFIX .. 'job:' .. id
  local values = redis.call('HMGET', key, 'facts', 'reserved', 'reserved_until')
  if not values[1] then
    redis.call('ZREM', WAITING, id)
    return LOST
  end
  local name, base, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, rank, rows, load,
    place, size, work, queued, deadline = cmsgpack.unpack(values[1])
  if line_place and line_place ~= place then return LOST end
  looks = looks + 1
  -- A job in quarantine is missed by its router, whose next attempt is refused.
  if deadline > 0 and deadline <= now or not owner_lives(router) or any_quarantined
    and quarantined_ms(name, adapter) > 0 and not goes_on_in_quarantine(attempt, prompt, prefill, rows) then
    take_out(id, name, place, size, work)
    return GONE
  end
  is_young_passed = is_young_passed or now - queued < YOUNG_MS
  if tokens > max_tokens or rank > max_rank or base ~= base_digest then return PASSED end
  if not has_link(router) then return PASSED end
  local reserved_for = values[2]
  if reserved_for and reserved_for ~= worker and tonumber(values[3]) > now then
    -- Empty at most one worker at a time for jobs that need a whole one.
    if rows >= ALL_ROWS then is_first = false end
    return PASSED
  end
  local held_ms = held_for_ms(adapter, place == id, queued, prefer)
  if held_ms > 0 then
    if hold_ms == 0 or held_ms < hold_ms then hold_ms = held_ms end
    seen_before_held = math.min(seen_before_held, tonumber(string.sub(place, ARRIVAL_BYTE, PLACE_BYTES - 1)) - 1)
    return PASSED
  end
  local is_apart = any_suspects and is_suspect(name, adapter) and not goes_on_in_quarantine(attempt, prompt, prefill, rows)
  local is_struck = rows >= ALL_ROWS
  rows = math.min(rows, all_rows)
  if is_apart and is_struck and is_another_tried(id, name, adapter) then return PASSED end
  if is_apart and not is_struck then
    -- No worker is emptied for such a job.
    rows = rows_apart(id, name, adapter, rows)
    if not rows or rows > free_rows or prefill > free_tokens then return PASSED end
  end
  local overdue = (is_first or reserved_for == worker) and now - queued >= PATIENCE_MS
  is_first = false
  local fits = rows <= free_rows and (prefill <= free_tokens or overdue)
  if fits or may_share_row(name, weight, rows, queued) then
    -- One job a claim: the worker's next one says who is above its share then.
    if not fits then row_of = '' end
    free_rows, free_tokens = free_rows - rows, free_tokens - prefill
    if is_apart then
      try_suspect(id, name, adapter, attempt)
      free_rows, row_of, is_last_apart = 0, '', true
    end
    if name ~= only_tenant then only_tenant = '' end
    take(id, tenant, name, weight, attempt, prompt, resident[adapter] and 0 or load, place, size, work)
    return TAKEN
  end
  saturated = true
  count_demand(redis.call('HGET', key, 'wanted'))
  if overdue and free_rows > 0 then
    redis.call('HSET', key, 'reserved', worker, 'reserved_until', now + RESERVE_MS)
    free_rows = 0
  end
  return PASSED
end

-- Return whether the scan goes on. Without a free row it looks a little further, at adapters to fetch beforehand.
local function may_look()
  if free_rows > 0 then return passes_left > 0 end
  lookahead_left = lookahead_left - 1
  return lookahead_left >= 0
end

-- Return where this scan goes on in a queue that is longer than its window: the first half of the window is the head of
-- the queue, the second half moves on with every scan.
local function second_half_start(length, window)
  window_exceeded = true
  return window / 2 + scan_number * window / 2 % (length - window / 2)
end

local function look_at_redispatched()
  local length, window = redis.call('ZCARD', REDISPATCHED), looks_around and LOOKAHEAD_LIMIT / 2 or REDISPATCHED_PER_SCAN
  if length == 0 then return end
  local ids
  if length <= window then
    ids = redis.call('ZRANGE', REDISPATCHED, 0, -1)
  else
    ids = redis.call('ZRANGE', REDISPATCHED, 0, window / 2 - 1)
    local start = second_half_start(length, window)
    for _, id in ipairs(redis.call('ZRANGE', REDISPATCHED, start, start + window / 2 - 1)) do ids[#ids + 1] = id end
  end
  for _, id in ipairs(ids) do
    if not may_look() then return end
    if look(id) == LOST then redis.call('ZREM', REDISPATCHED, id) end
  end
end

local function length_of(tenant)
  tenant.length = tenant.length or redis.call('ZCARD', tenant.queue)
  return tenant.length
end

-- Return the place of a tenant's next job; nil at the end of the queue. A few are read at once.
local function next_place(tenant)
  if not tenant.places[tenant.next] then
    tenant.places = redis.call('ZRANGE', tenant.queue, tenant.position, tenant.position + PLACES_AT_ONCE - 1)
    tenant.next = 1
    if #tenant.places < PLACES_AT_ONCE then tenant.length = tenant.position + #tenant.places end
  end
  return tenant.places[tenant.next]
end

-- Note that a tenant's job was passed over.
local function pass_over(tenant)
  tenant.passed, tenant.position = tenant.passed + 1, tenant.position + 1
  if tenant.passed == PASSES_PER_TENANT / 2 and length_of(tenant) > PASSES_PER_TENANT then
    tenant.position, tenant.places = second_half_start(tenant.length, PASSES_PER_TENANT), {}
  end
end

-- Look at a tenant's next job. Returns whether the scan has seen all that it may of this tenant.
local function look_at_tenant(tenant)
  local place = next_place(tenant)
  local result = place and look(string.sub(place, PLACE_BYTES + 1), tenant, place) or LOST
  tenant.next = tenant.next + 1
  if result ~= TAKEN then passes_left = passes_left - 1 end
  if result == PASSED then
    pass_over(tenant)
  else
    if tenant.length then tenant.length = tenant.length - 1 end
    -- A place is left over where a job's own key has been lost, a tenant where its queue has.
    if result == LOST and place then redis.call('ZREM', tenant.queue, place) end
    if result == LOST and redis.call('EXISTS', tenant.queue) == 0 then deactivate_tenant(tenant.name, tenant.counter) end
  end
  local passes = looks_around and LOOKAHEAD_PER_TENANT or PASSES_PER_TENANT
  if not place or tenant.passed >= passes then return true end
  return not tenant.places[tenant.next] and tenant.position >= length_of(tenant)
end

-- Look at tenants from the lowest counter on. Returns how many the next scan is to skip, and whether there may be more
-- beyond what this scan has seen.
local function look_at_tenants()
  local lowest, seen_tenants, head = {}, 0, 1
  local found = redis.call('ZRANGE', TENANTS, skipped_tenants, skipped_tenants + TENANTS_PER_SCAN - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    lowest[#lowest + 1] = {name = found[i], counter = tonumber(found[i + 1]), number = i, passed = 0, position = 0,
      queue = PREFIX .. 'queue:' .. found[i], places = {}, next = 1}
  end
  -- Tenants that the scan does not see may have a lower counter than one that has grown beyond this.
  local horizon = #lowest == TENANTS_PER_SCAN and lowest[#lowest].counter or math.huge
  while lowest[head] and lowest[head].counter <= horizon and may_look() do
    local tenant = lowest[head]
    if look_at_tenant(tenant) then
      head = head + 1
      if tenant.position > 0 then seen_tenants = seen_tenants + 1 end
    else
      -- Move the tenant behind those that have a lower counter now; equals keep their order.
      local at = head
      local behind = lowest[at + 1]
      while behind and (behind.counter < tenant.counter
          or behind.counter == tenant.counter and behind.number < tenant.number) do
        lowest[at], at = behind, at + 1
        behind = lowest[at + 1]
      end
      lowest[at] = tenant
    end
  end
  local more = passes_left < 1 or horizon < math.huge
  return more and skipped_tenants + seen_tenants or 0, more
end

-- Look at the last arrivals, as many as have come since `seen`.
local function look_at_news()
  local arrivals = tonumber(redis.call('GET', ARRIVALS) or 0)
  if arrivals < seen then seen = 0 end -- the counter was lost
  local count = math.min(arrivals - seen, NEWS_LIMIT)
  if count == 0 then return end
  is_first = false
  for _, id in ipairs(redis.call('LRANGE', NEWS, -count, -1)) do
    if free_rows < 1 then return end
    if not is_gone[id] then look(id) end
    is_gone[id] = true -- two attempts of a job may have come
  end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', WAITING, '-inf', now, 'LIMIT', 0, EXPIRED_PER_SCAN)) do
  forget_job(id)
end
local next_skip, more = 0, false
if news ~= NEWS_ONLY then
  look_at_redispatched()
  next_skip, more = look_at_tenants()
end
local is_complete = news == NEWS_ONLY or not (more or window_exceeded)
if (is_complete or news ~= NEWS_LATER) and #bodies == 0 then look_at_news() end
if #gone_ids > 0 then redis.call('ZREM', WAITING, unpack(gone_ids)) end
flush_counts()

local waiting = redis.call('ZCARD', WAITING)
local deleted = gone_keys
if waiting == 0 or not saturated and free_rows > 0 then
  deleted[#deleted + 1] = CLAIM_RATE
else
  measure_claim_rate(claimed_work)
end
if waiting == 0 then deleted[#deleted + 1] = WAKE end
if worker ~= '' then
  deleted[#deleted + 1] = WAKE .. ':' .. worker
  redis.call('SET', PREFIX .. 'room:' .. worker, math.max(free_rows, 0), 'PX', FREE_ROWS_MS)
end
if #deleted > 0 then redis.call('DEL', unpack(deleted)) end

local seen_arrivals, live_workers = 0, 0
if #bodies > 0 then
  if waiting > 0 then wake_a_worker() end
else
  local arrivals = tonumber(redis.call('GET', ARRIVALS) or 0)
  seen_arrivals, live_workers = math.min(arrivals, seen_before_held), redis.call('HLEN', WORKERS)
  local is_woken_in_vain = was_woken and is_young_passed and not was_full and seen_arrivals > seen
  if is_woken_in_vain or #unlinked > 0 then pass_wake_up_on() end
end
local done = is_complete or #bodies > 0 or free_rows < 1
local is_crowded = saturated or free_rows < 1
return {waiting, bodies, most_demanded(), hold_ms, next_skip, done and 1 or 0, unlinked, looks, is_crowded and 1 or 0,
  seen_arrivals, live_workers, is_last_apart and 1 or 0}
