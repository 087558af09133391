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
  return answer('granted', account, r.part, r.base, r.input, r.output, r.minute, r.day, r.month)
end

local function hold(r)
  write_reservation(id, r)
  redis.call('ZADD', HELD, now + HELD_MS, id)
  if max.streams >= 0 then redis.call('ZADD', STREAMS, now + HELD_MS, id) end
  write_account(account)
  return granted(r)
end

local found = read_reservation(id)
if found and received < 0 then -- the same call again, or one that has ended before this server got to it
  if found.state ~= 'open' then return granted(found) end
  found.owner = router
  return hold(found)
end

local r = {state = 'open', owner = router, part = 0, base = 0, requests = 1, input = input, output = output, used_input = 0,
  used_output = 0, minute = account.minute, day = account.day, month = account.month, subject = subject, again = 0,
  told = 0, resumes = 0}
-- Amounts to reserve now, and maximum number of open streams; nil: the request has its place among them already.
local requests, new_input, new_output, streams = 1, input, output, max.streams
if received >= 0 and found then
  requests, new_input = 0, 0
  if found.resumes >= FREE_RESUMES then requests, new_input = 1, input end
  local again, told = charged_again(account, math.max(0, found.used_output - received)), math.max(found.used_output, received)
  if found.state == 'open' then -- its router died, or its client left it a short time ago
    r, new_output, streams = found, again, 2 * max.streams
    if redis.call('ZSCORE', STREAMS, id) then streams = nil end
    r.used_input, r.used_output = r.input, told
    r.owner, r.requests, r.input, r.output = router, r.requests + requests, r.input + new_input, r.output + again
  else
    r.part, r.base = found.part + 1, math.max(found.base, found.used_output)
    new_output = math.max(0, output - r.base) + again
    r.requests, r.input, r.output, r.used_output = requests, new_input, new_output, r.base
  end
  r.again, r.told, r.resumes = r.again + again, told, found.resumes + 1
elseif received >= 0 then -- nothing is known of it any more: all of it that is not made yet counts anew
  new_output = math.max(0, output - received)
  r.part, r.base, r.used_output, r.output, r.told, r.resumes = now, received, received, new_output, received, 1
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
check('requests', account.requests, requests, to_minute)
check('input', account.input, new_input, to_minute)
check('output', account.output, new_output, to_minute)
check('day_tokens', account.day_tokens, new_input + new_output, to_day)
if max.month_tokens >= 0 then
  check('month_tokens', account.month_tokens, new_input + new_output, first_day_of(account.month + 1) * DAY_MS - now)
end
if max.streams >= 0 and streams then
  redis.call('ZREMRANGEBYSCORE', STREAMS, '-inf', now)
  if redis.call('ZCARD', STREAMS) >= streams then refuse('streams', max.streams == 0 and -1 or STREAM_RETRY_MS) end
end
if limit then return {'refused', limit, wait_ms} end
add(account, r, requests, new_input, new_output)
return hold(r)
