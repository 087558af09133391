#!lua flags=allow-oom
-- End a request's reservation with what was used of it. Idempotent. Answers {'settled', number of the call, counts of
-- charged accounts, the event of the charge or nothing}, or as why_wait.
--- @include "ledger"

local epoch, seen, id, router, facts = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local used_input, used_output = tonumber(ARGV[6]), tonumber(ARGV[7])
local waits, number = why_wait(epoch, seen)
if waits then return waits end

local event
local r = read_reservation(id)
if not r then -- as its router knows it; what that has renewed was charged when another one ended it
  r = new_reservation(router, ARGV[8], facts)
  r.minute, r.day, r.month, r.requests = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), 1
  r.paid_input, r.paid_output, r.charges = tonumber(ARGV[12]), tonumber(ARGV[13]), now
end
if r.router == router then
  if facts ~= '' then r.facts = facts end
  take_use(r, used_input, used_output)
  event = end_reservation(id, r)
elseif used_output > r.sent then -- sent to a client that had told less to another router, which makes it again
  event = charge(id, r, 0, used_output - r.sent)
  r.sent = used_output
  write_reservation(id, r)
end
-- The router may not have got the answer of an earlier call that charged this.
for name in each_account(r) do account_of(name) charged[name] = true end
return {'settled', number, write_accounts(), event}
