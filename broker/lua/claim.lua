#!lua flags=allow-oom
-- Give a worker the waiting jobs that suit it: jobs that have begun first, then always the next job of the tenant with the
-- lowest counter, which what it gets raises. A job that does not fit is passed over, within limits for each scan. A
-- worker that has lately looked at all it may without finding a job looks at newer arrivals alone.
-- Answers {jobs that still wait, bodies, adapter requests, hold_ms, tenants to skip in the next scan, 1 for no reason
-- to scan again, routers of jobs that suit the worker but for its missing link, jobs looked at, 1 for a job that more
-- free capacity suits; of a scan that found no job: arrivals that need no second look, live workers; 1 where the last of
-- the jobs must begin apart from other tenants' jobs, because its tenant and adapter are suspect; and the jobs' facts}.
--- @include "claim_arguments"
--- @include "arrivals"
--- @include "claim_rate"
--- @include "quarantine"

local TAKEN, PASSED, GONE, LOST = 1, 2, 3, 4
local passes_left, lookahead_left = PASSES_PER_SCAN, LOOKAHEAD_LIMIT
-- The claimed jobs, and what the queue knows of them.
local bodies, facts_of_bodies, claimed_work, looks = {}, {}, 0, 0
-- Time until the first held job is free for all, and the arrival before the oldest held one.
local hold_ms, seen_before_held = 0, math.huge
local saturated, window_exceeded, was_full = false, false, free_rows < 1
local is_young_passed, is_last_apart = false, false
-- Only the job that is first in line may reserve a worker.
local is_first = skipped_tenants == 0
local gone_ids, gone_keys, is_gone = {}, {}, {}
local any_quarantined = redis.call('EXISTS', QUARANTINE) == 1

--- @include "job_looks"

-- Return whether the scan goes on. That of a full worker looks at a few jobs, for adapters to fetch beforehand.
local function may_look()
  if free_rows > 0 then return passes_left > 0 end
  if not was_full then return false end
  lookahead_left = lookahead_left - 1
  return lookahead_left >= 0
end

-- Return where this scan goes on in a queue that is longer than its window: the first half of the window is the head of
-- the queue, the second half moves on with every scan.
local function second_half_start(length, window)
  window_exceeded = true
  return window / 2 + scan_number * window / 2 % (length - window / 2)
end

local function look_at_redispatched()
  local length, window = redis.call('ZCARD', REDISPATCHED), looks_around and LOOKAHEAD_LIMIT / 2 or REDISPATCHED_PER_SCAN
  if length == 0 then return end
  local ids
  if length <= window then
    ids = redis.call('ZRANGE', REDISPATCHED, 0, -1)
  else
    ids = redis.call('ZRANGE', REDISPATCHED, 0, window / 2 - 1)
    local start = second_half_start(length, window)
    for _, id in ipairs(redis.call('ZRANGE', REDISPATCHED, start, start + window / 2 - 1)) do ids[#ids + 1] = id end
  end
  for _, id in ipairs(ids) do
    if not may_look() then return end
    if look(id) == LOST then redis.call('ZREM', REDISPATCHED, id) end
  end
end

--- @include "tenant_scan"

-- Look at the last arrivals, as many as have come since `seen`.
local function look_at_news()
  local arrivals = number_of(redis.pcall('GET', ARRIVALS))
  if arrivals < seen then seen = 0 end -- the counter was lost
  local count = math.min(arrivals - seen, NEWS_LIMIT)
  if count == 0 then return end
  is_first = false
  for _, id in ipairs(redis.call('LRANGE', NEWS, -count, -1)) do
    if free_rows < 1 then return end
    if not is_gone[id] then look(id) end
    is_gone[id] = true -- two attempts of a job may have come
  end
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', WAITING, '-inf', now, 'LIMIT', 0, EXPIRED_PER_SCAN)) do
  forget_job(id)
end
local next_skip, more = 0, false
if news ~= NEWS_ONLY then
  look_at_redispatched()
  next_skip, more = look_at_tenants()
end
local is_complete = news == NEWS_ONLY or not (more or window_exceeded)
if (is_complete or news ~= NEWS_LATER) and #bodies == 0 then look_at_news() end
if #gone_ids > 0 then redis.call('ZREM', WAITING, unpack(gone_ids)) end
local waiting = redis.call('ZCARD', WAITING)
measure_claim_rate(claimed_work, waiting == 0 or not saturated and free_rows > 0)
flush_counts()

local deleted = gone_keys
if waiting == 0 then deleted[#deleted + 1] = WAKE end
if worker ~= '' then
  deleted[#deleted + 1] = WAKE .. ':' .. worker
  note_free_rows(worker, math.max(free_rows, 0))
end
if #deleted > 0 then redis.call('DEL', unpack(deleted)) end

local seen_arrivals, live_workers = 0, 0
if #bodies > 0 then
  if waiting > 0 then wake_a_worker() end
else
  local arrivals = number_of(redis.pcall('GET', ARRIVALS))
  seen_arrivals, live_workers = math.min(arrivals, seen_before_held), redis.call('HLEN', WORKERS)
  local is_woken_in_vain = was_woken and is_young_passed and not was_full and seen_arrivals > seen
  if is_woken_in_vain or #unlinked > 0 then pass_wake_up_on() end
end
local done = is_complete or #bodies > 0 or free_rows < 1
local is_crowded = saturated or free_rows < 1
return {waiting, bodies, most_demanded(), hold_ms, next_skip, done and 1 or 0, unlinked, looks, is_crowded and 1 or 0,
  seen_arrivals, live_workers, is_last_apart and 1 or 0, facts_of_bodies}
