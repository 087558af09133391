-- Tenants, and their use of an adapter, whose jobs are refused for a while because they killed engines (see
-- broker/terms.py). A subject is a tenant, or a tenant, a space and an adapter's digest, empty for the base model.
--- @include "keys"
--- @include "clock"

-- Return whether a job goes on in quarantine: its answer has begun, at an earlier attempt, and it is no suspect.
local function goes_on_in_quarantine(attempt, prompt, prefill, rows)
  return attempt > 1 and prefill > prompt and rows < ALL_ROWS
end

-- Return for how many ms more a subject is refused, by its score; 0: it is not, or the clock went back.
local function refused_ms(until_ms)
  local ms = number_of(until_ms) - now
  return ms > 0 and ms <= QUARANTINE_LIMIT_MS and ms or 0
end

-- Return for how many ms more the jobs of a tenant with an adapter are refused; 0: they are not.
local function quarantined_ms(tenant, adapter)
  local until_ms = redis.call('ZMSCORE', QUARANTINE, tenant, tenant .. ' ' .. adapter)
  return math.max(refused_ms(until_ms[1]), refused_ms(until_ms[2]))
end
