#!lua flags=allow-oom
-- End a request's reservation, or with 'left' leave it to be resumed for a while. Idempotent. Answers the account behind
-- 'settled' or 'other' where another router has the request by now, then the charge to report, if any; or {'behind'}.
--- @include "ledger_account"
--- @include "given_reservation"

local state, account = ARGV[2], read_account()
local id, given = given_reservation(6)
local charge, value
local r = read_reservation(id)
if not r then
  if is_behind(account, tonumber(ARGV[3]), tonumber(ARGV[4])) then return {'behind'} end
  r = given
  -- Nothing is held for a call that ended before its reservation came: the account has nothing of it.
  if state == 'left' and r.day == 0 then return answer('settled', account) end
end
if r.owner ~= given.owner then
  -- Tokens that this router sent after those that the client named to the other router: that one makes them again.
  local late = given.used_output - r.told
  if late > 0 then
    r.told = given.used_output
    local again = charged_again(account, late)
    r.again = r.again + again
    if again > 0 and r.state ~= 'open' then
      end_reservation(account, id, r, r.state, ARGV[5] == '1')
    else
      r.output = r.output + again
      add(account, r, 0, 0, again)
      write_reservation(id, r)
    end
    write_account(account)
  end
  return answer('other', account)
end
if r.part ~= given.part then return answer('other', account) end
take_use(r, given)
if state == 'left' and r.state == 'open' then
  write_reservation(id, r)
  redis.call('ZADD', HELD, now + LINGER_MS, id)
  redis.call('ZREM', STREAMS, id)
else
  charge, value = end_reservation(account, id, r, state == 'finished' and state or 'ended', ARGV[5] == '1')
end
write_account(account)
return answer('settled', account, charge, value)
