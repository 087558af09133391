-- The claim of a worker: jobs that have begun first, then always the next job of the tenant with the lowest counter,
-- which what it gets raises. A job that does not fit is passed over, within limits for each scan. A worker that has
-- lately looked at all it may without finding a job looks at newer arrivals alone.
--
-- The state of a call is a `scan` here, with what the worker has and what it has found.
local claim = {}

local TAKEN, PASSED, GONE, LOST = 1, 2, 3, 4
-- Maximum jobs of one tenant that a scan looks at without a free row where it also looks for a job of a tenant below its
-- share; at most half of them are redispatched jobs then. Maximum places of a tenant's queue that a scan reads at once,
-- jobs past their deadline that it removes, and adapter requests that a claim answers with.
local LOOKAHEAD_PER_TENANT, PLACES_AT_ONCE, EXPIRED_PER_SCAN, ADAPTER_REQUESTS_LIMIT = 4, 8, 64, 4
-- Time in ms for which a worker that failed a job does not get its next attempt: then any worker is better than none.
local BARRED_MS = 3000
-- Time in ms that a reservation lasts; each claim of the reserved worker renews it.
local RESERVE_MS = 3000
-- Time in ms after its arrival for which a job is a reason to pass a wake-up on; later all workers have looked at it.
local YOUNG_MS = 500

-- Return a scan, of the arguments that broker/claims.py sends. It is made at once, because a table that grows costs
-- time.
function claim.new_scan(arguments)
  local call, linked, rows_here = new_call(arguments), nil, {}
  local worker, base_digest, free_rows, all_rows, free_tokens, max_tokens, max_rank = cmsgpack.unpack(arguments[2])
  local number, skipped_tenants, links, seen, news, was_woken = cmsgpack.unpack(arguments[3])
  local row_of, rows_left, only_tenant = cmsgpack.unpack(arguments[5])
  if links ~= '*' then -- else all
    linked = {}
    for router in string.gmatch(links, '[^\n]+') do linked[router] = true end
  end
  for i = 7, #arguments, 2 do rows_here[arguments[i]] = tonumber(arguments[i + 1]) end
  return {prefix = call.prefix, keys = call.keys, now = call.now, totals = call.totals, changes = call.changes,
    worker = worker, base_digest = base_digest, max_tokens = max_tokens, max_rank = max_rank, number = number,
    skipped_tenants = skipped_tenants, was_woken = was_woken,
    -- The rows of the worker, and what is left of its capacity.
    all_rows = all_rows, free_rows = free_rows, free_tokens = free_tokens, was_full = free_rows < 1,
    -- Routers that the worker has a link to; nil: all. The routers of jobs that wait for a link.
    linked = linked, unlinked = {}, is_unlinked = {},
    -- The number of the last arrival that needs no second look; whether to look at later ones alone (only), or, where
    -- nothing else is found, in this scan (now) or in a later one (later).
    seen = seen, news = news,
    -- The tenant whose row this worker would take for a tenant below its share, empty for none, and the rows, over its
    -- weight, that it then still has. A full worker then looks at more tenants, and at fewer jobs of each.
    row_of = row_of, rows_left = rows_left, looks_around = row_of ~= '' and free_rows < 1,
    -- The tenant of all jobs that the worker has, empty without any, or where they are of several; the rows of each.
    only_tenant = only_tenant, rows_here = rows_here,
    -- The last digits of the adapters that the worker has, each between two ends of lines.
    adapters_here = arguments[6],
    -- How the line of a job's workers names this one if the job failed here.
    barred = '!' .. worker .. '\n',
    passes_left = PASSES_PER_SCAN, lookahead_left = LOOKAHEAD_LIMIT, looks = 0, window_exceeded = false,
    -- The claimed jobs, what the queue knows of them, and their work; ids and keys of jobs that leave the queue.
    bodies = {}, facts = {}, claimed_work = 0, is_last_apart = false, gone_ids = {}, gone_keys = {}, is_gone = {},
    -- Time until the first held job is free for all, and the arrival before the oldest held one.
    hold_ms = 0, seen_before_held = math.huge,
    -- Whether a job waits that more capacity suits, and one that came a moment ago.
    saturated = false, is_young_passed = false,
    -- Only the job that is first in line may reserve a worker.
    is_first = skipped_tenants == 0,
    any_quarantined = redis.call('EXISTS', call.keys.quarantine) == 1,
    -- What was read of workers and routers.
    has_rows = {}, router_alive = {},
    -- Adapter requests of jobs that suit the worker but do not fit now, in their order, and how many jobs need each.
    demanded = {}, demand = {}}
end

-- Count a job that needs an adapter, given as the bytes of its request; '' or nothing for none.
function claim.count_demand(scan, request)
  if not request or request == '' then return end
  if not scan.demand[request] then scan.demanded[#scan.demanded + 1] = request end
  scan.demand[request] = (scan.demand[request] or 0) + 1
end

-- Return the requests of which most jobs have need, at most ADAPTER_REQUESTS_LIMIT, so that the worker can fetch them
-- beforehand.
function claim.most_demanded(scan)
  local demanded, demand, first_seen = scan.demanded, scan.demand, {}
  if #demanded < 2 then return demanded end
  for place, request in ipairs(demanded) do first_seen[request] = place end
  table.sort(demanded, function(a, b)
    if demand[a] ~= demand[b] then return demand[a] > demand[b] end
    return first_seen[a] < first_seen[b]
  end)
  while #demanded > ADAPTER_REQUESTS_LIMIT do table.remove(demanded) end
  return demanded
end

function claim.has_free_rows(scan, worker)
  if scan.has_rows[worker] == nil then
    scan.has_rows[worker] = workers.free_rows_in(scan, redis.call('HGET', scan.keys.rooms, worker)) > 0
  end
  return scan.has_rows[worker]
end

function claim.is_router_alive(scan, router)
  local is_alive = scan.router_alive[router]
  if is_alive == nil then
    is_alive = routers.is_alive(scan, router)
    scan.router_alive[router] = is_alive
  end
  return is_alive
end

function claim.is_resident(scan, adapter)
  return string.find(scan.adapters_here, '\n' .. string.sub(adapter, -ADAPTER_DIGITS) .. '\n', 1, true) ~= nil
end

-- Return whether the worker has a link to a router; one without is in the answer, so that the worker opens it.
function claim.has_link(scan, router)
  if not scan.linked or scan.linked[router] then return true end
  if not scan.is_unlinked[router] then scan.unlinked[#scan.unlinked + 1] = router end
  scan.is_unlinked[router], scan.saturated = true, true
  return false
end

-- Return how many ms a job is still held for a worker with free rows that its adapter prefers to this one.
function claim.held_for_ms(scan, adapter, has_begun, queued, prefer)
  local left_ms = queued + HOLD_MS - scan.now
  if left_ms <= 0 or adapter == '' or has_begun or claim.is_resident(scan, adapter) then return 0 end
  for other in string.gmatch(prefer, '[^\n]+') do
    if other == scan.worker then return 0 end
    if claim.has_free_rows(scan, other) then return left_ms end
  end
  return 0
end

-- Return whether a job that does not fit may have a row that another tenant's job is using: its tenant has waited a
-- moment, was served less than the other, and has fewer rows here for its weight than the other keeps.
function claim.may_share_row(scan, name, weight, rows, queued)
  return scan.row_of ~= '' and rows < scan.all_rows and scan.now - queued >= BELOW_SHARE_MS
    and ((scan.rows_here[name] or 0) + 1) / weight <= scan.rows_left
    and tenants.counter_of(scan, name) < tenants.counter_of(scan, scan.row_of)
end

-- Returns whether the tenant became idle; its `counter` may be known.
function claim.take_out(scan, id, tenant, ...)
  scan.gone_ids[#scan.gone_ids + 1], scan.is_gone[id] = id, true
  scan.gone_keys[#scan.gone_keys + 1] = scan.prefix .. 'job:' .. id
  local is_idle = jobs.leave_queue(scan, id, tenant, ...)
  if is_idle then scan.gone_keys[#scan.gone_keys + 1] = turns.hash_of(scan, tenant) end
  return is_idle
end

-- Take a job, and charge its tenant for the claim; `tenant` is nil outside of a scan of the tenants.
function claim.take(scan, id, tenant, name, weight, attempt, prompt, load, place, size, work, key)
  scan.bodies[#scan.bodies + 1] = redis.call('HGET', scan.prefix .. 'job:' .. id, 'body') or ''
  scan.claimed_work = scan.claimed_work + work
  local cost = charges.claim(scan, id, name, weight, attempt, place == id, prompt, load)
  if place ~= id then turns.note_claim(scan, name, place) end
  if tenant then
    tenant.counter = tenant.counter + cost
    local has_more = tenant.places[tenant.next + 1] ~= nil
    local is_idle = claim.take_out(scan, id, name, place, size, work, key, tenant.counter, has_more)
    if cost > 0 and not is_idle then redis.call('ZADD', scan.keys.tenants, tenant.counter, name) end
  else
    if cost > 0 then tenants.charge(scan, {name, cost}) end
    claim.take_out(scan, id, name, place, size, work, key)
  end
end

-- Return the rows that a job takes which has no strike itself, but is of a suspect pair: those of a worker without jobs
-- of other tenants, while no other job of the pair is tried elsewhere; nil: the job waits.
function claim.rows_apart(scan, id, tenant, adapter, rows)
  if scan.only_tenant == tenant then return rows end
  if scan.free_rows == scan.all_rows and not suspects.is_another_tried(scan, id, tenant, adapter) then
    return scan.all_rows
  end
end

-- Take a job, pass it over, or drop one that is of no use any more. `line_place` is its member of a tenant's queue.
function claim.look(scan, id, tenant, line_place)
  local key, now = scan.prefix .. 'job:' .. id, scan.now
  local values = redis.call('HMGET', key, 'facts', 'reserved', 'reserved_until')
  local is_readable, name, base, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, rank, rows, load,
    of_key, key_weight, place, size, work, queued, deadline = read_packed(jobs.checked, values[1])
  if not is_readable then
    redis.call('ZREM', scan.keys.waiting, id)
    if values[1] then redis.call('DEL', key) end -- without facts it may be the mark of one that was displaced
    return LOST
  end
  if line_place and (line_place ~= place or name ~= tenant.name) then return LOST end
  scan.looks = scan.looks + 1
  -- A job in quarantine is missed by its router, whose next attempt is refused.
  if deadline > 0 and deadline <= now or not claim.is_router_alive(scan, router) or scan.any_quarantined
    and quarantine.left_ms(scan, name, adapter) > 0 and not quarantine.admits(attempt, prompt, prefill, rows) then
    if not claim.take_out(scan, id, name, place, size, work, of_key) and place ~= id then
      turns.give_back(scan, name, place, work, of_key, key_weight)
    end
    return GONE
  end
  if queued > now then queued = 0 end -- the clock went back: the job has waited long enough for anything
  scan.is_young_passed = scan.is_young_passed or now - queued < YOUNG_MS
  if tokens > scan.max_tokens or rank > scan.max_rank or base ~= scan.base_digest then return PASSED end
  if not claim.has_link(scan, router) then return PASSED end
  if prefer ~= '' and now - queued < BARRED_MS and string.find(prefer, scan.barred, 1, true) then return PASSED end
  local reserved_for, reserved_ms = values[2], number_of(values[3]) - now
  if reserved_for and reserved_for ~= scan.worker and reserved_ms > 0 and reserved_ms <= RESERVE_MS then
    -- Empty at most one worker at a time for jobs that need a whole one.
    if rows >= ALL_ROWS then scan.is_first = false end
    return PASSED
  end
  local held_ms = claim.held_for_ms(scan, adapter, place == id, queued, prefer)
  if held_ms > 0 then
    if scan.hold_ms == 0 or held_ms < scan.hold_ms then scan.hold_ms = held_ms end
    local arrival = number_of(string.sub(place, ARRIVAL_BYTE + 1, PLACE_BYTES - 1))
    scan.seen_before_held = math.min(scan.seen_before_held, arrival - 1)
    return PASSED
  end
  local is_apart = suspects.are(scan, name, adapter) and not quarantine.admits(attempt, prompt, prefill, rows)
  local is_struck = rows >= ALL_ROWS
  rows = math.min(rows, scan.all_rows)
  if is_apart and is_struck and suspects.is_another_tried(scan, id, name, adapter) then return PASSED end
  if is_apart and not is_struck then
    -- No worker is emptied for such a job.
    rows = claim.rows_apart(scan, id, name, adapter, rows)
    if not rows or rows > scan.free_rows or prefill > scan.free_tokens then return PASSED end
  end
  local overdue = (scan.is_first or reserved_for == scan.worker) and now - queued >= PATIENCE_MS
  scan.is_first = false
  local fits = rows <= scan.free_rows and (prefill <= scan.free_tokens or overdue)
  if fits or claim.may_share_row(scan, name, weight, rows, queued) then
    -- At most one such job a claim: the worker's next claim says who is above its share then.
    if not fits then scan.row_of = '' end
    scan.free_rows, scan.free_tokens = scan.free_rows - rows, scan.free_tokens - prefill
    if is_apart then
      suspects.try(scan, id, name, adapter, attempt)
      scan.free_rows, scan.row_of, scan.is_last_apart = 0, '', true
    end
    if name ~= scan.only_tenant then scan.only_tenant = '' end
    scan.facts[#scan.facts + 1] = values[1]
    if claim.is_resident(scan, adapter) then load = 0 end
    claim.take(scan, id, tenant, name, weight, attempt, prompt, load, place, size, work, of_key)
    return TAKEN
  end
  scan.saturated = true
  claim.count_demand(scan, redis.call('HGET', key, 'wanted'))
  if overdue and scan.free_rows > 0 then
    redis.call('HSET', key, 'reserved', scan.worker, 'reserved_until', now + RESERVE_MS)
    scan.free_rows = 0
  end
  return PASSED
end

-- Return whether the scan goes on. That of a full worker looks at a few jobs, for adapters to fetch beforehand.
function claim.may_look(scan)
  if scan.free_rows > 0 then return scan.passes_left > 0 end
  if not scan.was_full then return false end
  scan.lookahead_left = scan.lookahead_left - 1
  return scan.lookahead_left >= 0
end

-- Return where this scan goes on in a queue that is longer than its window: the first half of the window is the head of
-- the queue, the second half moves on with every scan.
function claim.second_half_start(scan, length, window)
  scan.window_exceeded = true
  return window / 2 + scan.number * window / 2 % (length - window / 2)
end

function claim.look_at_begun(scan)
  local key, window = scan.keys.again, scan.looks_around and LOOKAHEAD_LIMIT / 2 or REDISPATCHED_PER_SCAN
  local length = redis.call('ZCARD', key)
  if length == 0 then return end
  local ids
  if length <= window then
    ids = redis.call('ZRANGE', key, 0, -1)
  else
    ids = redis.call('ZRANGE', key, 0, window / 2 - 1)
    local start = claim.second_half_start(scan, length, window)
    for _, id in ipairs(redis.call('ZRANGE', key, start, start + window / 2 - 1)) do ids[#ids + 1] = id end
  end
  for _, id in ipairs(ids) do
    if not claim.may_look(scan) then return end
    if claim.look(scan, id) == LOST then redis.call('ZREM', key, id) end
  end
end

function claim.length_of(tenant)
  tenant.length = tenant.length or redis.call('ZCARD', tenant.queue)
  return tenant.length
end

-- Return the place of a tenant's next job; nil at the end of the queue. A few are read at once.
function claim.next_place(scan, tenant)
  if not tenant.places[tenant.next] then
    local count = math.max(2, math.min(PLACES_AT_ONCE, scan.free_rows))
    tenant.places = redis.call('ZRANGE', tenant.queue, tenant.position, tenant.position + count - 1)
    tenant.next = 1
    if #tenant.places < count then tenant.length = tenant.position + #tenant.places end
  end
  return tenant.places[tenant.next]
end

-- Note that a tenant's job was passed over.
function claim.pass_over(scan, tenant)
  tenant.passed, tenant.position = tenant.passed + 1, tenant.position + 1
  if tenant.passed == PASSES_PER_TENANT / 2 and claim.length_of(tenant) > PASSES_PER_TENANT then
    tenant.position, tenant.places = claim.second_half_start(scan, tenant.length, PASSES_PER_TENANT), {}
  end
end

-- Look at a tenant's next job. Returns whether the scan has seen all that it may of this tenant.
function claim.look_at_tenant(scan, tenant)
  local place = claim.next_place(scan, tenant)
  local result = place and claim.look(scan, string.sub(place, PLACE_BYTES + 1), tenant, place) or LOST
  tenant.next = tenant.next + 1
  if result ~= TAKEN then scan.passes_left = scan.passes_left - 1 end
  if result == PASSED then
    claim.pass_over(scan, tenant)
  else
    if tenant.length then tenant.length = tenant.length - 1 end
    -- A place is left over where a job's own key has been lost, a tenant where its queue has.
    if result == LOST and place then redis.call('ZREM', tenant.queue, place) end
    if result == LOST and redis.call('EXISTS', tenant.queue) == 0 then
      tenants.deactivate(scan, tenant.name, tenant.counter)
      scan.gone_keys[#scan.gone_keys + 1] = turns.hash_of(scan, tenant.name)
    end
  end
  local passes = scan.looks_around and LOOKAHEAD_PER_TENANT or PASSES_PER_TENANT
  if not place or tenant.passed >= passes then return true end
  return not tenant.places[tenant.next] and tenant.position >= claim.length_of(tenant)
end

-- Read the first tenants that the scan does not skip. A `line` has tenants and counters as they were when the scan
-- began, and how many of them it has come to.
function claim.read_tenants(scan, line, count)
  local last, is_known, names = scan.skipped_tenants + count - 1, {}, line.names
  for _, name in ipairs(names) do is_known[name] = true end -- their counters may have risen since
  local found = redis.call('ZRANGE', scan.keys.tenants, scan.skipped_tenants, last, 'WITHSCORES')
  for i = 1, #found, 2 do
    if not is_known[found[i]] and #names < count then
      names[#names + 1], line.counters[#names + 1] = found[i], number_of(found[i + 1])
    end
  end
  line.is_all_read = count == TENANTS_PER_SCAN or #names < count
  -- Tenants that the scan does not see may have a lower counter than one that has grown beyond this.
  if #names == TENANTS_PER_SCAN then line.horizon = line.counters[#names] end
end

-- Return the tenant with the lowest counter now, the first of equals, and its place among those that have `begun`.
function claim.next_tenant(scan, line)
  local begun, lowest, lowest_place = line.begun, nil, nil
  for place, tenant in ipairs(begun) do
    if not lowest or tenant.counter < lowest.counter
        or tenant.counter == lowest.counter and tenant.number < lowest.number then
      lowest, lowest_place = tenant, place
    end
  end
  if line.reached == #line.names and not line.is_all_read then claim.read_tenants(scan, line, TENANTS_PER_SCAN) end
  local number = line.reached + 1
  local name, counter = line.names[number], line.counters[number]
  if name and not (lowest and lowest.counter <= counter) then
    lowest = {name = name, counter = counter, number = number, passed = 0, position = 0,
      queue = scan.prefix .. 'queue:' .. name, places = {}, next = 1}
    line.reached, lowest_place = number, #begun + 1
    begun[lowest_place] = lowest
  end
  return lowest, lowest_place
end

-- Look at tenants from the lowest counter on: always at the next job of the tenant that has the lowest one now. Returns
-- how many the next scan is to skip, and whether there may be more beyond what this scan has seen.
function claim.look_at_tenants(scan)
  local line = {names = {}, counters = {}, reached = 0, is_all_read = false, begun = {}, horizon = math.huge}
  local seen_tenants = 0
  -- A claim of few rows sees few.
  local count = scan.free_rows > 0 and math.min(scan.free_rows + 1, TENANTS_PER_SCAN) or TENANTS_PER_SCAN
  claim.read_tenants(scan, line, count)
  while claim.may_look(scan) do
    local tenant, place = claim.next_tenant(scan, line)
    if not tenant or tenant.counter > line.horizon then break end
    if claim.look_at_tenant(scan, tenant) then
      table.remove(line.begun, place)
      if tenant.position > 0 then seen_tenants = seen_tenants + 1 end
    end
  end
  local more = scan.passes_left < 1 or line.horizon < math.huge
  return more and scan.skipped_tenants + seen_tenants or 0, more
end

-- Look at the last arrivals, as many as have come since those that the worker has seen.
function claim.look_at_news(scan)
  local arrivals = number_of(redis.call('GET', scan.keys.arrivals))
  if arrivals < scan.seen then scan.seen = 0 end -- the counter was lost
  local count = math.min(arrivals - scan.seen, NEWS_LIMIT)
  if count == 0 then return end
  scan.is_first = false
  for _, id in ipairs(redis.call('LRANGE', scan.keys.news, -count, -1)) do
    if scan.free_rows < 1 then return end
    if not scan.is_gone[id] then claim.look(scan, id) end
    scan.is_gone[id] = true -- two attempts of a job may have come
  end
end

-- Give a worker the waiting jobs that suit it. Answers {jobs that still wait, bodies, adapter requests, hold_ms,
-- tenants to skip in the next scan, 1 for no reason to scan again, routers of jobs that suit the worker but for its
-- missing link, jobs looked at, 1 for a job that more free capacity suits; of a scan that found no job: arrivals that
-- need no second look, live workers; 1 where the last of the jobs must begin apart from other tenants' jobs, because
-- its tenant and adapter are suspect; the jobs' facts; and the time in ms}.
register('claim', function(_, arguments)
  local scan = claim.new_scan(arguments)
  local keys, worker, bodies, deleted = scan.keys, scan.worker, scan.bodies, scan.gone_keys
  -- Usage is charged before the claim: it counts for whose turn it is.
  charges.report(scan, arguments[4])
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', keys.waiting, '-inf', scan.now, 'LIMIT', 0, EXPIRED_PER_SCAN)) do
    jobs.forget(scan, id)
  end
  local next_skip, more = 0, false
  if scan.news ~= 'only' then
    claim.look_at_begun(scan)
    next_skip, more = claim.look_at_tenants(scan)
  end
  local is_complete = scan.news == 'only' or not (more or scan.window_exceeded)
  if (is_complete or scan.news ~= 'later') and #bodies == 0 then claim.look_at_news(scan) end
  if #scan.gone_ids > 0 then redis.call('ZREM', keys.waiting, unpack(scan.gone_ids)) end
  local waiting = redis.call('ZCARD', keys.waiting)
  tenants.measure_claim_rate(scan, scan.claimed_work, waiting == 0 or not scan.saturated and scan.free_rows > 0)
  tenants.flush(scan)
  if scan.claimed_work > 0 then tenants.count_work(keys.claimed_work, scan.claimed_work) end

  if waiting == 0 then deleted[#deleted + 1] = keys.wake end
  if worker ~= '' then
    deleted[#deleted + 1] = keys.wake .. ':' .. worker
    workers.note_free_rows(scan, worker, math.max(scan.free_rows, 0))
  end
  if #deleted > 0 then redis.call('DEL', unpack(deleted)) end

  local seen_arrivals, live_workers = 0, 0
  if #bodies > 0 then
    if waiting > 0 then workers.wake_any(scan) end
  else
    local arrivals = number_of(redis.call('GET', keys.arrivals))
    seen_arrivals, live_workers = math.min(arrivals, scan.seen_before_held), redis.call('HLEN', keys.workers)
    local is_woken_in_vain = scan.was_woken and scan.is_young_passed and not scan.was_full and seen_arrivals > scan.seen
    if is_woken_in_vain or #scan.unlinked > 0 then workers.pass_wake_up_on(scan) end
  end
  local done = is_complete or #bodies > 0 or scan.free_rows < 1
  local is_crowded = scan.saturated or scan.free_rows < 1
  return {waiting, bodies, claim.most_demanded(scan), scan.hold_ms, next_skip, done and 1 or 0, scan.unlinked, scan.looks,
    is_crowded and 1 or 0, seen_arrivals, live_workers, scan.is_last_apart and 1 or 0, scan.facts, scan.now}
end)
