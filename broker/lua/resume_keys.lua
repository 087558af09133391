#!lua flags=allow-oom
-- Bring a router's resume keys and the stored ones together; answers all stored keys, newest first. ARGV[1] is the key
-- that the router made for itself; the keys that it has used follow, newest first. A full Redis takes the few bytes too.
local stored = redis.call('LRANGE', KEYS[1], 0, -1)
if #stored == 0 then -- the first router, or Redis has lost its data
  for i = math.min(2, #ARGV), #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
  return redis.call('LRANGE', KEYS[1], 0, -1)
end
for i = 2, #ARGV do
  for _, key in ipairs(stored) do
    if key == ARGV[i] then return stored end
  end
end
-- None is known here: another router was first after a loss. Its key signs from now on, ours are still accepted.
for i = 2, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
redis.call('LTRIM', KEYS[1], 0, RESUME_KEYS_LIMIT - 1)
return redis.call('LRANGE', KEYS[1], 0, -1)
