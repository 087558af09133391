#!lua
-- Put a job into the queue. Answers {'queued'}, {'known'} for an attempt that is not newer than the one that waits, or
-- for a refused first attempt {'full', limit, tenant or API key} or {'late', wait in ms}. A later attempt, and a job that has
-- begun, is refused by a full Redis alone. For a newcomer or a suspect of a tenant or adapter in quarantine {'quarantined',
-- ms left}. KEYS[2], where it is given, is the reservation of the job's tokens; without one in the ledger {'unreserved'}.
--- @include "quarantine"
--- @include "suspects"
--- @include "routers"
--- @include "waiting_jobs"
--- @include "arrivals"
--- @include "workers"
--- @include "queue_shares"
--- @include "claim_rate"
--- @include "wrong_types"

-- Return what is not among a job's facts, and the limits, in the order of broker/terms.py.
local function terms_of(deadline_ms, begun, priority, strikes, jobs, bytes, tenant_jobs, tenant_bytes, key_jobs, key_bytes)
  return deadline_ms, begun, priority, strikes, {jobs = jobs, bytes = bytes, tenant_jobs = tenant_jobs,
    tenant_bytes = tenant_bytes, key_jobs = key_jobs, key_bytes = key_bytes}
end

-- Return the fields of broker/queue_entry.py that are used here, of the packed facts.
local function facts_of(tenant, _, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, _, rows, _, key,
    key_weight)
  return {tenant = tenant, adapter = adapter, prefer = prefer, router = router, attempt = attempt, weight = weight,
    tokens = tokens, prefill = prefill, prompt = prompt, rows = rows, key = key, key_weight = key_weight}
end

local id, begun_bytes_when_full = ARGV[2], tonumber(ARGV[4])
local deadline_ms, begun, priority, strikes, max = terms_of(cmsgpack.unpack(ARGV[3]))
local job = facts_of(cmsgpack.unpack(ARGV[5]))
job.size, job.queued, job.deadline = #ARGV[7], now, deadline_ms > 0 and now + deadline_ms or 0
job.work = PROMPT_WEIGHT * job.prompt + OUTPUT_WEIGHT * math.max(0, job.tokens - job.prompt)
local key, queue = PREFIX .. 'job:' .. id, PREFIX .. 'queue:' .. job.tenant
local of_tenant

-- Return whether an answer that had begun at another router goes before newcomers. A tenant must not gain by resuming
-- again and again: its lead, with what it has resumed and not been given yet, is limited.
local function may_lead()
  local begun_work = of_tenant.begun_work
  if begun_work > 0 and redis.call('EXISTS', REDISPATCHED) == 0 then begun_work = 0 end -- their key was lost
  local lowest = lowest_counter()
  local lead = math.max(0, counter_of(job.tenant) - lowest) * job.weight + begun_work
  return lead <= math.max(RESUME_LEAD_WORK, RESUME_LEAD_MS * claim_rate())
end

-- Return the answer that refuses the job where a limit of its tenant or of its API key is reached.
local function reached_limit(tenant_jobs)
  if tenant_jobs >= max.tenant_jobs then return {'full', 'tenant_jobs', job.tenant} end
  local tenant_bytes = of_tenant.bytes + of_tenant.begun_bytes
  if tenant_bytes + job.size > max.tenant_bytes then return {'full', 'tenant_bytes', job.tenant} end
  if job.key == '' then return end
  local kept = hash_fields(keys_of(job.tenant), 'jobs:' .. job.key, 'bytes:' .. job.key)
  if number_of(kept[1]) >= max.key_jobs then return {'full', 'key_jobs', job.key} end
  if number_of(kept[2]) + job.size > max.key_bytes then return {'full', 'key_bytes', job.key} end
end

-- Return the job's turn (see key_turns.lua) in the priority of `begin`, where its place begins, and what is to be kept of
-- it. Without the highest claimed turn, which was lost, the lowest that waits counts.
local function next_turn(begin, tenant_jobs)
  local turn_field, finish_field = turn_fields(begin, job.key, job.key_weight)
  local kept, lowest = hash_fields(keys_of(job.tenant), turn_field, finish_field), 0
  if not kept[1] and tenant_jobs > 0 then
    local before = redis.call('ZLEXCOUNT', queue, '-', '(' .. begin .. ':')
    local place = redis.call('ZRANGE', queue, before, before)[1] or ''
    lowest = string.sub(place, 1, TURN_BYTE - 1) == begin and turn_of(place) or 0
  end
  local claimed = kept[1] and number_of(kept[1]) or lowest
  local turn = math.min(math.max(claimed, number_of(kept[2])), TURNS_LIMIT)
  local finish = turn + turn_length(job.work, job.key_weight)
  return turn, {turn_field, claimed, finish_field, finish}
end

-- Return a newcomer's place, and what is to be kept of its turn, if it has one. Members of equal score are ordered by their
-- bytes: priority, deadline, arrival, or where a key of the tenant has a weight priority, turn, arrival. Jobs without a
-- turn, which came before the weight, are before those that have one. A later attempt, whose job has waited before, comes
-- with its '-' before the first attempts that are its equals. PLACE_BYTES stand before the id.
local function place_of(arrival, tenant_jobs)
  local begin = string.format('%03d', PRIORITY_LIMIT - priority)
  local rest = (job.attempt > 1 and '-' or '0') .. string.format('%015d:', arrival) .. id
  local turns_before = of_tenant.turns > 0
  if tenant_jobs == 0 and (turns_before or job.key ~= '') then
    redis.call('DEL', keys_of(job.tenant)) -- of a queue that was lost
  end
  local has_turn = job.key_weight > 0 or turns_before and tenant_jobs > 0
  if has_turn ~= turns_before then set_terms(job.tenant, nil, has_turn and 1 or 0) end
  if not has_turn then
    return begin .. string.format('%015d', deadline_ms > 0 and job.deadline or 999999999999999) .. rest
  end
  local turn, kept = next_turn(begin, tenant_jobs)
  return begin .. string.format(':%014d', math.floor(turn)) .. rest, kept
end

-- Return in how many ms the job's turn comes, at its tenant's share of the claim rate; 0 where nothing tells. Before it
-- come its tenant's own jobs, and meanwhile work of other tenants: of each as much for its weight, but no more than waits.
-- The work is counted for some tenants, and estimated for the others.
local function wait_before_turn_ms(tenant_jobs, tenant_work)
  local rate = tenant_jobs > 0 and claim_rate() or 0
  if rate <= 0 then return 0 end
  local own_work = redis.call('ZLEXCOUNT', queue, '-', '(' .. job.place) * tenant_work / tenant_jobs
  if own_work == 0 then return 0 end
  local tenants, others, work = redis.call('ZRANGE', TENANTS, 0, TENANTS_PER_ESTIMATE - 1), 0, 0
  read_totals(unpack(tenants))
  for _, other in ipairs(tenants) do
    if other ~= job.tenant then
      others = others + 1
      work = work + math.min(totals[other].work, own_work * totals[other].weight / job.weight)
    end
  end
  if others == 0 then return own_work / rate end
  return (own_work + work / others * (redis.call('ZCARD', TENANTS) - 1)) / rate
end

-- Return the answer that refuses a first attempt; nil: it has a place, perhaps that of another job.
local function refusal(tenant_jobs, use)
  local answer = reached_limit(tenant_jobs)
  if answer then return answer end
  local wait_ms = deadline_ms > 0 and wait_before_turn_ms(tenant_jobs, of_tenant.work) or 0
  if wait_ms > DEADLINE_DOUBT * deadline_ms then return {'late', math.floor(wait_ms)} end
  local limit = make_room(job.size, use, max)
  return limit and {'full', limit, ''}
end

-- Wake the first preferred worker with free rows, or else any.
local function wake_for_job(has_begun)
  local workers = {}
  for worker in string.gmatch(has_begun and '' or job.prefer, '[^\n]+') do workers[#workers + 1] = worker end
  local rooms = #workers > 0 and redis.call('HMGET', ROOMS, unpack(workers)) or {}
  for number, room in ipairs(rooms) do
    if free_rows_in(room) > 0 then return wake_worker(workers[number]) end
  end
  if redis.call('LPUSH', WAKE, 1) > WAKE_LIMIT then redis.call('LPOP', WAKE) end
end

if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 0 then return {'unreserved'} end
beat_router(job.router)
local left = hash_fields(key, 'attempt', 'displaced')
if left[1] and number_of(left[1]) >= job.attempt then return {'known'} end
if left[1] or left[2] then
  forget_job(id)
  flush_counts()
end
if strikes > 0 then
  write_suspect(id, job.tenant, job.adapter, job.attempt, strikes, now + SUSPECT_MS, 0)
end
local ms_left = quarantined_ms(job.tenant, job.adapter)
if ms_left > 0 and not goes_on_in_quarantine(job.attempt, job.prompt, job.prefill, job.rows) then
  return {'quarantined', ms_left}
end
read_totals(job.tenant)
of_tenant = totals[job.tenant]
local has_begun = begun == 1 and (job.attempt > 1 or may_lead())
if begun_bytes_when_full and (not has_begun or cell.begun_bytes + job.size > begun_bytes_when_full) then
  return {'full', 'begun_bytes_when_full', ''}
end
local arrival = record_arrival(id)
local tenant_jobs, kept_of_turn = 0, nil
if has_begun then
  job.place, job.key = id, ''
else
  tenant_jobs = redis.pcall('ZCARD', queue)
  if type(tenant_jobs) ~= 'number' then
    set_aside_unless('zset', 'queue:' .. job.tenant)
    tenant_jobs = 0
  end
  job.place, kept_of_turn = place_of(arrival, tenant_jobs)
  local use = use_of(tenant_jobs + 1, of_tenant.bytes + job.size, job.weight, max)
  local answer = job.attempt == 1 and refusal(tenant_jobs, use)
  if answer then
    changes = {}
    flush_counts() -- whether uses are kept
    return answer
  end
  note_use(job.tenant, use, max)
end
-- In the order that include/waiting_jobs.lua gives.
local facts = ARGV[5] .. cmsgpack.pack(job.place, job.size, job.work, job.queued, job.deadline)
redis.call('HSET', key, 'body', ARGV[7], 'wanted', ARGV[6], 'attempt', job.attempt, 'facts', facts)
redis.call('ZADD', WAITING, deadline_ms > 0 and job.deadline or '+inf', id)
count_waiting(job.tenant, job.size, job.work, has_begun)
if job.key ~= '' then count_of_key(job.tenant, job.key, 1, job.size) end
if kept_of_turn then redis.call('HSET', keys_of(job.tenant), unpack(kept_of_turn)) end
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
