#!lua flags=allow-oom
-- Forget a job, up to an attempt: it waits no more, and its charges need no record.
--- @include "waiting_jobs"

local id, last_attempt = ARGV[2], tonumber(ARGV[3])
local key = PREFIX .. 'job:' .. id
local waiting_attempt = redis.call('HGET', key, 'attempt')
if not waiting_attempt then -- claimed; or displaced, which has left a mark; or the key was lost
  redis.call('DEL', key)
  redis.call('ZREM', WAITING, id)
elseif tonumber(waiting_attempt) <= last_attempt then
  forget_job(id)
  flush_counts()
end

local charge_key = PREFIX .. 'charged:' .. id
local record = redis.call('GET', charge_key)
if record then
  local _, _, charged_attempt = cmsgpack.unpack(record)
  if charged_attempt <= last_attempt then redis.call('DEL', charge_key) end
end
