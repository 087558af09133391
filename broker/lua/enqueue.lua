#!lua
-- Put a job into the queue. Answers {'queued'}, {'known'} for an attempt that is not newer than the one that waits, or
-- for a refused first attempt {'full', bound, tenant} or {'late', wait in ms}.
--- @include "routers"
--- @include "waiting_jobs"
--- @include "workers"

local id, deadline_ms = ARGV[2], tonumber(ARGV[3])
-- The rest are names and values: the queue's limits, which begin with max_, and the fields of the entry (broker/terms.py).
local max, job = {}, {}
for i = 4, #ARGV, 2 do
  local limit = string.match(ARGV[i], '^max_(.+)')
  if limit then max[limit] = tonumber(ARGV[i + 1]) else job[ARGV[i]] = ARGV[i + 1] end
end
for _, field in ipairs({'attempt', 'weight', 'priority', 'tokens', 'prefill', 'prompt', 'rank', 'rows', 'load'}) do
  job[field] = tonumber(job[field])
end
job.size, job.queued, job.deadline = #job.body, now, deadline_ms > 0 and now + deadline_ms or 0
job.work = PROMPT_WEIGHT * job.prompt + OUTPUT_WEIGHT * (job.tokens - job.prompt)
local is_first = job.attempt == 1
local key, queue = PREFIX .. 'job:' .. id, PREFIX .. 'queue:' .. job.tenant

-- Return the answer that refuses the job where a limit is reached.
local function reached_limit(tenant_jobs, all_bytes, tenant_bytes)
  if redis.call('ZCARD', WAITING) >= max.jobs then return {'full', 'jobs', ''} end
  if all_bytes + job.size > max.bytes then return {'full', 'bytes', ''} end
  if tenant_jobs >= max.tenant_jobs then return {'full', 'tenant_jobs', job.tenant} end
  if tenant_bytes + job.size > max.tenant_bytes then return {'full', 'tenant_bytes', job.tenant} end
end

-- Return in how many ms the job's turn comes, were all workers to serve this tenant alone; 0 where nothing tells. The
-- claim rate is work in ms, measured by claim.lua: that of the last interval, or of the current one if it is higher.
local function wait_before_turn_ms(tenant_jobs, tenant_work)
  local measured = redis.call('HMGET', CLAIM_RATE, 'since', 'work', 'pace')
  local rate, measured_ms = tonumber(measured[3] or 0), now - tonumber(measured[1] or now)
  if measured_ms >= CLAIM_RATE_MIN_MS then rate = math.max(rate, tonumber(measured[2]) / measured_ms) end
  if rate <= 0 or tenant_jobs == 0 then return 0 end
  local jobs_before = redis.call('ZLEXCOUNT', queue, '-', '(' .. job.place)
  return jobs_before * tenant_work / tenant_jobs / rate
end

-- Wake the first preferred worker with free rows, or else any.
local function wake_for_job()
  local list = WAKE
  for worker in string.gmatch(is_first and job.prefer or '', '[^\n]+') do
    if free_rows_of(worker) > 0 then
      list = WAKE .. ':' .. worker
      break
    end
  end
  if redis.call('LLEN', list) < WAKE_LIMIT then redis.call('LPUSH', list, 1) end
  if list ~= WAKE then redis.call('PEXPIRE', list, FREE_ROWS_MS) end
end

beat_router(job.router)
local waiting_attempt = redis.call('HGET', key, 'attempt')
if waiting_attempt and tonumber(waiting_attempt) >= job.attempt then return {'known'} end
if waiting_attempt then forget_job(id) end
if is_first then
  local tenant_jobs = redis.call('ZCARD', queue)
  local totals = redis.call('HMGET', TOTALS, 'all', 'of:' .. job.tenant, 'work:' .. job.tenant)
  local refusal = reached_limit(tenant_jobs, tonumber(totals[1] or 0), tonumber(totals[2] or 0))
  if refusal then return refusal end
  -- Members of equal score are ordered by their bytes: priority, deadline, arrival. PLACE_BYTES stand before the id.
  job.place = string.format('%03d%015d%016d:', PRIORITY_LIMIT - job.priority,
    deadline_ms > 0 and job.deadline or 999999999999999, redis.call('INCR', ARRIVALS)) .. id
  local wait_ms = deadline_ms > 0 and wait_before_turn_ms(tenant_jobs, tonumber(totals[3] or 0)) or 0
  if wait_ms > DEADLINE_DOUBT * deadline_ms then return {'late', math.floor(wait_ms)} end
else
  job.place = id
end
-- In the order that include/waiting_jobs.lua gives.
local facts = cmsgpack.pack(job.tenant, job.base, job.adapter, job.prefer, job.router, job.attempt, job.weight,
  job.tokens, job.prefill, job.prompt, job.rank, job.rows, job.load, job.place, job.size, job.work, job.queued,
  job.deadline)
redis.call('HSET', key, 'body', job.body, 'wanted', job.wanted, 'attempt', job.attempt, 'facts', facts)
redis.call('ZADD', WAITING, deadline_ms > 0 and job.deadline or '+inf', id)
count_waiting(job.tenant, job.size, job.work)
flush_counts()
if is_first then
  redis.call('ZADD', queue, 0, job.place)
  activate_tenant(job.tenant)
else
  redis.call('ZADD', REDISPATCHED, redis.call('INCR', ARRIVALS), id)
end
wake_for_job()
return {'queued'}
