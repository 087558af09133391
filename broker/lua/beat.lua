#!lua flags=allow-oom
-- Record that a worker's incarnation lives, with its state. Answers the addresses of the live routers.
--- @include "keys"
--- @include "routers"

local incarnation, worker, state = ARGV[2], ARGV[3], ARGV[4]
redis.call('HSET', WORKERS, incarnation, worker)
redis.call('SET', PREFIX .. 'worker:' .. incarnation, state, 'PX', WORKER_TTL_MS)
return live_routers()
