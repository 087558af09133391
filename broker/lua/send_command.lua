#!lua flags=allow-oom
-- Add an operator's command to the list KEYS[1] for so many ms. Of more than `max_commands` the oldest are dropped.
local command, max_commands, ttl_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]

if redis.call('RPUSH', KEYS[1], command) > max_commands then redis.call('LTRIM', KEYS[1], -max_commands, -1) end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
