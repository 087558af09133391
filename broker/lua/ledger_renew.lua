#!lua flags=allow-oom
-- Keep a router's reservations, take over what was used of some, and end those of routers that have not renewed theirs for
-- HELD_MS. Answers {'renewed', number of the call, counts of charged accounts, how many were ended, ids of those
-- reservations that other routers have by now}, or as why_wait.
--- @include "ledger"

local epoch, seen, router = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local waits, number = why_wait(epoch, seen)
if waits then return waits end

-- While nobody has renewed anything, as when Redis was away, nothing ends: all get their full time again. A time later
-- than that is of a clock that was ahead.
local latest = redis.call('ZRANGE', ROUTERS, -1, -1, 'WITHSCORES')[2]
local is_anew = latest and tonumber(latest) <= now
for _, other in ipairs(redis.call('ZRANGEBYSCORE', ROUTERS, is_anew and '-inf' or now + HELD_MS, '+inf')) do
  redis.call('ZADD', ROUTERS, now + HELD_MS, other)
end
redis.call('ZADD', ROUTERS, now + HELD_MS, router)

local ended, moved = 0, {}
for i = 4, #ARGV, 5 do
  local id = ARGV[i]
  local r = read_reservation(id)
  if r and r.open == 1 and r.router == router then
    take_use(r, tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
    if ARGV[i + 3] == '0' then hold_more(r, 0, 0, 0, -r.streams) end -- its call has ended; it may be resumed
    if ARGV[i + 4] ~= '' then r.facts = ARGV[i + 4] end
    write_reservation(id, r)
  elseif r and r.router ~= router then
    moved[#moved + 1] = id
  end
end

for _, dead in ipairs(redis.call('ZRANGEBYSCORE', ROUTERS, '-inf', now)) do
  local ids = redis.call('SRANDMEMBER', LEDGER .. 'held:' .. dead, EXPIRED_AT_ONCE - ended)
  for _, id in ipairs(ids) do
    local r = read_reservation(id)
    if r and r.open == 1 and r.router == dead then
      end_reservation(id, r)
      ended = ended + 1
    else
      redis.call('SREM', LEDGER .. 'held:' .. dead, id)
    end
  end
  if ended >= EXPIRED_AT_ONCE then break end
  if redis.call('SCARD', LEDGER .. 'held:' .. dead) == 0 then redis.call('ZREM', ROUTERS, dead) end
end
return {'renewed', number, write_accounts(), ended, moved}
