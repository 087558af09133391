-- A claim's scan of the tenants with waiting jobs, from the lowest counter on: always the next job of the tenant that has
-- the lowest one now.
--- @include "tenant_counters"
--- @include "job_looks"

local function length_of(tenant)
  tenant.length = tenant.length or redis.call('ZCARD', tenant.queue)
  return tenant.length
end

-- Return the place of a tenant's next job; nil at the end of the queue. A few are read at once.
local function next_place(tenant)
  if not tenant.places[tenant.next] then
    local count = math.max(2, math.min(PLACES_AT_ONCE, free_rows))
    tenant.places = redis.pcall('ZRANGE', tenant.queue, tenant.position, tenant.position + count - 1)
    tenant.next = 1
    if tenant.places.err then tenant.places = {} end -- of another type, which a census sets aside
    if #tenant.places < count then tenant.length = tenant.position + #tenant.places end
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
    if result == LOST and redis.call('EXISTS', tenant.queue) == 0 then
      deactivate_tenant(tenant.name, tenant.counter)
      gone_keys[#gone_keys + 1] = keys_of(tenant.name)
    end
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

  -- Return the tenant at a place in the order of now; nil beyond the last. A claim of one row sees few of them.
  local function tenant_at(at)
    local name = found[2 * at - 1]
    if not lowest[at] and name then
      lowest[at] = {name = name, counter = number_of(found[2 * at]), number = at, passed = 0, position = 0,
        queue = PREFIX .. 'queue:' .. name, places = {}, next = 1}
    end
    return lowest[at]
  end

  -- Tenants that the scan does not see may have a lower counter than one that has grown beyond this.
  local horizon = #found == 2 * TENANTS_PER_SCAN and number_of(found[#found]) or math.huge
  while true do
    local tenant = tenant_at(head)
    if not tenant or tenant.counter > horizon or not may_look() then break end
    if look_at_tenant(tenant) then
      head = head + 1
      if tenant.position > 0 then seen_tenants = seen_tenants + 1 end
    else
      -- Move the tenant behind those that have a lower counter now; equals keep their order.
      local at = head
      local behind = tenant_at(at + 1)
      while behind and (behind.counter < tenant.counter
          or behind.counter == tenant.counter and behind.number < tenant.number) do
        lowest[at], at = behind, at + 1
        behind = tenant_at(at + 1)
      end
      lowest[at] = tenant
    end
  end
  local more = passes_left < 1 or horizon < math.huge
  return more and skipped_tenants + seen_tenants or 0, more
end
