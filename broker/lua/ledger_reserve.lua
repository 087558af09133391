#!lua
-- Reserve tokens for a request in its accounts, or go on with its reservation where it is resumed. Answers {'granted',
-- number of the call, counts of charged accounts, the reservation's NUMBERS}, {'refused', number, counts, account, limit,
-- ms until there is room, or -1: never}, or as why_wait.
--- @include "ledger"

local epoch, seen, id, router, facts = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
-- `received`: output tokens that the client of a resumed request has; -1: a new request.
local input, output, received = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
-- The limits in the order of broker/ledger.py, by what they limit.
local LIMITS = {'streams', 'requests', 'input', 'output', 'day_tokens', 'month_tokens'}
local names, limits = {}, {}
for i = 9, #ARGV, 7 do
  names[#names + 1] = ARGV[i]
  limits[ARGV[i]] = {}
  for place, limit in ipairs(LIMITS) do limits[ARGV[i]][limit] = tonumber(ARGV[i + place]) end
end
local waits, number = why_wait(epoch, seen)
if waits then return waits end

local function granted(r)
  if r.open == 1 then write_reservation(id, r) end
  local numbers = {}
  for i, field in ipairs(NUMBERS) do numbers[i] = r[field] end
  return {'granted', number, write_accounts(), numbers}
end

local r, listed = read_reservation(id), table.concat(names, ' ')
if r and received < 0 then -- the same call again, or one that has ended before this server got to it
  if r.open == 1 then
    redis.call('SREM', LEDGER .. 'held:' .. r.router, id)
    r.router = router
  end
  return granted(r)
end
-- `input` and `output` become what is held from now on. Of an open reservation that is resumed `held_input` and
-- `held_output` tokens are held already, in the windows that it has.
local is_known, was_open, requests, held_input, held_output, place = r ~= nil, false, 1, 0, 0, 1
if is_known then
  was_open = r.open == 1 and r.accounts == listed
  r.used_output = math.max(r.used_output, received)
  if r.used_output > 0 then r.used_input = r.paid_input + r.held_input end -- its prompt was computed
  if was_open then
    r.facts = facts
    held_input = r.held_input - (r.used_input - r.paid_input)
    held_output, place = r.held_output - (r.used_output - r.paid_output), 1 - r.streams
  end
  end_reservation(id, r)
  requests, input = r.requests, r.resumes >= FREE_RESUMES and input > 0 and input + received or held_input
  if r.resumes >= FREE_RESUMES then requests = 1 end
  -- Tokens that its client has not got are made again, and charged again.
  r.sent, r.used_output, r.paid_output = math.max(r.sent, r.used_output), received, received
else
  r = new_reservation(router, listed, facts)
  if received >= 0 then -- nothing is known of it any more: what its client has is a prompt, and is computed again
    r.used_output, r.paid_output, r.sent = received, received, received
    r.charges = now -- its events have ids that no earlier ones have
    input = input > 0 and input + received or 0
  end
end
if received >= 0 then output, r.resumes = math.max(0, output - received), r.resumes + 1 end

-- The refusal whose room comes last.
local limit_account, limit, wait_ms = nil, nil, 0
local function refuse(name, field, ms)
  if ms > wait_ms and wait_ms >= 0 or ms < 0 then limit_account, limit, wait_ms = name, field, ms end
end

local function check(name, account, field, amount, window_ms)
  local most = limits[name][field]
  if most < 0 or amount == 0 or account[field] + account['held_' .. field] + amount <= most then return end
  refuse(name, field, amount > most and -1 or window_ms)
end

-- Return the time in ms until the current month ends.
local function to_next_month(account)
  local day = account.day + 1
  while month_of(day) == account.month do day = day + 1 end
  return day * DAY_MS - now
end

local more_input, more_output = math.max(0, input - held_input), math.max(0, output - held_output)
for _, name in ipairs(names) do
  local account = account_of(name)
  local minute_ms = (account.minute + 1) * MINUTE_MS - now
  check(name, account, 'requests', requests, minute_ms)
  check(name, account, 'input', more_input, minute_ms)
  check(name, account, 'output', more_output, minute_ms)
  check(name, account, 'day_tokens', more_input + more_output, (account.day + 1) * DAY_MS - now)
  check(name, account, 'month_tokens', more_input + more_output, to_next_month(account))
  -- A request that is resumed in time has its former place, or one of as many again.
  local most = limits[name].streams * (was_open and 2 or 1)
  if most >= 0 and place == 1 and account.streams >= most then
    refuse(name, 'streams', most == 0 and -1 or STREAM_RETRY_MS)
  end
  if not was_open then r.minute, r.day, r.month = account.minute, account.day, account.month end
end
if limit then return {'refused', number, is_known and write_accounts() or {}, limit_account, limit, wait_ms} end
r.router, r.accounts, r.facts, r.open, r.requests = router, listed, facts, 1, 0
hold_more(r, requests, input, output, 1)
return granted(r)
