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
  -- Tenants and counters as they were when the scan began, and how many of them it has come to. A claim of few rows sees few.
  local names, counters, reached, is_all_read = {}, {}, 0, false
  local begun, seen_tenants, horizon = {}, 0, math.huge

  local function read_tenants(count)
    local last, is_known = skipped_tenants + count - 1, {}
    for _, name in ipairs(names) do is_known[name] = true end -- their counters may have risen since
    local found = redis.call('ZRANGE', TENANTS, skipped_tenants, last, 'WITHSCORES')
    for i = 1, #found, 2 do
      if not is_known[found[i]] and #names < count then
        names[#names + 1], counters[#names + 1] = found[i], number_of(found[i + 1])
      end
    end
    is_all_read = count == TENANTS_PER_SCAN or #names < count
    -- Tenants that the scan does not see may have a lower counter than one that has grown beyond this.
    if #names == TENANTS_PER_SCAN then horizon = counters[#names] end
  end

  -- Return the tenant with the lowest counter now, the first of equals, and its place in `begun`.
  local function next_tenant()
    local lowest
    for i, tenant in ipairs(begun) do
      local before = lowest and begun[lowest]
      if not before or tenant.counter < before.counter
          or tenant.counter == before.counter and tenant.number < before.number then
        lowest = i
      end
    end
    if reached == #names and not is_all_read then read_tenants(TENANTS_PER_SCAN) end
    local new = reached + 1
    if new <= #names and not (lowest and begun[lowest].counter <= counters[new]) then
      reached, lowest = new, #begun + 1
      begun[lowest] = {name = names[new], counter = counters[new], number = new, passed = 0, position = 0,
        queue = PREFIX .. 'queue:' .. names[new], places = {}, next = 1}
    end
    return begun[lowest], lowest
  end

  read_tenants(free_rows > 0 and math.min(free_rows + 1, TENANTS_PER_SCAN) or TENANTS_PER_SCAN)
  while may_look() do
    local tenant, place = next_tenant()
    if not tenant or tenant.counter > horizon then break end
    if look_at_tenant(tenant) then
      table.remove(begun, place)
      if tenant.position > 0 then seen_tenants = seen_tenants + 1 end
    end
  end
  local more = passes_left < 1 or horizon < math.huge
  return more and skipped_tenants + seen_tenants or 0, more
end
