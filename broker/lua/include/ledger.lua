-- Accounts and reservations of the ledger; broker/ledger.py says what they mean. Calls, answers and values are packed.
--- @include "clock"

local LEDGER, DAY_MS, MINUTE_MS = 'lp:{ledger}:', 86400000, 60000
local STATE, ROUTERS, USAGE = LEDGER .. 'state', LEDGER .. 'routers', LEDGER .. 'usage'
-- What an account counts, each in a window; under held_ and such a name is what open reservations hold beside it.
local COUNTS = {streams = 'ever', requests = 'minute', input_tokens = 'minute', output_tokens = 'minute',
  day_tokens = 'day', month_tokens = 'month'}
local ACCOUNT = {ever = 0, minute = 0, day = 0, month = 0}
for field in pairs(COUNTS) do ACCOUNT[field], ACCOUNT['held_' .. field] = 0, 0 end
-- `requests`, `input`, `output` and `streams` are held in the accounts. The others count from the request's beginning:
-- what is `used` as far as the ledger knows, and what is `paid`, that is charged. The request was charged `charges` times
-- and resumed `resumes` times; its former holders have sent `sent` output tokens.
local RESERVATION = {id = '', holder = '', accounts = '', facts = '', at_ms = 0, open = false, requests = 0, input = 0,
  output = 0, streams = 0, used_input = 0, used_output = 0, paid_input = 0, paid_output = 0, charges = 0, resumes = 0,
  sent = 0}
local message = cmsgpack.unpack(ARGV[1])

-- Return a command's answer, or false for a key of another type, which is renamed.
local function of_type(key, answer)
  if type(answer) ~= 'table' then return answer end
  if not string.find(answer.err, 'WRONGTYPE', 1, true) then error(answer) end
  redis.call('RENAME', key, key .. ':aside')
  redis.call('PEXPIRE', key .. ':aside', ASIDE_MS)
  return false
end

-- The accounts that this call has read, and those that it has charged, by name, and the events of its charges.
local accounts, charged, events = {}, {}, {}
-- The time at which the ledger opens, or nothing if it has lost its data, and the number of the router.
local opens_at = tonumber(of_type(STATE, redis.pcall('GET', STATE)) or '')
local row = of_type(ROUTERS, redis.pcall('HGET', ROUTERS, message.router))
local number = tonumber(string.match(row or '', '^(%d+) %d+$') or '0')
-- Whether this ledger has lost what the router told it, so that the router has to fill it first.
local is_behind = not opens_at or number < message.number
-- Time in ms for which others may do that. A longer one is of a clock that was ahead.
local closed_ms = math.max(0, (opens_at or 0) - now)
if closed_ms > RECOVERY_MS then closed_ms = 0 end

-- Return the table that a key has, and whether it has one. Fields that are missing or of another type are those of `blank`.
local function read(key, blank)
  local packed, stored, is_stored = of_type(key, redis.pcall('GET', key)), {}, false
  if packed then
    local is_readable, value = pcall(cmsgpack.unpack, packed)
    if is_readable and type(value) == 'table' then stored, is_stored = value, true end
  end
  for field, default in pairs(blank) do
    local value = stored[field]
    local is_odd = type(value) == 'number' and not (value >= 0 and value < 2 ^ 53)
    if type(value) ~= type(default) or is_odd then stored[field] = default end
  end
  return stored, is_stored
end

-- Return a reservation, and whether the ledger has it.
local function reservation_of(id)
  local r, is_known = read(LEDGER .. 'of:' .. id, RESERVATION)
  r.id = id
  return r, is_known
end

-- Return the windows of a time. Days count from 1970, and months from year 0, by UTC. (Howard Hinnant, chrono-Compatible
-- Low-Level Date Algorithms: civil_from_days.)
local function windows_of(ms)
  local day = math.floor(ms / DAY_MS)
  local era = math.floor((day + 719468) / 146097)
  local of_era = day + 719468 - era * 146097
  local leap_days = math.floor(of_era / 1460) - math.floor(of_era / 36524) + math.floor(of_era / 146096)
  local year = math.floor((of_era - leap_days) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = (year + era * 400) * 12 + math.floor((5 * of_year + 2) / 153) + 2
  return {ever = 0, minute = math.floor(ms / MINUTE_MS), day = day, month = month}
end

-- Return an account in its current windows. One later than now was begun by a clock that was ahead, and goes on as the
-- current one.
local function account_of(name)
  if accounts[name] then return accounts[name] end
  local account, current = read(LEDGER .. 'account:' .. name, ACCOUNT), windows_of(now)
  for field, window in pairs(COUNTS) do
    if account[window] < current[window] then account[field], account['held_' .. field] = 0, 0 end
  end
  for window, place in pairs(current) do account[window] = place end
  account.name, accounts[name] = name, account
  return account
end

local function amounts_of(requests, input, output, streams)
  return {streams = streams, requests = requests, input_tokens = input, output_tokens = output,
    day_tokens = input + output, month_tokens = input + output}
end

-- Add to counts of a reservation's accounts, to those of its windows that have not passed; `prefix` is held_ or nothing.
local function add(r, prefix, ...)
  local amounts, began = amounts_of(...), windows_of(r.at_ms)
  for name in string.gmatch(r.accounts, '%S+') do
    local account = account_of(name)
    for field, window in pairs(COUNTS) do
      if began[window] >= account[window] then
        account[prefix .. field] = math.max(0, account[prefix .. field] + amounts[field])
      end
    end
    if prefix == '' then charged[name] = account end
  end
end

local function held_by(holder) return LEDGER .. 'held:' .. string.match(holder, '^[^:]*') end

-- Hold nothing more of a reservation.
local function release(r)
  add(r, 'held_', -r.requests, -r.input, -r.output, -r.streams)
  r.open, r.requests, r.input, r.output, r.streams = false, 0, 0, 0, 0
  redis.call('SREM', held_by(r.holder), r.id)
end

-- Charge tokens of a reservation, with the first the request.
local function charge(r, input, output)
  if input + output <= 0 then return end
  add(r, '', r.open and r.requests or r.charges == 0 and 1 or 0, input, output, 0)
  if r.facts ~= '' then
    events[#events + 1] = {'id', string.format('%s:%.0f', r.id, r.charges), 'input', string.format('%.0f', input),
      'output', string.format('%.0f', output), 'at_ms', string.format('%.0f', now), 'facts', r.facts}
  end
  add(r, 'held_', -r.requests, 0, 0, 0)
  r.requests, r.charges = 0, r.charges + 1
end

-- End a reservation, and charge what was used of it and is not paid yet: after an earlier end only what that did not know
-- of.
local function settle(r)
  charge(r, math.max(0, r.used_input - r.paid_input), math.max(0, r.used_output - r.paid_output))
  r.paid_input, r.paid_output = math.max(r.paid_input, r.used_input), math.max(r.paid_output, r.used_output)
  release(r)
end

-- Write a reservation: while it is open among those of its router, for which others end it; else for a while.
local function write(r)
  local key = LEDGER .. 'of:' .. r.id
  if r.open then
    redis.call('SET', key, cmsgpack.pack(r))
    redis.call('SADD', held_by(r.holder), r.id)
  else
    redis.call('SET', key, cmsgpack.pack(r), 'PX', ENDED_RECORD_MS)
  end
end

-- Return the ledger's record of a reservation that a router tells of. A ledger that has lost it, or has that of an
-- earlier call, takes the router's over, which holds again what it did.
local function record_of(told)
  local r, is_known = reservation_of(told.id)
  if is_known and r.resumes >= told.resumes then return r end
  if r.open then release(r) end
  add(told, 'held_', told.requests, told.input, told.output, told.streams)
  return told
end

-- Count a call of the router, which has its reservations for HELD_MS more.
local function count_call()
  number = math.max(number, message.number) + 1
  redis.call('HSET', ROUTERS, message.router, string.format('%.0f %.0f', number, now + HELD_MS))
end

-- Return some of a router's open reservations.
local function open_of(router, count)
  local found = {}
  for _, id in ipairs(redis.call('SRANDMEMBER', held_by(router), count)) do
    local r = reservation_of(id)
    if r.open then found[#found + 1] = r else redis.call('SREM', held_by(router), id) end
  end
  return found
end

local function add_event(event)
  local is_added = of_type(USAGE, redis.pcall('XADD', USAGE, '*', unpack(event)))
  if not is_added then redis.call('XADD', USAGE, '*', unpack(event)) end
end

-- Write the accounts and events, and return an answer with those that were charged.
local function reply(answer)
  answer.number, answer.accounts, answer.events = number, {}, events
  for name, account in pairs(accounts) do
    redis.call('SET', LEDGER .. 'account:' .. name, cmsgpack.pack(account), 'PX', ACCOUNT_MS)
  end
  for _, account in pairs(charged) do table.insert(answer.accounts, account) end
  for _, event in ipairs(events) do add_event(event) end
  return cmsgpack.pack(answer)
end
