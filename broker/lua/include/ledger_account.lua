-- A tenant's account and its reservations; broker/ledger.py says what they mean. ARGV[1] is the prefix of their keys.
--- @include "clock"
--- @include "packed"

local PREFIX = ARGV[1]
local ACCOUNT = PREFIX .. 'account'
local HELD = PREFIX .. 'held'
local STREAMS = PREFIX .. 'streams'
local UNREPORTED = PREFIX .. 'unreported'
local FIELDS = {'epoch', 'version', 'minute', 'requests', 'input', 'output', 'day', 'day_tokens', 'month', 'month_tokens'}
local DAY_MS, MINUTE_MS = 86400000, 60000

-- Return the number of a day's month since year 0, and of the first day of the month after it, both by UTC. Days count
-- from 1970. (Howard Hinnant, chrono-Compatible Low-Level Date Algorithms: civil_from_days, days_from_civil.)
local function month_of(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local leap_days = math.floor(of_era / 1460) - math.floor(of_era / 36524) + math.floor(of_era / 146096)
  local year_of_era = math.floor((of_era - leap_days) / 365)
  local of_year = of_era - (365 * year_of_era + math.floor(year_of_era / 4) - math.floor(year_of_era / 100))
  local march_month = math.floor((5 * of_year + 2) / 153)
  local month = march_month < 10 and march_month + 3 or march_month - 9
  local year = year_of_era + era * 400 + (month <= 2 and 1 or 0)
  return year * 12 + month - 1
end

local function first_day_of(month)
  local year, of_year = math.floor(month / 12), month % 12 + 1
  if of_year <= 2 then year = year - 1 end
  local era = math.floor(year / 400)
  local year_of_era = year - era * 400
  local days = math.floor((153 * (of_year + (of_year > 2 and -3 or 9)) + 2) / 5)
  return era * 146097 + year_of_era * 365 + math.floor(year_of_era / 4) - math.floor(year_of_era / 100) + days - 719468
end

-- Return an account as it is. Raises an error on one that these scripts cannot have packed.
local function checked_account(account)
  local sum = account.born
  for _, field in ipairs(FIELDS) do
    if not (account[field] >= 0) then error('unreadable') end
    sum = sum + account[field]
  end
  if sum + (account.looked or 0) + (account.sweep_at or 0) + (account.repeated or 0) < math.huge then return account end
  error('unreadable')
end

-- Read the account, made now where it is missing or cannot be read, with the counts of windows that have passed set back.
local function read_account()
  local is_readable, account = read_packed(checked_account, redis.pcall('GET', ACCOUNT))
  if not is_readable then
    account = {born = now}
    for _, field in ipairs(FIELDS) do account[field] = 0 end
    account.epoch = now
  end
  local minute, day = math.floor(now / MINUTE_MS), math.floor(now / DAY_MS)
  if account.minute < minute then account.minute, account.requests, account.input, account.output = minute, 0, 0, 0 end
  if account.day < day then
    account.day, account.day_tokens, account.repeated = day, 0, 0
    local month = month_of(day)
    if account.month < month then account.month, account.month_tokens = month, 0 end
  end
  return account
end

local function write_account(account)
  account.version = account.version + 1
  redis.call('SET', ACCOUNT, cmsgpack.pack(account), 'KEEPTTL')
end

-- Return the account's fields in their order, between a first value and further ones.
local function answer(first, account, ...)
  local values = {first}
  for _, field in ipairs(FIELDS) do values[#values + 1] = account[field] end
  for _, value in ipairs({...}) do values[#values + 1] = value end
  return values
end

-- Tell whether a router has seen the account at a later state than this one: Redis has lost data.
local function is_behind(account, seen_epoch, seen_version)
  return seen_epoch > 0 and (account.epoch ~= seen_epoch or account.version < seen_version)
end

-- Add to the counts of those windows of a reservation that have not passed.
local function add(account, reservation, requests, input, output)
  if reservation.minute == account.minute then
    account.requests = math.max(0, account.requests + requests)
    account.input, account.output = math.max(0, account.input + input), math.max(0, account.output + output)
  end
  if reservation.day == account.day then account.day_tokens = math.max(0, account.day_tokens + input + output) end
  if reservation.month == account.month then account.month_tokens = math.max(0, account.month_tokens + input + output) end
end

-- Reservations. `state` is 'open', 'ended' or 'finished'; `input` and `output` are what the account has of it now, and
-- `used_input` and `used_output` what has come of it; `base` are output tokens of the request that others stand for, and
-- `again` those that are charged a second time. It was resumed `resumes` times, the last time after `told` output tokens.
local function checked_reservation(state, owner, part, base, requests, input, output, used_input, used_output, minute, day,
    month, subject, again, told, resumes)
  subject, again, told, resumes = subject or '', again or 0, told or 0, resumes or 0
  if state >= '' and owner >= '' and subject >= '' and part >= 0 and base >= 0 and requests >= 0 and input >= 0
      and output >= 0 and used_input >= 0 and used_output >= 0 and again >= 0 and told >= 0 and resumes >= 0
      and part + base + requests + input + output + used_input + used_output + minute + day + month + again + told
      + resumes < math.huge then
    return {state = state, owner = owner, part = part, base = base, requests = requests, input = input, output = output,
      used_input = used_input, used_output = used_output, minute = minute, day = day, month = month, subject = subject,
      again = again, told = told, resumes = resumes}
  end
  error('unreadable')
end

-- Return a reservation; nil where there is none that can be read.
local function read_reservation(id)
  local is_readable, r = read_packed(checked_reservation, redis.pcall('GET', PREFIX .. 'of:' .. id))
  return is_readable and r or nil
end

local function write_reservation(id, r)
  local packed = cmsgpack.pack(r.state, r.owner, r.part, r.base, r.requests, r.input, r.output, r.used_input, r.used_output,
    r.minute, r.day, r.month, r.subject, r.again, r.told, r.resumes)
  redis.call('SET', PREFIX .. 'of:' .. id, packed, 'PX', r.state == 'open' and OPEN_RECORD_MS or ENDED_RECORD_MS)
end

-- Count output tokens of a request that are made again, since its client says that it has not got them. Return how many
-- of them are charged again: those beyond what the account has free in a day.
local function charged_again(account, tokens)
  local repeated = (account.repeated or 0) + tokens
  if repeated > REPEATED_TOKENS + account.day_tokens * REPEATED_PERCENT / 100 then return tokens end
  account.repeated = repeated
  return 0
end

-- End a reservation: the account then has what was used of it. A second end adds what the first did not know of. With
-- `reports` answers the field and value of the charge, which is kept until a router has written its usage event.
local function end_reservation(account, id, r, state, reports)
  local output = math.max(0, r.used_output - r.base) + r.again
  local requests = (r.used_input > 0 or output > 0) and r.requests or 0
  add(account, r, requests - r.requests, r.used_input - r.input, output - r.output)
  r.state, r.requests, r.input, r.output = r.state == 'finished' and r.state or state, requests, r.used_input, output
  write_reservation(id, r)
  redis.call('ZREM', HELD, id)
  redis.call('ZREM', STREAMS, id)
  if not reports or r.used_input + output == 0 then return end
  local charge = string.format('%s:%.0f', id, r.part)
  local value = cjson.encode({input = r.used_input, output = output, at_ms = now, subject = r.subject})
  redis.call('HSET', UNREPORTED, charge, value)
  return charge, value
end
