-- A claim's look at one waiting job: it is taken, passed over, or dropped. It changes what the scan still has, which are
-- locals of claim.lua.
--- @include "charges"
--- @include "quarantine"
--- @include "waiting_jobs"
--- @include "workers"
--- @include "routers"
--- @include "adapter_demand"

local free_rows_by_worker, router_alive = {}, {}
local unlinked, is_unlinked = {}, {}
local function has_free_rows(other)
  free_rows_by_worker[other] = free_rows_by_worker[other] or free_rows_in(redis.call('HGET', ROOMS, other))
  return free_rows_by_worker[other] > 0
end
local function owner_lives(router)
  if router_alive[router] == nil then router_alive[router] = is_router_alive(router) end
  return router_alive[router]
end

local function is_resident(adapter)
  return string.find(adapters_here, '\n' .. string.sub(adapter, -ADAPTER_DIGITS) .. '\n', 1, true) ~= nil
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
  local left_ms = queued + HOLD_MS - now
  if left_ms <= 0 or adapter == '' or has_begun or is_resident(adapter) then return 0 end
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
local function take_out(id, tenant, ...)
  gone_ids[#gone_ids + 1], gone_keys[#gone_keys + 1], is_gone[id] = id, PREFIX .. 'job:' .. id, true
  local is_idle = leave_queue(id, tenant, ...)
  if is_idle then gone_keys[#gone_keys + 1] = keys_of(tenant) end
  return is_idle
end

-- Take a job, and charge its tenant for the claim; `tenant` is nil outside of a scan of the tenants.
local function take(id, tenant, name, weight, attempt, prompt, load, place, size, work, key)
  bodies[#bodies + 1] = redis.call('HGET', PREFIX .. 'job:' .. id, 'body') or ''
  claimed_work = claimed_work + work
  local cost = charge_claim(id, name, weight, attempt, place == id, prompt, load)
  if place ~= id then note_turn(name, place) end
  if tenant then
    tenant.counter = tenant.counter + cost
    local is_idle = take_out(id, name, place, size, work, key, tenant.counter, tenant.places[tenant.next + 1] ~= nil)
    if cost > 0 and not is_idle then redis.call('ZADD', TENANTS, tenant.counter, name) end
  else
    if cost > 0 then charge_tenants({name, cost}) end
    take_out(id, name, place, size, work, key)
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
  local values = hash_fields(key, 'facts', 'reserved', 'reserved_until')
  local is_readable, name, base, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, rank, rows, load,
    of_key, key_weight, place, size, work, queued, deadline = read_packed(checked_facts, values[1])
  if not is_readable then
    redis.call('ZREM', WAITING, id)
    if values[1] then redis.call('DEL', key) end -- without facts it may be the mark of one that was displaced
    return LOST
  end
  if line_place and (line_place ~= place or name ~= tenant.name) then return LOST end
  looks = looks + 1
  -- A job in quarantine is missed by its router, whose next attempt is refused.
  if deadline > 0 and deadline <= now or not owner_lives(router) or any_quarantined
    and quarantined_ms(name, adapter) > 0 and not goes_on_in_quarantine(attempt, prompt, prefill, rows) then
    if not take_out(id, name, place, size, work, of_key) and place ~= id then
      give_turn_back(name, place, work, of_key, key_weight)
    end
    return GONE
  end
  if queued > now then queued = 0 end -- the clock went back: the job has waited long enough for anything
  is_young_passed = is_young_passed or now - queued < YOUNG_MS
  if tokens > max_tokens or rank > max_rank or base ~= base_digest then return PASSED end
  if not has_link(router) then return PASSED end
  local reserved_for, reserved_ms = values[2], number_of(values[3]) - now
  if reserved_for and reserved_for ~= worker and reserved_ms > 0 and reserved_ms <= RESERVE_MS then
    -- Empty at most one worker at a time for jobs that need a whole one.
    if rows >= ALL_ROWS then is_first = false end
    return PASSED
  end
  local held_ms = held_for_ms(adapter, place == id, queued, prefer)
  if held_ms > 0 then
    if hold_ms == 0 or held_ms < hold_ms then hold_ms = held_ms end
    seen_before_held = math.min(seen_before_held, number_of(string.sub(place, ARRIVAL_BYTE + 1, PLACE_BYTES - 1)) - 1)
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
    -- At most one such job a claim: the worker's next claim says who is above its share then.
    if not fits then row_of = '' end
    free_rows, free_tokens = free_rows - rows, free_tokens - prefill
    if is_apart then
      try_suspect(id, name, adapter, attempt)
      free_rows, row_of, is_last_apart = 0, '', true
    end
    if name ~= only_tenant then only_tenant = '' end
    facts_of_bodies[#facts_of_bodies + 1] = values[1]
    if is_resident(adapter) then load = 0 end
    take(id, tenant, name, weight, attempt, prompt, load, place, size, work, of_key)
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
