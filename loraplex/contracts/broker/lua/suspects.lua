-- Jobs that kill engines: suspects begin apart from other tenants' jobs, and what was proved is in quarantine.
local quarantine, suspects = {}, {}

-- Factor by which the time grows for which jobs are refused, with each further death.
local QUARANTINE_GROWTH = 5

-- The quarantine has tenants, and their use of an adapter, whose jobs are refused for a while because they killed
-- engines (see broker/terms.py). A subject is a tenant, or a tenant, a space and an adapter's digest, empty for the
-- base model.

-- Return whether a job goes on in quarantine: its answer has begun, at an earlier attempt, and it is no suspect.
function quarantine.admits(attempt, prompt, prefill, rows) return attempt > 1 and prefill > prompt and rows < ALL_ROWS end

-- Return for how many ms more a subject is refused, by its score; 0: it is not, or the clock went back.
function quarantine.refused_ms(call, until_ms)
  local ms = number_of(until_ms) - call.now
  return ms > 0 and ms <= QUARANTINE_LIMIT_MS and ms or 0
end

-- Return for how many ms more the jobs of a tenant with an adapter are refused; 0: they are not.
function quarantine.left_ms(call, tenant, adapter)
  local until_ms = redis.call('ZMSCORE', call.keys.quarantine, tenant, tenant .. ' ' .. adapter)
  return math.max(quarantine.refused_ms(call, until_ms[1]), quarantine.refused_ms(call, until_ms[2]))
end

-- Return a record of `deaths`. Raises an error on one that has passed, or that this library cannot have packed.
function quarantine.checked_deaths(now, count, at, of_job)
  if count >= 1 and count < math.huge and at <= now and now - at < DEATHS_MEMORY_MS and of_job >= '' then
    return count, of_job
  end
  error('unreadable')
end

-- Refuse a subject for longer with every death, from QUARANTINE_MS on; the last death was at `at`.
function quarantine.refuse(call, subject, deaths, at)
  local ms = math.min(QUARANTINE_MS * QUARANTINE_GROWTH ^ (deaths - 1), QUARANTINE_LIMIT_MS)
  local before_ms = quarantine.refused_ms(call, redis.call('ZSCORE', call.keys.quarantine, subject))
  redis.call('ZADD', call.keys.quarantine, math.max(at + ms, call.now + before_ms), subject)
end

-- Record that a job was ended because engines died of it, the last ones while it ran alone, and how many ms ago. Answers
-- for how many ms its tenant's jobs with its adapter are refused. A repeated call for the same job changes nothing.
register('record_death', function(_, arguments)
  local call, tenant, adapter, job = new_call(arguments), arguments[2], arguments[3], arguments[4]
  local at = call.now - tonumber(arguments[5])
  local subject, prefix, of_deaths = tenant .. ' ' .. adapter, tenant .. ' ', call.keys.deaths
  redis.call('ZREMRANGEBYSCORE', call.keys.quarantine, '-inf', call.now)
  redis.call('HDEL', call.keys.suspects, job)
  local deaths, adapters, last_job = 0, 0, ''
  local known = redis.call('HGETALL', of_deaths)
  for i = 1, #known, 2 do
    local is_readable, count, of_job = read_packed(quarantine.checked_deaths, known[i + 1], call.now)
    if not is_readable then
      redis.call('HDEL', of_deaths, known[i])
    elseif known[i] == subject then
      deaths, last_job = count, of_job
    elseif string.sub(known[i], 1, #prefix) == prefix then
      adapters = adapters + 1
    end
  end
  if last_job ~= job then
    redis.call('HSET', of_deaths, subject, cmsgpack.pack(deaths + 1, at, job))
    quarantine.refuse(call, subject, deaths + 1, at)
    -- A tenant that kills engines with one adapter after the other is refused as a whole.
    if adapters > 0 then quarantine.refuse(call, tenant, adapters, at) end
  end
  return quarantine.left_ms(call, tenant, adapter)
end)

-- A job that engines may have died of is a suspect for SUSPECT_MS after its last strike or until a token clears it.
-- While a job of a tenant and adapter is among them, the pair's jobs begin one at a time in the cell, apart from other
-- tenants' jobs. With two adapters of a tenant this holds for the whole tenant, with two tenants of an adapter for the
-- adapter.
--
-- The key `suspects` has an entry for each of these jobs, and for each job of such a pair that a worker has: tenant,
-- adapter, attempt, strikes (0: only its pair is suspect), the time when the entry ends, and the time until which a
-- worker has the job. A call that has read them has them as `suspects`, by job.

function suspects.write(call, id, ...)
  redis.call('HSET', call.keys.suspects, id, cmsgpack.pack(...))
  redis.call('PEXPIRE', call.keys.suspects, 2 * SUSPECT_MS)
end

-- Count the pairs that are suspect; called again when an entry has changed. Of the entries with strikes the call has
-- pairs, and the number of adapters of each tenant and of tenants of each adapter.
function suspects.count(call)
  local suspect_pairs, adapters_of, tenants_of = {}, {}, {}
  for _, suspect in pairs(call.suspects) do
    local subject = suspect.tenant .. ' ' .. suspect.adapter
    if suspect.strikes > 0 and not suspect_pairs[subject] then
      suspect_pairs[subject] = true
      adapters_of[suspect.tenant] = (adapters_of[suspect.tenant] or 0) + 1
      tenants_of[suspect.adapter] = (tenants_of[suspect.adapter] or 0) + 1
    end
  end
  call.suspect_pairs = next(suspect_pairs) ~= nil and suspect_pairs
  call.suspect_adapters_of, call.suspect_tenants_of = adapters_of, tenants_of
end

-- Return an entry as a table. Raises an error on one that has ended, or that this library cannot have packed by now.
function suspects.checked(now, tenant, adapter, attempt, strikes, until_ms, busy_until)
  if tenant >= '' and adapter >= '' and attempt >= 0 and strikes >= 0 and until_ms > now and until_ms <= now + SUSPECT_MS
      and busy_until >= 0 and busy_until <= now + TRIED_MS and attempt + strikes < math.huge then
    return {tenant = tenant, adapter = adapter, attempt = attempt, strikes = strikes, until_ms = until_ms,
      busy_until = busy_until}
  end
  error('unreadable')
end

-- Read all entries, and drop those that have ended or cannot be read.
function suspects.read(call)
  call.suspects = {}
  local entries = redis.call('HGETALL', call.keys.suspects)
  for i = 1, #entries, 2 do
    local is_readable, suspect = read_packed(suspects.checked, entries[i + 1], call.now)
    if is_readable then
      call.suspects[entries[i]] = suspect
    else
      redis.call('HDEL', call.keys.suspects, entries[i])
    end
  end
  if #entries > 0 then suspects.count(call) end
end

-- Return whether jobs of a tenant with an adapter begin one at a time, apart from other tenants' jobs.
function suspects.are(call, tenant, adapter)
  return call.suspect_pairs and (call.suspect_pairs[tenant .. ' ' .. adapter]
    or (call.suspect_adapters_of[tenant] or 0) > 1 or adapter ~= '' and (call.suspect_tenants_of[adapter] or 0) > 1)
end

-- Return whether a worker has another job of a tenant with an adapter that engines may die of.
function suspects.is_another_tried(call, id, tenant, adapter)
  for other, suspect in pairs(call.suspects) do
    if other ~= id and suspect.busy_until > call.now and suspect.tenant == tenant and suspect.adapter == adapter then
      return true
    end
  end
  return false
end

-- Record that a worker has claimed a job of a suspect pair.
function suspects.try(call, id, tenant, adapter, attempt)
  local strikes, until_ms = 0, call.now + TRIED_MS
  local suspect = call.suspects[id]
  if suspect and suspect.attempt == attempt and suspect.strikes > 0 then
    strikes, until_ms = suspect.strikes, suspect.until_ms
  end
  call.suspects[id] = {tenant = tenant, adapter = adapter, attempt = attempt, strikes = strikes, until_ms = until_ms,
    busy_until = call.now + TRIED_MS} -- this scan may look at others of the pair
  if suspect and suspect.strikes ~= strikes then suspects.count(call) end
  suspects.write(call, id, tenant, adapter, attempt, strikes, until_ms, call.now + TRIED_MS)
end

-- Take a worker's report of an attempt: a token clears its job, unless it is on trial.
function suspects.report(call, id, attempt, tokens, ended)
  local suspect = call.suspects[id]
  if not suspect or suspect.attempt ~= attempt then return end
  local is_clear = tokens > 0 and suspect.strikes < TRIAL_STRIKES or ended and suspect.strikes == 0
  if is_clear then
    call.suspects[id] = nil
    redis.call('HDEL', call.keys.suspects, id)
    suspects.count(call)
    workers.wake_any(call)
  else
    suspect.busy_until = ended and 0 or call.now + TRIED_MS
    if suspect.strikes == 0 then suspect.until_ms = suspect.busy_until end
    suspects.write(call, id, suspect.tenant, suspect.adapter, attempt, suspect.strikes, suspect.until_ms,
      suspect.busy_until)
  end
end

-- Forget which engines died of a tenant's jobs, so that they are neither refused nor slowed. Returns how many records
-- were removed.
function suspects.forget_tenant(call, tenant)
  local keys, records = call.keys, 0
  local function is_of_tenant(subject) return subject == tenant or string.sub(subject, 1, #tenant + 1) == tenant .. ' ' end
  for _, subject in ipairs(redis.call('ZRANGE', keys.quarantine, 0, -1)) do
    if is_of_tenant(subject) then records = records + redis.call('ZREM', keys.quarantine, subject) end
  end
  for _, subject in ipairs(redis.call('HKEYS', keys.deaths)) do
    if is_of_tenant(subject) then records = records + redis.call('HDEL', keys.deaths, subject) end
  end
  suspects.read(call)
  for id, suspect in pairs(call.suspects) do
    if suspect.tenant == tenant then records = records + redis.call('HDEL', keys.suspects, id) end
  end
  return records
end

-- Answers the subjects in quarantine, each with the ms left: a tenant, or a tenant, a space and an adapter's digest.
register('quarantined', function(_, arguments)
  local call, answer = new_call(arguments), {}
  local found = redis.call('ZRANGEBYSCORE', call.keys.quarantine, call.now, '+inf', 'WITHSCORES')
  for i = 1, #found, 2 do
    answer[i], answer[i + 1] = found[i], quarantine.refused_ms(call, found[i + 1])
  end
  return answer
end)

-- Lift the quarantine of a tenant. Answers how many records were removed.
register('lift_quarantine', function(_, arguments)
  return suspects.forget_tenant(new_call(arguments), arguments[2])
end)
