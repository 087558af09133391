-- Jobs that engines may have died of, each for SUSPECT_MS after its last strike or until a token clears it. While a job of a
-- tenant and adapter is among them, the pair's jobs begin one at a time in the cell, apart from other tenants' jobs.
-- With two adapters of a tenant this holds for the whole tenant, with two tenants of an adapter for the adapter.
--
-- SUSPECTS has an entry for each of these jobs, and for each job of such a pair that a worker has: tenant, adapter, attempt,
-- strikes (0: only its pair is suspect), the time when the entry ends, and the time until which a worker has the job.
--- @include "keys"
--- @include "clock"
--- @include "workers"
--- @include "packed"

local suspects, any_suspects = {}, false
-- Of the entries with strikes: pairs, and the number of adapters of each tenant and of tenants of each adapter.
local suspect_pairs, suspect_adapters_of, suspect_tenants_of = {}, {}, {}

local function subject_of(tenant, adapter) return tenant .. ' ' .. adapter end

local function write_suspect(id, ...)
  redis.call('HSET', SUSPECTS, id, cmsgpack.pack(...))
  redis.call('PEXPIRE', SUSPECTS, 2 * SUSPECT_MS)
end

-- Count the pairs that are suspect; call it again when an entry has changed.
local function count_suspects()
  suspect_pairs, suspect_adapters_of, suspect_tenants_of = {}, {}, {}
  for _, suspect in pairs(suspects) do
    local subject = subject_of(suspect.tenant, suspect.adapter)
    if suspect.strikes > 0 and not suspect_pairs[subject] then
      suspect_pairs[subject] = true
      suspect_adapters_of[suspect.tenant] = (suspect_adapters_of[suspect.tenant] or 0) + 1
      suspect_tenants_of[suspect.adapter] = (suspect_tenants_of[suspect.adapter] or 0) + 1
    end
  end
  any_suspects = next(suspect_pairs) ~= nil
end

-- Return an entry as a table. Raises an error on one that has ended, or that these scripts cannot have packed by now.
local function checked_suspect(tenant, adapter, attempt, strikes, until_ms, busy_until)
  if tenant >= '' and adapter >= '' and attempt >= 0 and strikes >= 0 and until_ms > now and until_ms <= now + SUSPECT_MS
      and busy_until >= 0 and busy_until <= now + TRIED_MS and attempt + strikes < math.huge then
    return {tenant = tenant, adapter = adapter, attempt = attempt, strikes = strikes, until_ms = until_ms,
      busy_until = busy_until}
  end
  error('unreadable')
end

-- Read all entries, and drop those that have ended or cannot be read.
local function read_suspects()
  local entries = redis.call('HGETALL', SUSPECTS)
  for i = 1, #entries, 2 do
    local is_readable, suspect = read_packed(checked_suspect, entries[i + 1])
    if is_readable then
      suspects[entries[i]] = suspect
    else
      redis.call('HDEL', SUSPECTS, entries[i])
    end
  end
  if #entries > 0 then count_suspects() end
end

-- Return whether jobs of a tenant with an adapter begin one at a time, apart from other tenants' jobs.
local function is_suspect(tenant, adapter)
  return suspect_pairs[subject_of(tenant, adapter)] or (suspect_adapters_of[tenant] or 0) > 1
    or adapter ~= '' and (suspect_tenants_of[adapter] or 0) > 1
end

-- Return whether a worker has another job of a tenant with an adapter that engines may die of.
local function is_another_tried(id, tenant, adapter)
  for other, suspect in pairs(suspects) do
    if other ~= id and suspect.busy_until > now and suspect.tenant == tenant and suspect.adapter == adapter then
      return true
    end
  end
  return false
end

-- Record that a worker has claimed a job of a suspect pair.
local function try_suspect(id, tenant, adapter, attempt)
  local strikes, until_ms = 0, now + TRIED_MS
  local suspect = suspects[id]
  if suspect and suspect.attempt == attempt and suspect.strikes > 0 then
    strikes, until_ms = suspect.strikes, suspect.until_ms
  end
  suspects[id] = {tenant = tenant, adapter = adapter, attempt = attempt, strikes = strikes, until_ms = until_ms,
    busy_until = now + TRIED_MS} -- this scan may look at others of the pair
  if suspect and suspect.strikes ~= strikes then count_suspects() end
  write_suspect(id, tenant, adapter, attempt, strikes, until_ms, now + TRIED_MS)
end

-- Take a worker's report of an attempt: a token clears its job, unless it is on trial.
local function report_suspect(id, attempt, tokens, ended)
  local suspect = suspects[id]
  if not suspect or suspect.attempt ~= attempt then return end
  local is_clear = tokens > 0 and suspect.strikes < TRIAL_STRIKES or ended and suspect.strikes == 0
  if is_clear then
    suspects[id] = nil
    redis.call('HDEL', SUSPECTS, id)
    count_suspects()
    wake_a_worker()
  else
    suspect.busy_until = ended and 0 or now + TRIED_MS
    if suspect.strikes == 0 then suspect.until_ms = suspect.busy_until end
    write_suspect(id, suspect.tenant, suspect.adapter, attempt, suspect.strikes, suspect.until_ms, suspect.busy_until)
  end
end
