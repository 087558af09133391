"""The enqueue: how a job comes to wait, or why it may not, in one script. It says of its router that it lives."""

from __future__ import annotations

from broker import terms
from broker.lua import NUMBERS, PACK

_NUMBERS = ", ".join(f"'{name}'" for name in NUMBERS)

# ARGV: prefix, id, priority, deadline_ms, the four limits, wake limit, and the entry's fields with their values.
ENQUEUE = f"""
local id, priority, deadline_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local entry = {{}}
for i = 10, #ARGV, 2 do entry[ARGV[i]] = ARGV[i + 1] end
for _, name in ipairs({{{_NUMBERS}}}) do entry[name] = tonumber(entry[name]) end
local key, queue, first = P .. 'job:' .. id, P .. 'queue:' .. entry.tenant, entry.attempt == 1
router_beats(entry.router)
local held = redis.call('HGET', key, 'attempt')
if held and tonumber(held) >= entry.attempt then return {{'known'}} end
if held then forget(id) end
local size, deadline, place = #entry.body, deadline_ms > 0 and now + deadline_ms or 0, id
local work = {terms.PROMPT_WEIGHT} * entry.prompt + {terms.OUTPUT_WEIGHT} * (entry.tokens - entry.prompt)
if first then
  local bytes = redis.call('HMGET', BYTES, 'all', 'of:' .. entry.tenant, 'work:' .. entry.tenant)
  local count = redis.call('ZCARD', queue)
  if redis.call('ZCARD', WAITING) >= tonumber(ARGV[5]) then return {{'full', 'jobs', ''}} end
  if tonumber(bytes[1] or 0) + size > tonumber(ARGV[6]) then return {{'full', 'bytes', ''}} end
  if count >= tonumber(ARGV[7]) then return {{'full', 'tenant_jobs', entry.tenant}} end
  if tonumber(bytes[2] or 0) + size > tonumber(ARGV[8]) then return {{'full', 'tenant_bytes', entry.tenant}} end
  -- Members of one score lie in the order of their bytes: priority, deadline, arrival.
  place = string.format('%03d%015d%016d:', {terms.PRIORITY_LIMIT} - priority,
    deadline > 0 and deadline or 999999999999999, redis.call('INCR', P .. 'arrivals')) .. id
  local pace = redis.call('HMGET', PACE, 'since', 'work', 'pace')
  local best, measured_ms = tonumber(pace[3] or 0), now - tonumber(pace[1] or now)
  if measured_ms >= {terms.PACE_LEAST_MS} then best = math.max(best, tonumber(pace[2]) / measured_ms) end
  if deadline > 0 and best > 0 and count > 0 then
    -- As though the whole cell worked for this tenant.
    local ahead = redis.call('ZLEXCOUNT', queue, '-', '(' .. place)
    local wait_ms = ahead * tonumber(bytes[3] or 0) / count / best
    if wait_ms > {terms.DOUBT} * deadline_ms then return {{'late', math.floor(wait_ms)}} end
  end
end
-- What a claim looks at, in one piece.
entry.place, entry.size, entry.work, entry.queued, entry.deadline = place, size, work, now, deadline
redis.call('HSET', key, 'body', entry.body, 'wanted', entry.wanted, 'attempt', entry.attempt, 'facts', {PACK})
redis.call('ZADD', WAITING, deadline > 0 and deadline or '+inf', id)
count(entry.tenant, size, work)
settle()
if first then
  redis.call('ZADD', queue, 0, place)
  enter(entry.tenant)
else
  redis.call('ZADD', AGAIN, redis.call('INCR', P .. 'arrivals'), id)
end
-- Wakes the worker for which it would be held, or anybody.
local wake = WAKE
for other in string.gmatch(first and entry.prefer or '', '[^\\n]+') do
  if room_of(other) > 0 then
    wake = WAKE .. ':' .. other
    break
  end
end
if redis.call('LLEN', wake) < tonumber(ARGV[9]) then redis.call('LPUSH', wake, 1) end
if wake ~= WAKE then redis.call('PEXPIRE', wake, {terms.ROOM_MS}) end
return {{'queued'}}
"""
