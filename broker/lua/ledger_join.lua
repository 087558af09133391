#!lua flags=allow-oom
-- Let a router use a ledger that it has filled: begin an epoch, unless another router has begun it, and hold the
-- reservations that the router has, and no others. Answers {epoch, number of the last call}. Further calls of it that
-- name the epoch which the first has answered add reservations.
--- @include "ledger"

local known, closed_ms, router = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local state = read_numbers(STATE, {'epoch', 'sequence'})
if ARGV[4] == 'first' then
  if state.epoch == 0 or state.epoch == known then
    state = {epoch = math.max(now, known + 1), opens_at = now + closed_ms, sequence = 0}
    write_fields(STATE, {'epoch', 'opens_at', 'sequence'}, state)
  end
  for _, id in ipairs(redis.call('SMEMBERS', LEDGER .. 'held:' .. router)) do
    local r = read_reservation(id)
    if r and r.open == 1 and r.router == router then
      release(r)
      redis.call('DEL', LEDGER .. 'of:' .. id)
    end
  end
  redis.call('DEL', LEDGER .. 'held:' .. router)
  redis.call('ZADD', ROUTERS, now + HELD_MS, router)
end
local JOINED = {'minute', 'day', 'month', 'used_input', 'used_output', 'paid_input', 'paid_output', 'charges', 'resumes',
  'sent'}
for first = 5, #ARGV, 17 do
  local id = ARGV[first]
  local function number(place) return tonumber(ARGV[first + place]) end
  if not read_reservation(id) then -- else another router has it by now
    local r = new_reservation(router, ARGV[first + 1], ARGV[first + 2])
    for i, field in ipairs(JOINED) do r[field] = number(6 + i) end
    r.open = 1
    hold_more(r, number(3), number(4), number(5), number(6))
    write_reservation(id, r)
  end
end
write_accounts()
return {string.format('%.0f', state.epoch), state.sequence}
