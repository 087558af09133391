#!lua flags=allow-oom
-- Replace the body and the adapter request of a waiting attempt, unless it was claimed or replaced meanwhile.
if redis.pcall('HGET', KEYS[1], 'attempt') == ARGV[1] then redis.call('HSET', KEYS[1], 'body', ARGV[2], 'wanted', ARGV[3]) end
