#!lua flags=allow-oom
-- Record that a worker's incarnation lives no more.
--- @include "workers"

local incarnation = ARGV[2]
local worker = redis.call('HGET', WORKERS, incarnation)
redis.call('DEL', PREFIX .. 'worker:' .. incarnation)
redis.call('HDEL', WORKERS, incarnation)
if worker then clear_free_rows(worker) end
