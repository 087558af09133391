#!lua flags=allow-oom
-- Record that a worker's incarnation lives, with its state, for so many ms. Answers the addresses of the live routers.
--- @include "keys"
--- @include "routers"

local incarnation, worker, state, ttl_ms = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
redis.call('HSET', WORKERS, incarnation, worker)
redis.call('SET', PREFIX .. 'worker:' .. incarnation, state, 'PX', ttl_ms)
return live_routers()
