-- Keys of another type than broker/keys.py names: something else has written them, and a script that reads one fails.
--- @include "keys"

-- Rename a key that has another type than `wanted`, so that the scripts begin it anew, and note it for the next census. The
-- renamed key expires. Does nothing for a user that may not ask for types.
local function set_aside_unless(wanted, name)
  local found = redis.pcall('TYPE', PREFIX .. name).ok
  if not found or found == wanted or found == 'none' then return end
  redis.call('RENAME', PREFIX .. name, ASIDE .. ':' .. name)
  redis.call('PEXPIRE', ASIDE .. ':' .. name, ASIDE_MS)
  redis.call('HSET', ASIDE, name, found)
end
