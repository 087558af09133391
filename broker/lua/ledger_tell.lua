#!lua flags=allow-oom
-- Take over what a router tells of its reservations: what was used of them, and which have ended. With `renews`,
-- reservations of routers that have not called for HELD_MS end. With `fills` the router tells a ledger that has lost data
-- of `accounts` and `events`, and at last `begins` to use it, closed if it `closes`. Answers with how many reservations
-- were ended, and the holders whose requests others have by now; also with the time for which the ledger is closed, in
-- which nothing ends.
--- @include "ledger"

if is_behind and not message.fills then return cmsgpack.pack({behind = true}) end
-- Of two counts the higher one holds, because charges only grow in their window.
for _, saved in ipairs(message.accounts) do
  local account = account_of(saved.name)
  for field, window in pairs(COUNTS) do
    if saved[field] and saved[window] >= account[window] then account[field] = math.max(account[field], saved[field]) end
  end
end
for _, event in ipairs(message.events) do add_event(event) end
if message.begins then -- it tells next of all reservations that it has
  for _, r in ipairs(open_of(message.router, redis.call('SCARD', held_by(message.router)))) do
    release(r)
    redis.call('DEL', LEDGER .. 'of:' .. r.id)
  end
  if closed_ms == 0 then
    closed_ms = message.closes and RECOVERY_MS or 0
    redis.call('SET', STATE, now + closed_ms)
  end
end
local routers, latest = message.renews and closed_ms == 0 and redis.call('HGETALL', ROUTERS) or {}, 0
for i = 2, #routers, 2 do latest = math.max(latest, tonumber(string.match(routers[i], ' (%d+)$') or 0)) end
if message.begins or not message.fills then count_call() end

local moved, ended = {}, 0
for _, told in ipairs(message.reservations) do
  local is_open, r = told.open or closed_ms > 0, record_of(told)
  if r == told then
    r.open = true
    if told.known_input >= 0 then -- another has ended it, with what it knew, and that is forgotten
      r.paid_input, r.paid_output, r.charges = told.known_input, told.known_output, now
    end
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
    moved[#moved + 1] = told.holder
    if not is_open and told.used_output > r.sent then -- sent to a client that told less to another router
      charge(r, 0, told.used_output - r.sent)
      r.sent = told.used_output
      write(r)
    end
  end
end

for i = 1, #routers, 2 do
  local router, calls, until_ms = routers[i], string.match(routers[i + 1], '^(%d+) (%d+)$')
  local expires = tonumber(until_ms or 0)
  -- While nobody has renewed anything, as when Redis was away, nothing ends: all get their full time again. A time later
  -- than that is of a clock that was ahead.
  if latest <= now or expires > now + HELD_MS then expires = now + HELD_MS end
  if router ~= message.router then
    if expires <= now then
      for _, r in ipairs(open_of(router, EXPIRED_AT_ONCE - ended)) do
        settle(r)
        write(r)
        ended = ended + 1
      end
      if redis.call('EXISTS', held_by(router)) == 1 then expires = now end
    end
    if not calls or expires < now - DAY_MS then
      redis.call('HDEL', ROUTERS, router)
    elseif expires ~= tonumber(until_ms) then
      redis.call('HSET', ROUTERS, router, string.format('%s %.0f', calls, expires))
    end
  end
end
return reply({ended = ended, moved = moved, closed_ms = closed_ms})
