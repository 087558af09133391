#!lua flags=allow-oom
-- Record that a job was ended because engines died of it, the last ones while it ran alone. Answers for how many ms its
-- tenant's jobs with its adapter are refused. A repeated call for the same job changes nothing.
--- @include "quarantine"
--- @include "packed"

local tenant, adapter, job = ARGV[2], ARGV[3], ARGV[4]
local subject, prefix = tenant .. ' ' .. adapter, tenant .. ' '

-- Return a record of DEATHS. Raises an error on one that has passed, or that this script cannot have packed.
local function checked_deaths(count, at, of_job)
  if count >= 1 and count < math.huge and at <= now and now - at < DEATHS_MEMORY_MS and of_job >= '' then
    return count, of_job
  end
  error('unreadable')
end

-- Refuse a subject for longer with every death, from QUARANTINE_MS on.
local function refuse(name, deaths)
  local ms = math.min(QUARANTINE_MS * QUARANTINE_GROWTH ^ (deaths - 1), QUARANTINE_LIMIT_MS)
  redis.call('ZADD', QUARANTINE, now + math.max(ms, refused_ms(redis.call('ZSCORE', QUARANTINE, name))), name)
end

redis.call('ZREMRANGEBYSCORE', QUARANTINE, '-inf', now)
redis.call('HDEL', SUSPECTS, job)
local deaths, adapters, last_job = 0, 0, ''
local known = redis.call('HGETALL', DEATHS)
for i = 1, #known, 2 do
  local is_readable, count, of_job = read_packed(checked_deaths, known[i + 1])
  if not is_readable then
    redis.call('HDEL', DEATHS, known[i])
  elseif known[i] == subject then
    deaths, last_job = count, of_job
  elseif string.sub(known[i], 1, #prefix) == prefix then
    adapters = adapters + 1
  end
end
if last_job ~= job then
  redis.call('HSET', DEATHS, subject, cmsgpack.pack(deaths + 1, now, job))
  refuse(subject, deaths + 1)
  -- A tenant that kills engines with one adapter after the other is refused as a whole.
  if adapters > 0 then refuse(tenant, adapters) end
end
return quarantined_ms(tenant, adapter)
