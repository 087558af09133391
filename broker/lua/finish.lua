#!lua flags=allow-oom
-- Forget a job, up to an attempt: it waits no more, and its charges need no record.
--- @include "waiting_jobs"

local id, last_attempt = ARGV[2], tonumber(ARGV[3])
local waiting_attempt = redis.call('HGET', PREFIX .. 'job:' .. id, 'attempt')
if not waiting_attempt or tonumber(waiting_attempt) <= last_attempt then forget_job(id) end
flush_counts()

local charge_key = PREFIX .. 'charged:' .. id
local record = redis.call('GET', charge_key)
if record then
  local _, _, charged_attempt = cmsgpack.unpack(record)
  if charged_attempt <= last_attempt then redis.call('DEL', charge_key) end
end
