#!lua flags=allow-oom
-- Remove what a cell has of a tenant: at most `most` newcomers that wait; of `most` jobs that have begun, from rank
-- `first` on, those of the tenant; dead letters, given as they are; and what is kept under its name. Answers how many
-- jobs and records were removed, and the rank from which to look in the next call, -1 for none.
--- @include "waiting_jobs"
--- @include "arrivals"
--- @include "quarantine"
--- @include "suspects"

local tenant, first, most = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local queue, jobs, records = PREFIX .. 'queue:' .. tenant, 0, 0

for _, place in ipairs(redis.call('ZRANGE', queue, 0, most - 1)) do
  forget_job(string.sub(place, PLACE_BYTES + 1))
  redis.call('ZREM', queue, place) -- one whose key was lost
  jobs = jobs + 1
end
local begun, kept = redis.call('ZRANGE', REDISPATCHED, first, first + most - 1), 0
for _, id in ipairs(begun) do
  local is_readable, of = read_packed(checked_facts, hash_fields(PREFIX .. 'job:' .. id, 'facts')[1])
  if is_readable and of == tenant then
    forget_job(id)
    jobs = jobs + 1
  else
    kept = kept + 1
  end
end
-- An arrival's place in the list is its number: the id goes, and its place stays.
for at, id in ipairs(redis.call('LRANGE', NEWS, 0, -1)) do
  if string.sub(id, 1, #tenant + 1) == tenant .. '/' then redis.call('LSET', NEWS, at - 1, '') end
end
for i = 5, #ARGV do records = records + redis.call('LREM', PREFIX .. 'dead', 0, ARGV[i]) end

local function is_of_tenant(subject) return subject == tenant or string.sub(subject, 1, #tenant + 1) == tenant .. ' ' end

local is_empty = redis.call('EXISTS', queue) == 0
if is_empty then
  for _, key in ipairs({TENANTS, IDLE, USES}) do records = records + redis.call('ZREM', key, tenant) end
  records = records + redis.call('DEL', keys_of(tenant))
  clear_totals(tenant)
  set_terms(tenant, 1, 0)
end
for _, subject in ipairs(redis.call('ZRANGE', QUARANTINE, 0, -1)) do
  if is_of_tenant(subject) then records = records + redis.call('ZREM', QUARANTINE, subject) end
end
local deaths = redis.call('HGETALL', DEATHS)
for i = 1, #deaths, 2 do
  if is_of_tenant(deaths[i]) then records = records + redis.call('HDEL', DEATHS, deaths[i]) end
end
read_suspects()
for id, suspect in pairs(suspects) do
  if suspect.tenant == tenant then records = records + redis.call('HDEL', SUSPECTS, id) end
end
flush_counts()
return {jobs, records, (not is_empty or #begun == most) and first + kept or -1}
