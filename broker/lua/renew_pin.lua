#!lua flags=allow-oom
-- Replace a pin, unless it was unpinned meanwhile.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
