-- Accounts and reservations of the ledger; broker/ledger.py says what they mean. Calls, answers and values are packed.
local ledger = {}

local LEDGER, DAY_MS, MINUTE_MS = 'lp:{ledger}:', 86400000, 60000
local STATE, ROUTERS, USAGE = LEDGER .. 'state', LEDGER .. 'routers', LEDGER .. 'usage'
-- What an account counts, each in a window. Under held_ and the name of a count is what open reservations hold beside it.
local COUNTS = {streams = 'ever', requests = 'minute', input_tokens = 'minute', output_tokens = 'minute',
  minute_cost = 'minute', day_tokens = 'day', day_cost = 'day', month_tokens = 'month', month_cost = 'month'}
-- All tokens count from the request's beginning. It is granted up to `input` and `output`; `used` is what its routers
-- told, and that is charged; `billed` is what its events have, of which there are `events`. While it is open, `requests`,
-- `streams` and the tokens that are not used are held in the accounts. It was resumed `resumes` times; its former holders
-- have sent `sent` output tokens. `cached` ones are of the input. The prices are those of its beginning, of a token.
local RESERVATION = {id = '', holder = '', accounts = '', facts = '', at_ms = 0, open = false, requests = 0, input = 0,
  output = 0, streams = 0, used_input = 0, used_cached = 0, used_output = 0, billed_input = 0, billed_cached = 0,
  billed_output = 0, events = 0, once = 0, resumes = 0, sent = 0, input_price = 0, cached_price = 0, output_price = 0}
-- Maximum of a count: numbers are exact below it, and the store takes no others.
local MOST = 2 ^ 53 - 1
-- A wait in ms that has no end.
local NEVER_MS = 2 ^ 53
-- Time in ms for which a reservation that has ended stays, so that a resumed request finds what it was charged; and an
-- account after its last change, longer than a month.
local ENDED_RECORD_MS, ACCOUNT_MS = 120000, 3000000000

-- Return the key of the row of a router that is gone, which no renewal reads, for when it comes back.
function ledger.ended_row(router) return LEDGER .. 'ended:' .. router end

-- Return the state of a call, of its packed message: the accounts and reservations that it has read, by name, the
-- accounts that its answer has, charged by it or before, and the events of its charges.
function ledger.new_call(packed)
  local call = {message = cmsgpack.unpack(packed), now = read_clock(), accounts = {}, reservations = {}, charged = {},
    events = {}}
  -- The time at which the ledger opens; the router that loads the store's accounts, - for none, and until when others
  -- leave that to it. Nothing if the ledger has lost its data.
  local opens_at, loader, loads_until = string.match(redis.call('GET', STATE) or '', '^(%d+) (%S+) (%d+)$')
  local row = redis.call('HGET', ROUTERS, call.message.router)
  call.is_listed = row
  row = row or redis.call('GET', ledger.ended_row(call.message.router))
  call.number = tonumber(string.match(row or '', '^(%d+) %d+$') or '0')
  -- Whether this ledger has lost what the router told it, so that the router has to fill it first.
  call.is_behind = not opens_at or call.number < call.message.number
  call.opens_at, call.is_loading = tonumber(opens_at or 0), loader and loader ~= '-'
  if call.opens_at > call.now + RECOVERY_MS then call.opens_at = 0 end -- of a clock that was ahead
  -- Time in ms after which to ask again whether the ledger is open.
  call.closed_ms = math.max(0, call.opens_at - call.now, call.is_loading and LOAD_LOOK_MS or 0)
  local expires = tonumber(loads_until or 0)
  call.loads = call.is_loading and not call.is_behind
    and (loader == call.message.router or expires <= call.now or expires > call.now + LOAD_MS)
  if call.loads then ledger.set_state(call, call.message.router) end
  return call
end

-- Write when the ledger opens, and which router loads the store's accounts until then.
function ledger.set_state(call, loader)
  redis.call('SET', STATE, string.format('%.0f %s %.0f', call.opens_at, loader, call.now + LOAD_MS))
end

-- Return the table that a key has, and whether it has one, with the fields of `blank` that are missing.
function ledger.read(key, blank)
  local packed = redis.call('GET', key)
  local stored = packed and cmsgpack.unpack(packed) or {}
  for field, default in pairs(blank) do
    if stored[field] == nil then stored[field] = default end
  end
  return stored, packed and true
end

-- Return a reservation, and whether the ledger has it.
function ledger.reservation_of(call, id)
  if call.reservations[id] then return call.reservations[id], true end
  local r, is_known = ledger.read(LEDGER .. 'of:' .. id, RESERVATION)
  r.id = id
  return r, is_known
end

-- Return the windows of a time. Days count from 1970, and months from year 0, by UTC. (Howard Hinnant,
-- chrono-Compatible Low-Level Date Algorithms: civil_from_days.)
function ledger.windows_of(ms)
  local day = math.floor(ms / DAY_MS)
  local era = math.floor((day + 719468) / 146097)
  local of_era = day + 719468 - era * 146097
  local leap_days = math.floor(of_era / 1460) - math.floor(of_era / 36524) + math.floor(of_era / 146096)
  local year = math.floor((of_era - leap_days) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = (year + era * 400) * 12 + math.floor((5 * of_year + 2) / 153) + 2
  return {ever = 0, minute = math.floor(ms / MINUTE_MS), day = day, month = month}
end

-- Return the time in ms until a window ends.
function ledger.left_ms(now, window)
  if window == 'ever' then return STREAM_RETRY_MS end
  local size_ms = window == 'minute' and MINUTE_MS or DAY_MS
  local ms = size_ms - now % size_ms
  while ledger.windows_of(now + ms)[window] == ledger.windows_of(now)[window] do ms = ms + size_ms end
  return ms
end

-- Return an account in its current windows. One later than now was begun by a clock that was ahead, and goes on as the
-- current one.
function ledger.account_of(call, name)
  if call.accounts[name] then return call.accounts[name] end
  local account, current = ledger.read(LEDGER .. 'account:' .. name, {}), ledger.windows_of(call.now)
  for field, window in pairs(COUNTS) do
    local is_current = (account[window] or 0) >= current[window]
    for _, count in ipairs({field, 'held_' .. field}) do account[count] = is_current and account[count] or 0 end
  end
  for window, place in pairs(current) do account[window] = place end
  account.name, call.accounts[name] = name, account
  return account
end

-- Return the cost of tokens of a reservation, of whose input some were cached.
function ledger.cost_of(r, input, cached, output)
  return (input - cached) * r.input_price + cached * r.cached_price + output * r.output_price
end

-- Return what each count of an account gets for tokens of a reservation, whose input was computed but for `cached`.
function ledger.amounts_of(r, requests, input, output, streams, cached)
  local tokens, cost = input + output, ledger.cost_of(r, input, cached or 0, output)
  return {streams = streams, requests = requests, input_tokens = input, output_tokens = output, day_tokens = tokens,
    month_tokens = tokens, minute_cost = cost, day_cost = cost, month_cost = cost}
end

-- Add to counts of a reservation's accounts, to those of its windows that have not passed; `prefix` is held_ or
-- nothing.
function ledger.add(call, r, prefix, ...)
  local amounts, began = ledger.amounts_of(r, ...), ledger.windows_of(r.at_ms)
  for name in string.gmatch(r.accounts, '%S+') do
    local account = ledger.account_of(call, name)
    for field, window in pairs(COUNTS) do
      if began[window] >= account[window] then
        account[prefix .. field] = math.min(MOST, math.max(0, account[prefix .. field] + amounts[field]))
      end
    end
    if prefix == '' then call.charged[name] = account end
  end
end

-- Answer with a reservation's accounts, which the router saves in the store.
function ledger.answer_with_accounts(call, r)
  for name in string.gmatch(r.accounts, '%S+') do call.charged[name] = ledger.account_of(call, name) end
end

function ledger.held_by(holder) return LEDGER .. 'held:' .. string.match(holder, '^[^:]*') end

-- Hold in its accounts what a reservation may still use; with -1 as `sign` hold that no more.
function ledger.hold(call, r, sign)
  if not r.open then return end
  ledger.add(call, r, 'held_', sign * r.requests, sign * math.max(0, r.input - r.used_input),
    sign * math.max(0, r.output - r.used_output), sign * r.streams)
end

-- Hold nothing more of a reservation.
function ledger.release(call, r)
  ledger.hold(call, r, -1)
  r.open, r.requests, r.input, r.output, r.streams = false, 0, r.used_input, r.used_output, 0
  redis.call('SREM', ledger.held_by(r.holder), r.id)
end

-- Charge what is used of a reservation by now and was not told before, with the first tokens the request.
function ledger.charge(call, r, used_input, used_cached, used_output)
  local input, output = math.max(0, used_input - r.used_input), math.max(0, used_output - r.used_output)
  if input + output == 0 then return end
  local cached = math.min(input, math.max(0, used_cached - r.used_cached)) -- what was charged in full stays
  local is_first = r.used_input + r.used_output == 0
  ledger.hold(call, r, -1)
  ledger.add(call, r, '', is_first and 1 or r.requests, input, output, 0, cached)
  r.requests, r.used_input, r.used_output = 0, r.used_input + input, r.used_output + output
  r.used_cached = r.used_cached + cached
  ledger.hold(call, r, 1)
end

-- Add the event of tokens that are charged.
function ledger.bill(call, r, input, cached, output)
  if input + output <= 0 then return end
  if r.facts ~= '' then
    local event = {'id', string.format('%s:%.0f', r.id, r.events), 'facts', r.facts}
    local numbers = {input = input, cached = cached, output = output, cost = ledger.cost_of(r, input, cached, output),
      at_ms = call.now}
    for name, number in pairs(numbers) do
      event[#event + 1], event[#event + 2] = name, string.format('%.0f', number)
    end
    call.events[#call.events + 1] = event
  end
  r.events = r.events + 1
end

-- Add the event of what is charged and no event has.
function ledger.bill_used(call, r)
  local input, output = math.max(0, r.used_input - r.billed_input), math.max(0, r.used_output - r.billed_output)
  ledger.bill(call, r, input, math.min(input, math.max(0, r.used_cached - r.billed_cached)), output)
  r.billed_input, r.billed_cached, r.billed_output = r.used_input, r.used_cached, r.used_output
end

-- End a reservation.
function ledger.settle(call, r)
  ledger.bill_used(call, r)
  ledger.release(call, r)
end

-- Count a call of the router, which has its reservations for HELD_MS more.
function ledger.count_call(call)
  call.number = math.max(call.number, call.message.number) + 1
  redis.call('HSET', ROUTERS, call.message.router, string.format('%.0f %.0f', call.number, call.now + HELD_MS))
end

-- Return some of a router's open reservations.
function ledger.open_of(call, router, count)
  local found, key = {}, ledger.held_by(router)
  for _, id in ipairs(redis.call('SRANDMEMBER', key, count)) do
    local r = ledger.reservation_of(call, id)
    if r.open then found[#found + 1] = r else redis.call('SREM', key, id) end
  end
  return found
end

-- Write what a call has changed, and return an answer with the accounts of `charged`, and the events. All counts
-- are written here, one after the other and by commands that do not fail.
function ledger.reply(call, answer)
  answer.number, answer.accounts, answer.events = call.number, {}, call.events
  for id, r in pairs(call.reservations) do
    if r.open then redis.call('SADD', ledger.held_by(r.holder), id) end -- those that others end if its router dies
  end
  for _, event in ipairs(call.events) do redis.call('XADD', USAGE, '*', unpack(event)) end
  for name, account in pairs(call.accounts) do
    redis.call('SET', LEDGER .. 'account:' .. name, cmsgpack.pack(account), 'PX', ACCOUNT_MS)
  end
  for id, r in pairs(call.reservations) do
    redis.call('SET', LEDGER .. 'of:' .. id, cmsgpack.pack(r), unpack(r.open and {} or {'PX', ENDED_RECORD_MS}))
  end
  for _, account in pairs(call.charged) do table.insert(answer.accounts, account) end
  return cmsgpack.pack(answer)
end

-- Return the refusal whose room comes last: account, limit, time in ms until there is room; nil: there is room for what
-- a reservation `needs` beyond what it `holds` already.
function ledger.refusal(call, r, needs, holds)
  local refused, latest_ms = nil, 0
  for _, limit in ipairs(call.message.limits) do
    local name, limit_name, field, most = unpack(limit)
    local account, own = ledger.account_of(call, name), 0
    if string.find(' ' .. r.accounts .. ' ', ' ' .. name .. ' ', 1, true) then own = holds[field] end
    -- A request that is resumed in time has its former place, or one of as many again.
    local room = (r.open and field == 'streams' and 2 * most or most) - account[field] - account['held_' .. field]
    if limit_name ~= 'budget_warning' and needs[field] > own and needs[field] - own > room then
      local wait_ms = needs[field] > most and NEVER_MS or ledger.left_ms(call.now, COUNTS[field])
      if wait_ms > latest_ms then refused, latest_ms = {name, limit_name, wait_ms}, wait_ms end
    end
  end
  return refused
end

-- Return what each limit of a call leaves beside what is charged and held: its name, its maximum, what is left.
function ledger.room_of(call)
  local room = {}
  for i, limit in ipairs(call.message.limits) do
    local name, limit_name, field, most = unpack(limit)
    local account = ledger.account_of(call, name)
    room[i] = {limit_name, most, math.max(0, most - account[field] - account['held_' .. field])}
  end
  return room
end

-- Make the reservation of a request in its accounts, or of one that goes on where it is resumed. Returns the call and an
-- answer: with the reservation, which `grant` writes; or with what refuses it.
function ledger.reserve(packed)
  local call = ledger.new_call(packed)
  if call.is_behind or call.closed_ms > 0 then
    return call, {behind = call.is_behind, closed_ms = call.closed_ms, loads = call.loads}
  end
  -- `received`: output tokens that the client of a resumed request has; -1: a new request.
  local asked, received = call.message.reservation, call.message.received
  local r, is_known = ledger.reservation_of(call, asked.id)
  -- The same call again, or one that has ended before this server got to it.
  local is_charged = r.used_input + r.used_output > 0
  if is_known and (r.holder == asked.holder or (received < 0 and (asked.once ~= 1 or is_charged))) then
    return call, {reservation = r, room = ledger.room_of(call), now = call.now}
  end

  if is_known then
    local used_output = math.max(r.used_output, received)
    -- With the prompt: an answer that has tokens, or asks for nothing more, began with it.
    local used_input = (used_output > 0 or asked.input == 0) and math.max(r.used_input, r.input) or r.used_input
    ledger.charge(call, r, used_input, asked.used_cached, used_output)
    if r.open and r.accounts == asked.accounts then r.facts = asked.facts end
  else
    r.input_price, r.cached_price, r.output_price = asked.input_price, asked.cached_price, asked.output_price
    if received >= 0 then -- forgotten; its events have ids that no earlier ones have
      r.used_output, r.billed_output, r.events = received, received, call.now
    end
  end
  -- What it needs from now on, and what it holds already. One that counts as another has what its client has as input.
  local is_another = received >= 0 and (not is_known or r.resumes >= FREE_RESUMES)
  local is_first = r.used_input + r.used_output == 0
  local input = math.max(0, asked.input - r.used_input)
  local output = math.max(0, asked.output - math.max(0, received))
  if is_another then input = asked.input > 0 and asked.input + received or 0 end
  local needs = ledger.amounts_of(r, (is_another or is_first) and 1 or 0, input, output, 1)
  local holds = ledger.amounts_of(r, r.requests, math.max(0, r.input - r.used_input),
    math.max(0, r.output - r.used_output), r.streams)
  local refused = ledger.refusal(call, r, needs, holds)
  if refused then return call, {refused = refused, room = ledger.room_of(call), now = call.now} end

  local at_ms = r.open and r.at_ms or call.now
  if is_known then ledger.settle(call, r) end
  -- Tokens that its client has not got are made again, and charged again.
  r.sent = math.max(r.sent, r.used_output)
  if received >= 0 then r.used_output, r.billed_output, r.resumes = received, received, r.resumes + 1 end
  r.at_ms, r.holder, r.accounts, r.facts, r.open = at_ms, asked.holder, asked.accounts, asked.facts, true
  r.once = asked.once or 0
  r.requests, r.input, r.output, r.streams = needs.requests, r.used_input + input, r.used_output + output, 1
  ledger.hold(call, r, 1)
  call.reservations[r.id] = r
  return call, {reservation = r, room = ledger.room_of(call), now = call.now}
end

-- Write the reservation of an answer, and return the answer packed; one that refuses changes nothing.
function ledger.grant(call, answer)
  if not answer.reservation then return cmsgpack.pack(answer) end
  if not call.is_listed then ledger.count_call(call) end
  return ledger.reply(call, answer)
end

register_admission('ledger_reserve', function(_, arguments) return ledger.grant(ledger.reserve(arguments[1])) end)

-- Reserve the tokens of a new request and put its job into the queue, both or neither. The arguments are those of
-- `enqueue`, and after them that of `ledger_reserve`. Answers with the ledger's answer, and where it does not refuse,
-- the queue's.
redis.register_function{function_name = LIBRARY .. 'admit', callback = function(_, arguments)
  local call, answer = ledger.reserve(arguments[8])
  if not answer.reservation then return {ledger.grant(call, answer)} end
  local queued = enqueue.put(arguments)
  local is_in = queued[1] == 'queued' or queued[1] == 'known'
  return {is_in and ledger.grant(call, answer) or '', unpack(queued)}
end}

-- Take over the counts of accounts and the events that a router tells a ledger which has lost data. Of two counts the
-- higher one holds, because charges only grow in their window.
function ledger.fill(call)
  local message = call.message
  for _, saved in ipairs(message.accounts) do
    local key = LEDGER .. 'account:' .. saved.name
    local packed = redis.call('GET', key)
    local known = packed and cmsgpack.unpack(packed) or saved
    if not packed then redis.call('SET', key, cmsgpack.pack(saved), 'PX', ACCOUNT_MS) end
    for field, window in pairs(COUNTS) do
      if saved[field] and (saved[window] ~= known[window] or saved[field] > (known[field] or 0)) then
        local account = ledger.account_of(call, saved.name)
        if saved[window] >= account[window] then account[field] = math.max(account[field], saved[field]) end
      end
    end
  end
  for _, event in ipairs(message.events) do redis.call('XADD', USAGE, '*', unpack(event)) end
  if message.step == 'restart' then
    local of_router = redis.call('SCARD', ledger.held_by(message.router))
    for _, r in ipairs(ledger.open_of(call, message.router, of_router)) do -- it tells next of all that it has
      ledger.release(call, r)
      redis.call('DEL', LEDGER .. 'of:' .. r.id)
    end
  elseif message.step == 'close' and call.closed_ms == 0 then
    call.opens_at = call.now + RECOVERY_MS
    ledger.set_state(call, message.router)
  elseif message.step == 'loaded' then
    ledger.set_state(call, '-')
  elseif message.step == 'open' and (call.closed_ms == 0 or call.loads) then
    call.opens_at = call.now
    ledger.set_state(call, '-')
  end
end

-- Take over what a router tells of a reservation. Returns its holder where another call has the request by now, or the
-- ledger has none.
function ledger.take_over(call, told)
  local is_filling = call.message.step ~= '' or call.closed_ms > 0
  local r, is_known = ledger.reservation_of(call, told.id)
  if not is_known and told.open and told.at_ms == 0 then return told.holder end -- never granted: it has used nothing
  local is_empty = not r.open and r.used_input + r.used_output == 0 and r.holder ~= told.holder -- of a call that failed
  if not is_known or is_empty or r.resumes < told.resumes then -- lost, or that of an earlier call
    ledger.release(call, r)
    for field in pairs(RESERVATION) do r[field] = told[field] end
    r.open, r.used_input, r.used_output = true, told.told_input, told.told_output -- these are charged
    r.used_cached = told.told_cached
    if r.at_ms == 0 then r.at_ms = call.now end
    -- Another has ended it long ago, and added the event.
    if not is_filling then
      r.billed_input, r.billed_cached, r.billed_output, r.events = r.used_input, r.used_cached, r.used_output, call.now
    end
    ledger.hold(call, r, 1)
  end
  call.reservations[r.id] = r
  if is_filling then return end -- charged once the accounts have what was charged before
  ledger.answer_with_accounts(call, r) -- the answer of the call that charged may have been lost
  if r.holder == told.holder or (r.once == 1 and told.used_input > 0) then
    -- The record may be older than what was told.
    r.used_input, r.used_output = math.max(r.used_input, told.told_input), math.max(r.used_output, told.told_output)
    r.used_cached = math.max(r.used_cached, told.told_cached)
    ledger.charge(call, r, told.used_input, told.used_cached, told.used_output)
    if told.facts ~= '' then r.facts = told.facts end
    if told.streams < r.streams then -- its call has ended; it may be resumed
      ledger.hold(call, r, -1)
      r.streams = 0
      ledger.hold(call, r, 1)
      ledger.bill_used(call, r)
    end
    if not told.open or not r.open then ledger.settle(call, r) end
    return
  end
  if not told.open and told.used_output > r.sent then -- sent to a client that told less to another router
    local output = told.used_output - r.sent
    ledger.add(call, r, '', 0, 0, output, 0)
    ledger.bill(call, r, 0, 0, output)
    r.sent = told.used_output
  end
  return told.holder
end

-- End reservations of routers that have not called for HELD_MS; return how many. `rows`: names and calls in turn.
function ledger.end_expired(call, rows)
  local ended, earliest, latest, now = 0, NEVER_MS, 0, call.now
  for i = 2, #rows, 2 do
    local expires = tonumber(string.match(rows[i], ' (%d+)$') or 0)
    earliest, latest = math.min(earliest, expires), math.max(latest, expires)
  end
  if earliest > now and latest <= now + HELD_MS then return 0 end
  for i = 1, #rows, 2 do
    local router, calls, until_ms = rows[i], string.match(rows[i + 1], '^(%d+) (%d+)$')
    local expires = tonumber(until_ms or 0)
    -- While nobody has renewed anything, as when Redis was away, nothing ends: all get their full time again. A time
    -- later than that is of a clock that was ahead.
    if latest <= now or expires > now + HELD_MS then expires = now + HELD_MS end
    if router ~= call.message.router then
      if expires <= now then
        for _, r in ipairs(ledger.open_of(call, router, EXPIRED_AT_ONCE - ended)) do
          ledger.settle(call, r)
          ledger.answer_with_accounts(call, r) -- its router may have died before it knew or saved them
          call.reservations[r.id] = r
          ended = ended + 1
        end
        if redis.call('EXISTS', ledger.held_by(router)) == 1 then expires = now end
      end
      if not calls or expires < now then
        redis.call('HDEL', ROUTERS, router)
        if calls then redis.call('SET', ledger.ended_row(router), rows[i + 1], 'PX', DAY_MS) end
      elseif expires ~= tonumber(until_ms) then
        redis.call('HSET', ROUTERS, router, string.format('%s %.0f', calls, expires))
      end
    end
  end
  return ended
end

-- Take over what a router tells of its reservations: what was used of them, and which have ended. With `renews`,
-- reservations of routers that have not called for HELD_MS end. With a `step` the router fills a ledger that has lost
-- data with reservations, accounts and events: `restart`, `fill`, at last `close`, or `open` where there is nothing to
-- wait for; and with the store's accounts: `load`, at last `loaded`. Answers with how many reservations were ended, and
-- the holders whose requests others have by now; or with the time for which the ledger is closed, in which nothing is
-- charged and nothing ends, and whether the router is to load the store's accounts.
register('ledger_tell', function(_, arguments)
  local call = ledger.new_call(arguments[1])
  local message, moved = call.message, {}
  if call.is_behind and message.step == '' then return cmsgpack.pack({behind = true}) end
  ledger.fill(call)
  -- As they were before this call.
  local rows = message.renews and call.closed_ms == 0 and redis.call('HGETALL', ROUTERS) or {}
  if message.step == '' or message.step == 'close' or message.step == 'open' then ledger.count_call(call) end
  for _, told in ipairs(message.reservations) do moved[#moved + 1] = ledger.take_over(call, told) end
  local ended = ledger.end_expired(call, rows)
  return ledger.reply(call, {ended = ended, moved = moved, closed_ms = call.closed_ms, loads = call.loads})
end)
