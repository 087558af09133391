#!lua flags=allow-oom
-- Forget a job, up to an attempt: it waits no more, and its charges need no record.
--- @include "waiting_jobs"
--- @include "charges"

local id, last_attempt = ARGV[2], tonumber(ARGV[3])
local key = PREFIX .. 'job:' .. id
local waiting_attempt = hash_fields(key, 'attempt')[1]
if not waiting_attempt then -- claimed; or displaced, which has left a mark; or the key was lost
  redis.call('DEL', key)
  redis.call('ZREM', WAITING, id)
elseif number_of(waiting_attempt) <= last_attempt then
  forget_job(id)
  flush_counts()
end

forget_charges(id, last_attempt)
