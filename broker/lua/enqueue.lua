#!lua
-- Put a job into the queue. Answers {'queued'}, {'known'} for an attempt that is not newer than the one that waits, or
-- for a refused newcomer {'full', limit, tenant} or {'late', wait in ms}. A job that has begun is refused by a full Redis
-- alone, beyond a limit. For a newcomer or a suspect of a tenant or adapter in quarantine {'quarantined', ms left}.
-- KEYS[2], where it is given, is the reservation of the job's tokens; without one in the ledger {'unreserved'}.
--- @include "quarantine"
--- @include "suspects"
--- @include "routers"
--- @include "waiting_jobs"
--- @include "arrivals"
--- @include "workers"
--- @include "queue_shares"
--- @include "wrong_types"

local id, deadline_ms = ARGV[2], tonumber(ARGV[3])
-- The limits, and the fields of the entry, in the order of broker/terms.py. max.begun_bytes_when_full: Redis is full.
local max = {jobs = tonumber(ARGV[4]), bytes = tonumber(ARGV[5]), tenant_jobs = tonumber(ARGV[6]),
  tenant_bytes = tonumber(ARGV[7]), begun_bytes_when_full = tonumber(ARGV[8])}
local job = {tenant = ARGV[9], attempt = tonumber(ARGV[10]), resumed = tonumber(ARGV[11]), weight = tonumber(ARGV[12]),
  priority = tonumber(ARGV[13]), tokens = tonumber(ARGV[14]), prefill = tonumber(ARGV[15]), prompt = tonumber(ARGV[16]),
  rank = tonumber(ARGV[17]), rows = tonumber(ARGV[18]), strikes = tonumber(ARGV[19]), base = ARGV[20],
  adapter = ARGV[21], load = tonumber(ARGV[22]), prefer = ARGV[23], router = ARGV[24], wanted = ARGV[25],
  body = ARGV[26]}
job.size, job.queued, job.deadline = #job.body, now, deadline_ms > 0 and now + deadline_ms or 0
job.work = PROMPT_WEIGHT * job.prompt + OUTPUT_WEIGHT * math.max(0, job.tokens - job.prompt)
local key, queue = PREFIX .. 'job:' .. id, PREFIX .. 'queue:' .. job.tenant

-- Return the claim rate, work in ms, measured by claim.lua: that of the last interval, or of the current one if it is
-- higher; 0 where no work waits for a row.
local function claim_rate()
  local measured = redis.call('HMGET', CLAIM_RATE, 'since', 'work', 'pace')
  local since, rate = number_of(measured[1]), number_of(measured[3])
  if since > 0 and now - since >= CLAIM_RATE_MIN_MS then rate = math.max(rate, number_of(measured[2]) / (now - since)) end
  return rate
end

-- Return whether an answer that had begun at another router goes before newcomers. A tenant must not gain by resuming
-- again and again: its lead, with what it has resumed and not been given yet, is limited.
local function may_lead()
  local begun_work = totals['begun:' .. job.tenant]
  if begun_work > 0 and redis.call('EXISTS', REDISPATCHED) == 0 then begun_work = 0 end -- their key was lost
  local lowest = lowest_counter()
  local lead = math.max(0, counter_of(job.tenant) - lowest) * job.weight + begun_work
  return lead <= math.max(RESUME_LEAD_WORK, RESUME_LEAD_MS * claim_rate())
end

-- Return the answer that refuses the job where a limit of its tenant is reached.
local function reached_tenant_limit(tenant_jobs)
  if tenant_jobs >= max.tenant_jobs then return {'full', 'tenant_jobs', job.tenant} end
  local tenant_bytes = totals['of:' .. job.tenant] + totals['begun_of:' .. job.tenant]
  if tenant_bytes + job.size > max.tenant_bytes then return {'full', 'tenant_bytes', job.tenant} end
end

-- Return in how many ms the job's turn comes, at its tenant's share of the claim rate; 0 where nothing tells. Before it
-- come its tenant's own jobs, and meanwhile work of other tenants: of each as much for its weight, but no more than waits.
-- The work is counted for some tenants, and estimated for the others.
local function wait_before_turn_ms(tenant_jobs, tenant_work)
  local rate = tenant_jobs > 0 and claim_rate() or 0
  if rate <= 0 then return 0 end
  local own_work = redis.call('ZLEXCOUNT', queue, '-', '(' .. job.place) * tenant_work / tenant_jobs
  if own_work == 0 then return 0 end
  local fields, others, work = {}, 0, 0
  for _, other in ipairs(redis.call('ZRANGE', TENANTS, 0, TENANTS_PER_ESTIMATE - 1)) do
    if other ~= job.tenant then fields[#fields + 1], fields[#fields + 2] = 'work:' .. other, 'weight:' .. other end
  end
  if #fields == 0 then return own_work / rate end
  local values = redis.call('HMGET', TOTALS, unpack(fields))
  for i = 1, #values, 2 do
    others = others + 1
    work = work + math.min(number_of(values[i]), own_work * number_of(values[i + 1] or 1) / job.weight)
  end
  return (own_work + work / others * (redis.call('ZCARD', TENANTS) - 1)) / rate
end

-- Return the answer that refuses a newcomer; nil: it has a place, perhaps that of another job.
local function refusal_of_newcomer(tenant_jobs)
  local refusal = reached_tenant_limit(tenant_jobs)
  if refusal then return refusal end
  local wait_ms = deadline_ms > 0 and wait_before_turn_ms(tenant_jobs, totals['work:' .. job.tenant]) or 0
  if wait_ms > DEADLINE_DOUBT * deadline_ms then return {'late', math.floor(wait_ms)} end
  local use = use_of(tenant_jobs + 1, totals['of:' .. job.tenant] + job.size, job.weight, max)
  local limit = make_room(job.size, use, max)
  if limit then return {'full', limit, ''} end
  redis.call('ZADD', USES, exact(use), job.tenant)
end

-- Wake the first preferred worker with free rows, or else any.
local function wake_for_job(has_begun)
  for worker in string.gmatch(has_begun and '' or job.prefer, '[^\n]+') do
    if free_rows_of(worker) > 0 then return wake_worker(worker) end
  end
  if redis.call('LPUSH', WAKE, 1) > WAKE_LIMIT then redis.call('LPOP', WAKE) end
end

if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 0 then return {'unreserved'} end
beat_router(job.router)
local left = job_fields(key, 'attempt', 'displaced')
if left[1] and number_of(left[1]) >= job.attempt then return {'known'} end
if left[1] or left[2] then
  forget_job(id)
  flush_counts()
end
if job.strikes > 0 then
  write_suspect(id, job.tenant, job.adapter, job.attempt, job.strikes, now + SUSPECT_MS, 0)
end
local refused_ms = quarantined_ms(job.tenant, job.adapter)
if refused_ms > 0 and not goes_on_in_quarantine(job.attempt, job.prompt, job.prefill, job.rows) then
  return {'quarantined', refused_ms}
end
read_totals('all', 'begun_bytes', 'next_lift', 'of:' .. job.tenant, 'work:' .. job.tenant, 'begun_of:' .. job.tenant,
  'begun:' .. job.tenant)
local has_begun = job.attempt > 1 or job.resumed == 1 and may_lead()
if max.begun_bytes_when_full and (not has_begun or totals.begun_bytes + job.size > max.begun_bytes_when_full) then
  return {'full', 'begun_bytes_when_full', ''}
end
local arrival = record_arrival(id)
local tenant_jobs = 0
if has_begun then
  job.place = id
else
  -- Members of equal score are ordered by their bytes: priority, deadline, arrival. PLACE_BYTES stand before the id.
  job.place = string.format('%03d%015d%016d:', PRIORITY_LIMIT - job.priority,
    deadline_ms > 0 and job.deadline or 999999999999999, arrival) .. id
  tenant_jobs = redis.pcall('ZCARD', queue)
  if type(tenant_jobs) ~= 'number' then
    set_aside_unless('zset', 'queue:' .. job.tenant)
    tenant_jobs = 0
  end
  local refusal = refusal_of_newcomer(tenant_jobs)
  if refusal then return refusal end
end
-- In the order that include/waiting_jobs.lua gives.
local facts = cmsgpack.pack(job.tenant, job.base, job.adapter, job.prefer, job.router, job.attempt, job.weight,
  job.tokens, job.prefill, job.prompt, job.rank, job.rows, job.load, job.place, job.size, job.work, job.queued,
  job.deadline)
redis.call('HSET', key, 'body', job.body, 'wanted', job.wanted, 'attempt', job.attempt, 'facts', facts)
redis.call('ZADD', WAITING, deadline_ms > 0 and job.deadline or '+inf', id)
count_waiting(job.tenant, job.size, job.work, has_begun)
if has_begun then
  -- A job that needs a whole worker is before all others: an empty worker does not stay so for long.
  redis.call('ZADD', REDISPATCHED, job.rows >= ALL_ROWS and arrival - WHOLE_WORKERS_FIRST or arrival, id)
else
  redis.call('ZADD', queue, 0, job.place)
  if tenant_jobs == 0 then activate_tenant(job.tenant, job.weight) end
end
flush_counts()
wake_for_job(has_begun)
return {'queued'}
