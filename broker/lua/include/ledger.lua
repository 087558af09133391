-- Accounts and reservations of the ledger; broker/ledger.py says what they mean.
--- @include "clock"

local LEDGER = 'lp:{ledger}:'
local STATE, ROUTERS, USAGE = LEDGER .. 'state', LEDGER .. 'routers', LEDGER .. 'usage'
local DAY_MS, MINUTE_MS = 86400000, 60000
-- Charges of an account, in the order of broker/ledger.py; then what open reservations hold beside them.
local COUNTS = {'minute', 'requests', 'input', 'output', 'day', 'day_tokens', 'month', 'month_tokens'}
local ACCOUNT = {'minute', 'requests', 'input', 'output', 'day', 'day_tokens', 'month', 'month_tokens', 'held_requests',
  'held_input', 'held_output', 'held_day_tokens', 'held_month_tokens', 'streams'}
-- Numbers of a reservation. `requests`, `held_input` and `held_output` are held in its accounts while it is open, and
-- `streams` is 1 while it has a place among the streams. The others count from the request's beginning: what is `used`
-- as far as the ledger knows, and what is `paid`, that is charged. The request was charged `charges` times and resumed
-- `resumes` times; its former routers have sent `sent` output tokens.
local NUMBERS = {'open', 'minute', 'day', 'month', 'requests', 'held_input', 'held_output', 'streams', 'used_input',
  'used_output', 'paid_input', 'paid_output', 'charges', 'resumes', 'sent'}
local RESERVATION = {'router', 'accounts', 'facts', unpack(NUMBERS)}
-- The accounts that this call has read, by name, and those in which it has charged something.
local accounts, charged = {}, {}

-- Return a number that these scripts can have written; else 0.
local function number_of(text)
  local number = tonumber(text)
  return number and number >= 0 and number < 2 ^ 53 and number or 0
end

-- Return a reservation of nothing.
local function new_reservation(router, accounts_of_it, facts)
  local r = {router = router, accounts = accounts_of_it, facts = facts}
  for _, field in ipairs(NUMBERS) do r[field] = 0 end
  return r
end

-- Return fields of a hash; none of a key of another type, which is renamed.
local function read_fields(key, fields)
  local values = redis.pcall('HMGET', key, unpack(fields))
  if not values.err then return values end
  redis.call('RENAME', key, key .. ':aside')
  redis.call('PEXPIRE', key .. ':aside', ASIDE_MS)
  return {}
end

-- Return the numbers of a hash; 0 for those that are missing.
local function read_numbers(key, fields)
  local values, read = read_fields(key, fields), {}
  for i, field in ipairs(fields) do read[field] = number_of(values[i]) end
  return read
end

local function write_fields(key, fields, values)
  local written = {}
  for _, field in ipairs(fields) do
    local value = values[field]
    written[#written + 1] = field
    written[#written + 1] = type(value) == 'number' and string.format('%.0f', value) or value
  end
  redis.call('HSET', key, unpack(written))
end

-- Return the number of a day's month since year 0 by UTC. Days count from 1970. (Howard Hinnant, chrono-Compatible
-- Low-Level Date Algorithms: civil_from_days.)
local function month_of(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local leap_days = math.floor(of_era / 1460) - math.floor(of_era / 36524) + math.floor(of_era / 146096)
  local year = math.floor((of_era - leap_days) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local march_month = math.floor((5 * of_year + 2) / 153)
  return (year + era * 400) * 12 + march_month + 2
end

-- Set an account's window to the current one, with `fields` begun anew where the former has passed. A window later than
-- now was begun by a clock that was ahead, and goes on as the current one.
local function turn(account, window, current, fields)
  if account[window] < current then
    for _, field in ipairs(fields) do account[field], account['held_' .. field] = 0, 0 end
  end
  account[window] = current
end

-- Return an account in its current windows.
local function account_of(name)
  if accounts[name] then return accounts[name] end
  local account, day = read_numbers(LEDGER .. 'account:' .. name, ACCOUNT), math.floor(now / DAY_MS)
  turn(account, 'minute', math.floor(now / MINUTE_MS), {'requests', 'input', 'output'})
  turn(account, 'day', day, {'day_tokens'})
  turn(account, 'month', month_of(day), {'month_tokens'})
  accounts[name] = account
  return account
end

local function each_account(r)
  return string.gmatch(r.accounts, '%S+')
end

-- Add to counts of an account, of those of a reservation's windows that have not passed; `prefix` is held_ or nothing.
local function add(account, r, prefix, requests, input, output)
  local function count(window, field, amount)
    if r[window] >= account[window] then account[prefix .. field] = math.max(0, account[prefix .. field] + amount) end
  end
  count('minute', 'requests', requests)
  count('minute', 'input', input)
  count('minute', 'output', output)
  count('day', 'day_tokens', input + output)
  count('month', 'month_tokens', input + output)
end

-- Hold more of a reservation's accounts, or less.
local function hold_more(r, requests, input, output, streams)
  for name in each_account(r) do
    local account = account_of(name)
    add(account, r, 'held_', requests, input, output)
    account.streams = math.max(0, account.streams + streams)
  end
  r.requests, r.held_input, r.held_output = r.requests + requests, r.held_input + input, r.held_output + output
  r.streams = r.streams + streams
end

-- Hold nothing of them any more.
local function release(r)
  local requests = r.requests
  hold_more(r, -requests, -r.held_input, -r.held_output, -r.streams)
  r.open, r.requests = 0, requests -- which is charged with the first token
end

local function read_reservation(id)
  local values = read_fields(LEDGER .. 'of:' .. id, RESERVATION)
  if not values[1] then return end
  local r = {router = values[1], accounts = values[2] or '', facts = values[3] or ''}
  for i, field in ipairs(NUMBERS) do r[field] = number_of(values[3 + i]) end
  return r
end

-- Keep a reservation: while it is open among those of its router, for which others end it; else for a while.
local function write_reservation(id, r)
  write_fields(LEDGER .. 'of:' .. id, RESERVATION, r)
  if r.open == 1 then
    redis.call('PERSIST', LEDGER .. 'of:' .. id)
    redis.call('SADD', LEDGER .. 'held:' .. r.router, id)
  else
    redis.call('PEXPIRE', LEDGER .. 'of:' .. id, ENDED_RECORD_MS)
  end
end

local function take_use(r, used_input, used_output)
  r.used_input, r.used_output = math.max(r.used_input, used_input), math.max(r.used_output, used_output)
end

-- Charge tokens of a reservation. Return the event of the charge, if there is one for its facts.
local function charge(id, r, input, output)
  if input + output <= 0 then return end
  for name in each_account(r) do
    add(account_of(name), r, '', r.requests, input, output)
    charged[name] = true
  end
  r.requests, r.charges = 0, r.charges + 1
  if r.facts == '' then return end
  local event = {'id', string.format('%s:%.0f', id, r.charges - 1), 'input', string.format('%.0f', input), 'output',
    string.format('%.0f', output), 'at_ms', string.format('%.0f', now), 'facts', r.facts}
  redis.call('XADD', USAGE, '*', unpack(event))
  return event
end

-- End a reservation, and charge what was used of it and is not paid yet: after an earlier end only what that did not know
-- of. Return the event of the charge.
local function end_reservation(id, r)
  if r.open == 1 then release(r) end
  redis.call('SREM', LEDGER .. 'held:' .. r.router, id)
  local event = charge(id, r, math.max(0, r.used_input - r.paid_input), math.max(0, r.used_output - r.paid_output))
  r.paid_input, r.paid_output = math.max(r.paid_input, r.used_input), math.max(r.paid_output, r.used_output)
  write_reservation(id, r)
  return event
end

-- Write the accounts, and return the counts of those in which something was charged: names, each before its counts.
local function write_accounts()
  local counts = {}
  for name, account in pairs(accounts) do
    write_fields(LEDGER .. 'account:' .. name, ACCOUNT, account)
    redis.call('PEXPIRE', LEDGER .. 'account:' .. name, ACCOUNT_MS)
    if charged[name] then
      counts[#counts + 1] = name
      for _, field in ipairs(COUNTS) do counts[#counts + 1] = account[field] end
    end
  end
  return counts
end

-- Return the answer to a router that must wait, given the epoch and the sequence number that it knows: {'behind', epoch}
-- where it has to tell this ledger what it knows first, {'closed', ms} while others may. Else count the call, and return
-- nothing and its number.
local function why_wait(epoch, sequence)
  local state = read_numbers(STATE, {'epoch', 'opens_at', 'sequence'})
  if state.epoch == 0 or state.epoch ~= epoch or state.sequence < sequence then
    return {'behind', string.format('%.0f', state.epoch)}
  end
  local closed_ms = state.opens_at - now
  if closed_ms > 0 and closed_ms <= RECOVERY_MS then return {'closed', closed_ms} end
  redis.call('HSET', STATE, 'sequence', string.format('%.0f', state.sequence + 1))
  return nil, state.sequence + 1
end
