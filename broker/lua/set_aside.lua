#!lua flags=allow-oom
-- Rename a key that has another type than ARGV[1], so that it is begun anew; the renamed key, ARGV[2], expires. Answers the
-- type that was found, '' where nothing is to be done: another router was first.
local found = redis.call('TYPE', KEYS[1]).ok
if found == ARGV[1] or found == 'none' then return '' end
redis.call('RENAME', KEYS[1], ARGV[2])
redis.call('PEXPIRE', ARGV[2], ASIDE_MS)
return found
