#!lua flags=allow-oom
-- Take over what a router tells of its reservations: what was used of them, and which have ended. With `renews`, it has
-- all of its reservations for HELD_MS more, and those of routers that have not renewed theirs end. Answers with how many
-- were ended, and the places of those that others have by now.
--- @include "ledger"

local waits = why_wait()
if waits then return waits end
local routers, latest = message.renews and redis.call('HGETALL', ROUTERS) or {}, 0
for i = 2, #routers, 2 do latest = math.max(latest, tonumber(string.match(routers[i], ' (%d+)$') or 0)) end
count_call(message.renews and now + HELD_MS or tonumber(lease_ms))

local moved, ended = {}, 0
for place, told in ipairs(message.reservations) do
  local is_open = told.open
  local r = record_of(told)
  if r == told then -- another has ended it, with what it knew, and that is forgotten
    r.paid_input, r.paid_output, r.charges, r.open = told.known_input, told.known_output, now, true
  end
  if r.holder == told.holder then
    r.used_input, r.used_output = math.max(r.used_input, told.used_input), math.max(r.used_output, told.used_output)
    if told.facts ~= '' then r.facts = told.facts end
    if told.streams < r.streams then -- its call has ended; it may be resumed
      add(r, 'held_', 0, 0, 0, -1)
      r.streams = 0
    end
    if not is_open then settle(r) end
    write(r)
  else
    moved[#moved + 1] = place - 1
    if not is_open and told.used_output > r.sent then -- sent to a client that told less to another router
      charge(r, 0, told.used_output - r.sent)
      r.sent = told.used_output
      write(r)
    end
  end
end

-- End reservations of a router that died; return whether there are more.
local function end_some(router)
  for _, id in ipairs(redis.call('SRANDMEMBER', held_by(router), EXPIRED_AT_ONCE - ended)) do
    local r = reservation_of(id)
    if r.open and held_by(r.holder) == held_by(router) then
      settle(r)
      write(r)
      ended = ended + 1
    else
      redis.call('SREM', held_by(router), id)
    end
  end
  return redis.call('SCARD', held_by(router)) > 0
end

for i = 1, #routers, 2 do
  local router, calls, until_ms = routers[i], string.match(routers[i + 1], '^(%d+) (%d+)$')
  local expires = tonumber(until_ms or 0)
  -- While nobody has renewed anything, as when Redis was away, nothing ends: all get their full time again. A time later
  -- than that is of a clock that was ahead.
  if latest <= now or expires > now + HELD_MS then expires = now + HELD_MS end
  local is_dead = router ~= message.router and expires <= now
  if is_dead and redis.call('EXISTS', held_by(router)) == 1 and end_some(router) then expires = now end
  if not calls or expires < now - DAY_MS then
    redis.call('HDEL', ROUTERS, router)
  elseif router ~= message.router and expires ~= tonumber(until_ms) then
    redis.call('HSET', ROUTERS, router, string.format('%s %.0f', calls, expires))
  end
end
return reply({ended = ended, moved = moved})
