#!lua
-- Reserve tokens for a request. Answers {'granted', account, part, base, input, output, minute, day, month}, {'behind'}
-- where the router knows of a later account, or {'refused', limit, ms until there is room, or -1: never}.
--- @include "ledger_account"

local id, router, subject = ARGV[2], ARGV[3], ARGV[4]
-- `received`: output tokens that the client of a resumed request has; -1: a new request.
local input, output, received = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local seen_epoch, seen_version = tonumber(ARGV[8]), tonumber(ARGV[9])
local max = {streams = tonumber(ARGV[10]), requests = tonumber(ARGV[11]), input = tonumber(ARGV[12]),
  output = tonumber(ARGV[13]), day_tokens = tonumber(ARGV[14]), month_tokens = tonumber(ARGV[15])}

local account = read_account()
if is_behind(account, seen_epoch, seen_version) then return {'behind'} end

local function granted(r)
  local values = answer('granted', account)
  for _, value in ipairs({r.part, r.base, r.input, r.output, r.minute, r.day, r.month}) do values[#values + 1] = value end
  return values
end

local function hold(r)
  write_reservation(id, r)
  redis.call('ZADD', HELD, now + HELD_MS, id)
  if max.streams >= 0 then redis.call('ZADD', STREAMS, now + HELD_MS, id) end
  write_account(account)
  return granted(r)
end

local found = read_reservation(id)
if found and found.state == 'open' then -- the same call again, or a request that moves to this router
  found.owner = router
  return hold(found)
end
if found and received < 0 then return granted(found) end -- a call that has ended, before this server got to it

local r = {state = 'open', owner = router, part = 0, base = 0, requests = 1, input = input, output = output, used_input = 0,
  used_output = 0, minute = account.minute, day = account.day, month = account.month, subject = subject}
if received >= 0 then
  r.requests, r.input, r.part, r.base = 0, 0, now, received
  if found then r.part, r.base = found.part + 1, math.max(found.base, found.used_output) end
  r.used_output = r.base
  r.output = found and found.state == 'finished' and 0 or math.max(0, output - r.base)
end

local limit, wait_ms = nil, 0
local function refuse(name, ms)
  if ms > wait_ms and wait_ms >= 0 or ms < 0 then limit, wait_ms = name, ms end
end

-- An account that was made just now may have been lost: until all routers have told what they know of it, it grants one
-- request and little more.
local recovery_ms = account.born + RECOVERY_MS - now
local share = recovery_ms > 0 and account.requests > 0 and RECOVERY_PERCENT / 100 or 1
local function check(name, count, amount, window_ms)
  if max[name] < 0 or amount == 0 or count + amount <= max[name] * share then return end
  refuse(name, amount > max[name] and -1 or count + amount <= max[name] and recovery_ms or window_ms)
end
local to_minute, to_day = (account.minute + 1) * MINUTE_MS - now, (account.day + 1) * DAY_MS - now
check('requests', account.requests, r.requests, to_minute)
check('input', account.input, r.input, to_minute)
check('output', account.output, r.output, to_minute)
check('day_tokens', account.day_tokens, r.input + r.output, to_day)
if max.month_tokens >= 0 then
  check('month_tokens', account.month_tokens, r.input + r.output, first_day_of(account.month + 1) * DAY_MS - now)
end
if max.streams >= 0 and received < 0 then
  redis.call('ZREMRANGEBYSCORE', STREAMS, '-inf', now)
  if redis.call('ZCARD', STREAMS) >= max.streams then refuse('streams', max.streams == 0 and -1 or STREAM_RETRY_MS) end
end
if limit then return {'refused', limit, wait_ms} end
add(account, r, r.requests, r.input, r.output)
return hold(r)
