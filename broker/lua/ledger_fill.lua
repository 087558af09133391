#!lua flags=allow-oom
-- Let a router use a ledger that is new to it, or has lost data: take over the charges of accounts and the events that it
-- knows. A count is the higher of both, because it only grows in its window. With `begins`, which comes last but for
-- further reservations, hold those that the router has, and no others.
--- @include "ledger"

for _, saved in ipairs(message.accounts) do
  local account = account_of(saved.name)
  for field, window in pairs(COUNTS) do
    if saved[field] and saved[window] >= account[window] then account[field] = math.max(account[field], saved[field]) end
  end
end
if message.begins then
  -- A ledger that has lost data is closed for a while, in which all routers find that out.
  -- A time of opening that is too late is of a clock that was ahead.
  if not opens_at or number and (opens_at <= now or opens_at > now + RECOVERY_MS) then
    redis.call('SET', STATE, now + message.closed_ms)
  end
  count_call(now + HELD_MS)
  for _, id in ipairs(redis.call('SMEMBERS', held_by(message.router))) do
    local r = reservation_of(id)
    if r.open and held_by(r.holder) == held_by(message.router) then
      release(r)
      redis.call('DEL', LEDGER .. 'of:' .. id)
    end
  end
  redis.call('DEL', held_by(message.router))
end
for _, told in ipairs(message.reservations) do
  local r = record_of(told)
  r.open = r.open or r == told
  write(r)
end
events = message.events
reply({})
return cmsgpack.pack({number = tonumber(number or 0)})
