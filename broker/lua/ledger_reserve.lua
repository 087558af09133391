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

-- Let another router have the reservation; the former one learns of it when it renews.
local function move(r)
  redis.call('SREM', LEDGER .. 'moved:' .. router, id)
  if r.router ~= router and r.open == 1 then
    redis.call('SREM', LEDGER .. 'held:' .. r.router, id)
    redis.call('SADD', LEDGER .. 'moved:' .. r.router, id)
    redis.call('PEXPIRE', LEDGER .. 'moved:' .. r.router, ENDED_RECORD_MS)
  end
  r.router = router
end

local r = read_reservation(id)
if r and received < 0 then -- the same call again, or one that has ended before this server got to it
  if r.open == 1 then move(r) end
  return granted(r)
end
local is_known, listed, repeated_before = r ~= nil, table.concat(names, ' '), nil
-- What is held from now on, beside what is held already; `place` is 1 for a further stream.
local requests, more_input, more_output, place = 1, input, output, 1
if is_known then
  requests, more_input = 0, 0
  if r.resumes >= FREE_RESUMES then requests, more_input = 1, input + received end
  repeated_before = account_of(names[1]).repeated
  local again = charged_again(r, math.max(0, r.used_output - received))
  -- Its prompt was computed, or is now.
  take_use(r, r.paid_input + r.held_input, received)
  if r.open == 1 and r.accounts ~= listed then end_reservation(id, r) end
  if r.open == 1 then
    more_output, place = again, 1 - r.streams
  else
    more_output, requests, r.requests = math.max(0, output - r.used_output) + again, requests + r.requests, 0
  end
  r.again, r.told, r.resumes, r.used_input = r.again + again, r.used_output, r.resumes + 1, r.used_input + more_input
else
  r = new_reservation(router, listed, facts)
  if received >= 0 then -- nothing is known of it any more: what its client has is a prompt, and is computed again
    more_input, more_output = input > 0 and input + received or 0, math.max(0, output - received)
    r.used_output, r.paid_output, r.told, r.resumes = received, received, received, 1
  end
end

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

local was_open = r.open == 1
for _, name in ipairs(names) do
  local account = account_of(name)
  local minute_ms, both = (account.minute + 1) * MINUTE_MS - now, more_input + more_output
  check(name, account, 'requests', requests, minute_ms)
  check(name, account, 'input', more_input, minute_ms)
  check(name, account, 'output', more_output, minute_ms)
  check(name, account, 'day_tokens', both, (account.day + 1) * DAY_MS - now)
  check(name, account, 'month_tokens', both, to_next_month(account))
  -- A request that is resumed in time has its former place, or one of as many again.
  local most = limits[name].streams * (was_open and 2 or 1)
  if most >= 0 and place == 1 and account.streams >= most then
    refuse(name, 'streams', most == 0 and -1 or STREAM_RETRY_MS)
  end
  if not was_open then r.minute, r.day, r.month = account.minute, account.day, account.month end
end
if limit then
  if repeated_before then account_of(names[1]).repeated = repeated_before end
  return {'refused', number, next(charged) and write_accounts() or {}, limit_account, limit, wait_ms}
end
move(r)
r.accounts, r.facts, r.open = listed, facts, 1
hold_more(r, requests, more_input, more_output, place)
return granted(r)
