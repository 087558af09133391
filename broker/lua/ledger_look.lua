#!lua flags=allow-oom
-- Bring a router's copy of an account and the account together, renew the router's reservations, and end those that no
-- router has renewed. Answers the account behind 'seen', then how many were ended, 1 where the copy was taken over, the
-- ids of those of its reservations that another router has by now, and the charges that no router has reported for a
-- while, as names and values in turn.
--- @include "ledger_account"
--- @include "given_reservation"

local account, copy = read_account(), {}
local refilled, expired, moved, charges = 0, 0, {}, {}
for i, field in ipairs(FIELDS) do copy[field] = tonumber(ARGV[1 + i]) end
local reservations, reports = tonumber(ARGV[12]), ARGV[13] == '1'

-- Tell whether a charge has waited for its report for long. Raises an error on one that no script can have written.
local function is_charge_late(value)
  local charge = cjson.decode(value)
  local is_whole = charge.input >= 0 and charge.output >= 0 and charge.input + charge.output < math.huge
  if is_whole and charge.subject >= '' and charge.at_ms >= 0 then return charge.at_ms + REPORT_AFTER_MS <= now end
  error('unreadable')
end

-- Take over the copy: a count is the higher of both, so that nothing that was granted is granted again.
if is_behind(account, copy.epoch, copy.version) then
  local function higher(window, ...)
    for _, field in ipairs({...}) do
      if copy[window] == account[window] then account[field] = math.max(account[field], copy[field]) end
    end
  end
  higher('minute', 'requests', 'input', 'output')
  higher('day', 'day_tokens')
  higher('month', 'month_tokens')
  account.epoch, account.version = math.max(account.epoch, copy.epoch), math.max(account.version, copy.version)
  refilled = 1
end

for first = 14, 13 + reservations * GIVEN, GIVEN do
  local id, given = given_reservation(first)
  local r = read_reservation(id) or given
  if r.state == 'open' and r.owner == given.owner and r.part == given.part then
    take_use(r, given)
    write_reservation(id, r)
    redis.call('ZADD', HELD, now + HELD_MS, id)
    redis.call('ZADD', STREAMS, now + HELD_MS, id)
  elseif r.owner ~= given.owner then
    moved[#moved + 1] = id
  end
end

-- After a while without looks, as when Redis was away, routers get the time to renew theirs before any is ended.
if now - (account.looked or now) > HELD_MS / 2 then account.sweep_at = now + HELD_MS end
account.looked = now
local late = now >= (account.sweep_at or 0) and redis.call('ZRANGEBYSCORE', HELD, '-inf', now, 'LIMIT', 0, EXPIRED_PER_LOOK)
for _, id in ipairs(late or {}) do
  local r = read_reservation(id)
  if r and r.state == 'open' then
    end_reservation(account, id, r, 'ended', reports)
    expired = expired + 1
  else
    redis.call('ZREM', HELD, id)
  end
end
write_account(account)
redis.call('PEXPIRE', ACCOUNT, ACCOUNT_MS)
local drawn = reports and redis.call('HRANDFIELD', UNREPORTED, CHARGES_PER_LOOK, 'WITHVALUES') or {}
for i = 1, #drawn, 2 do
  local is_readable, is_late = pcall(is_charge_late, drawn[i + 1])
  if not is_readable then
    redis.call('HDEL', UNREPORTED, drawn[i])
  elseif is_late then
    charges[#charges + 1], charges[#charges + 2] = drawn[i], drawn[i + 1]
  end
end
return answer('seen', account, expired, refilled, moved, charges)
