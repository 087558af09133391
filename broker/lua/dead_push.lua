#!lua flags=allow-oom
-- Keep a dead letter in the list KEYS[1], the newest first; the oldest are dropped where there are more than
-- `max_records` or they take more than `max_bytes`. A record that equals the newest, a repeated call, is not kept again.
local record, max_records, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if redis.call('LINDEX', KEYS[1], 0) == record then return 0 end
redis.call('LPUSH', KEYS[1], record)
local bytes_left = max_bytes
for position, kept in ipairs(redis.call('LRANGE', KEYS[1], 0, max_records)) do
  bytes_left = bytes_left - #kept
  if position > 1 and (position > max_records or bytes_left < 0) then
    redis.call('LTRIM', KEYS[1], 0, position - 2)
    break
  end
end
return 1
