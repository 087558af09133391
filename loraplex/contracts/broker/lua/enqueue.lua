-- The way of a job into the queue: limits, its place, and room in a full queue.
local enqueue, uses = {}, {}

-- A first attempt is refused when its turn comes later than this many times its deadline: the estimate is rough.
local DEADLINE_DOUBT = 2
-- Maximum tenants of which one enqueue corrects the use of the queue.
local USES_PER_ENQUEUE = 256
-- Time in ms for which a displaced job is remembered; its router looks for it every quarter of a second.
local DISPLACED_MS = 30000
-- Maximum turn of a job, in tokens over a weight: it has 14 digits in a place.
local TURNS_LIMIT = 1e14 - 1
-- Number of places by which a job that needs a whole worker goes before other redispatched jobs.
local WHOLE_WORKERS_FIRST = 2 ^ 50

-- Shares of a full queue. A tenant's use is the larger of its shares of jobs and bytes, over its weight, as in Ghodsi
-- et al., Dominant Resource Fairness, 2011. A job whose tenant would have a lower use than another displaces the last
-- job of the tenant with the highest. So a tenant is refused only where no tenant uses more of the queue than it would
-- itself: below its share it is always admitted, whatever the number of tenants. Jobs that have begun take no place of
-- a newcomer: they come on top of the limits.

function uses.of(waiting, bytes, weight, max) return math.max(waiting / max.jobs, bytes / max.bytes) / weight end

-- Return the limit that a further newcomer of `size` bytes would exceed; nil: it fits.
function uses.exceeded_limit(call, size, max)
  local waiting = redis.call('ZCARD', call.keys.waiting)
  if waiting >= max.jobs and waiting - redis.call('ZCARD', call.keys.again) >= max.jobs then return 'jobs' end
  if call.cell.bytes + size > max.bytes then return 'bytes' end
end

-- Return a tenant's use of the queue now and its last job; nil without a job that has not begun.
function uses.now(call, tenant, max)
  local queue = call.prefix .. 'queue:' .. tenant
  local place = redis.call('ZREVRANGE', queue, 0, 0)[1]
  if not place then return end
  local id = string.sub(place, PLACE_BYTES + 1)
  local facts = redis.call('HGET', call.prefix .. 'job:' .. id, 'facts')
  local is_readable, _, _, _, _, _, _, weight = read_packed(jobs.checked, facts)
  if not is_readable then return end
  tenants.read(call, tenant)
  return uses.of(redis.call('ZCARD', queue), call.totals[tenant].bytes, weight, max), id
end

-- Return the last job of the tenant with the highest use, if that is above `use`. The key `uses` has the uses at the
-- tenants' last enqueues: those that turn out too high by now are corrected, USES_PER_ENQUEUE in a call.
function uses.last_of_highest(call, use, max)
  local key = call.keys.uses
  for _ = 1, USES_PER_ENQUEUE do
    local top = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
    if not top[1] or tonumber(top[2]) <= use then return end
    local now, id = uses.now(call, top[1], max)
    if not now then
      redis.call('ZREM', key, top[1])
    elseif now < tonumber(top[2]) then
      redis.call('ZADD', key, now, top[1])
    else
      return id
    end
  end
end

-- Displace other tenants' jobs until one of `size` bytes fits, whose tenant's use is then `use`. Their routers find the
-- mark that a displaced job leaves. Returns the limit that is still exceeded.
function uses.make_room(call, size, use, max)
  local limit = uses.exceeded_limit(call, size, max)
  if not limit then return end
  for _ = 1, DISPLACED_PER_ENQUEUE do
    local id = uses.last_of_highest(call, use, max)
    if not id then return limit end
    jobs.forget(call, id)
    tenants.flush(call)
    redis.call('HSET', call.prefix .. 'job:' .. id, 'displaced', 1)
    redis.call('PEXPIRE', call.prefix .. 'job:' .. id, DISPLACED_MS)
    limit = uses.exceeded_limit(call, size, max)
    if not limit then return end
  end
  return limit
end

-- Return what is not among a job's facts, and the limits, in the order of broker/terms.py.
function enqueue.terms_of(deadline_ms, begun, priority, strikes, max_jobs, bytes, tenant_jobs, tenant_bytes, key_jobs,
    key_bytes)
  return deadline_ms, begun, priority, strikes, {jobs = max_jobs, bytes = bytes, tenant_jobs = tenant_jobs,
    tenant_bytes = tenant_bytes, key_jobs = key_jobs, key_bytes = key_bytes}
end

-- Return the fields of broker/terms.py that are used here, of the packed facts.
function enqueue.facts_of(tenant, _, adapter, prefer, router, attempt, weight, tokens, prefill, prompt, _, rows, _, key,
    key_weight)
  return {tenant = tenant, adapter = adapter, prefer = prefer, router = router, attempt = attempt, weight = weight,
    tokens = tokens, prefill = prefill, prompt = prompt, rows = rows, key = key, key_weight = key_weight}
end

-- Return whether an answer that had begun at another router goes before newcomers. A tenant must not gain by resuming
-- again and again: its lead, with what it has resumed and not been given yet, is limited.
function enqueue.may_lead(call, job)
  local begun_work = call.totals[job.tenant].begun_work
  if begun_work > 0 and redis.call('EXISTS', call.keys.again) == 0 then begun_work = 0 end -- their key was lost
  local lowest = tenants.lowest_counter(call)
  local lead = math.max(0, tenants.counter_of(call, job.tenant) - lowest) * job.weight + begun_work
  return lead <= math.max(RESUME_LEAD_WORK, RESUME_LEAD_MS * tenants.claim_rate(call))
end

-- Return the answer that refuses the job where a limit of its tenant or of its API key is reached.
function enqueue.reached_limit(call, job, max, tenant_jobs)
  if tenant_jobs >= max.tenant_jobs then return {'full', 'tenant_jobs', job.tenant} end
  local of_tenant = call.totals[job.tenant]
  if of_tenant.bytes + of_tenant.begun_bytes + job.size > max.tenant_bytes then
    return {'full', 'tenant_bytes', job.tenant}
  end
  if job.key == '' then return end
  local of_key = redis.call('HMGET', turns.hash_of(call, job.tenant), 'jobs:' .. job.key, 'bytes:' .. job.key)
  if number_of(of_key[1]) >= max.key_jobs then return {'full', 'key_jobs', job.key} end
  if number_of(of_key[2]) + job.size > max.key_bytes then return {'full', 'key_bytes', job.key} end
end

-- Return the job's turn (see jobs.lua) in the priority of `begin`, where its place begins, and what is to be kept of
-- it. Without the highest claimed turn, which was lost, the lowest that waits counts.
function enqueue.next_turn(call, job, begin, tenant_jobs)
  local turn_field, finish_field = turns.fields(begin, job.key, job.key_weight)
  local known, lowest = redis.call('HMGET', turns.hash_of(call, job.tenant), turn_field, finish_field), 0
  if not known[1] and tenant_jobs > 0 then
    local before = redis.call('ZLEXCOUNT', job.queue, '-', '(' .. begin .. ':')
    local place = redis.call('ZRANGE', job.queue, before, before)[1] or ''
    lowest = string.sub(place, 1, TURN_BYTE - 1) == begin and turns.of(place) or 0
  end
  local claimed = known[1] and number_of(known[1]) or lowest
  local turn = math.min(math.max(claimed, number_of(known[2])), TURNS_LIMIT)
  local finish = turn + turns.length(job.work, job.key_weight)
  return turn, {turn_field, claimed, finish_field, finish}
end

-- Return a newcomer's place, and what is to be kept of its turn, if it has one. Members of equal score are ordered by
-- their bytes: priority, deadline, arrival, or where a key of the tenant has a weight priority, turn, arrival. Jobs
-- without a turn, which came before the weight, are before those that have one. A later attempt, whose job has waited
-- before, comes with its '-' before the first attempts that are its equals. PLACE_BYTES stand before the id.
function enqueue.place_of(call, job, arrival, tenant_jobs)
  local begin = string.format('%03d', PRIORITY_LIMIT - job.priority)
  local rest = (job.attempt > 1 and '-' or '0') .. string.format('%015d:', arrival) .. job.id
  local turns_before = call.totals[job.tenant].turns > 0
  if tenant_jobs == 0 and (turns_before or job.key ~= '') then
    redis.call('DEL', turns.hash_of(call, job.tenant)) -- of a queue that was lost
  end
  local has_turn = job.key_weight > 0 or turns_before and tenant_jobs > 0
  if has_turn ~= turns_before then tenants.set_terms(call, job.tenant, nil, has_turn and 1 or 0) end
  if not has_turn then
    return begin .. string.format('%015d', job.deadline > 0 and job.deadline or 999999999999999) .. rest
  end
  local turn, new_turn = enqueue.next_turn(call, job, begin, tenant_jobs)
  return begin .. string.format(':%014d', math.floor(turn)) .. rest, new_turn
end

-- Return in how many ms the job's turn comes, at its tenant's share of the claim rate; 0 where nothing tells. Before it
-- come its tenant's own jobs, and meanwhile work of other tenants: of each as much for its weight, but no more than
-- waits. The work is counted for some tenants, and estimated for the others.
function enqueue.wait_before_turn_ms(call, job, tenant_jobs, tenant_work)
  local rate = tenant_jobs > 0 and tenants.claim_rate(call) or 0
  if rate <= 0 then return 0 end
  local own_work = redis.call('ZLEXCOUNT', job.queue, '-', '(' .. job.place) * tenant_work / tenant_jobs
  if own_work == 0 then return 0 end
  local names, others, work = redis.call('ZRANGE', call.keys.tenants, 0, TENANTS_PER_ESTIMATE - 1), 0, 0
  tenants.read(call, unpack(names))
  for _, other in ipairs(names) do
    if other ~= job.tenant then
      others = others + 1
      work = work + math.min(call.totals[other].work, own_work * call.totals[other].weight / job.weight)
    end
  end
  if others == 0 then return own_work / rate end
  return (own_work + work / others * (redis.call('ZCARD', call.keys.tenants) - 1)) / rate
end

-- Return the answer that refuses a first attempt; nil: it has a place, perhaps that of another job.
function enqueue.refusal(call, job, max, tenant_jobs, use)
  local answer = enqueue.reached_limit(call, job, max, tenant_jobs)
  if answer then return answer end
  local tenant_work = call.totals[job.tenant].work
  local wait_ms = job.deadline > 0 and enqueue.wait_before_turn_ms(call, job, tenant_jobs, tenant_work) or 0
  if wait_ms > DEADLINE_DOUBT * job.deadline_ms then return {'late', math.floor(wait_ms)} end
  local limit = uses.make_room(call, job.size, use, max)
  return limit and {'full', limit, ''}
end

-- Wake the first preferred worker with free rows, or else any.
function enqueue.wake(call, prefer)
  local preferred = {}
  for worker in string.gmatch(prefer, '[^\n]+') do preferred[#preferred + 1] = worker end
  local rooms = #preferred > 0 and redis.call('HMGET', call.keys.rooms, unpack(preferred)) or {}
  for number, room in ipairs(rooms) do
    if workers.free_rows_in(call, room) > 0 then return workers.wake(call, preferred[number]) end
  end
  if redis.call('LPUSH', call.keys.wake, 1) > WAKE_LIMIT then redis.call('LPOP', call.keys.wake) end
end

-- Return packed facts without the workers that the adapter prefers: the job is not held for any.
function enqueue.without_preference(packed)
  local facts = {cmsgpack.unpack(packed)}
  facts[4] = ''
  return cmsgpack.pack(unpack(facts))
end

-- Put a job into the queue. Answers {'queued'}, {'known'} for an attempt that is not newer than the one that waits, or
-- for a refused first attempt {'full', limit, tenant or API key} or {'late', wait in ms}. A later attempt, and a job
-- that has begun, is refused by a full Redis alone. For a newcomer or a suspect of a tenant or adapter in quarantine
-- {'quarantined', ms left}.
function enqueue.put(arguments)
  local call, id, begun_bytes_when_full, body = new_call(arguments), arguments[2], tonumber(arguments[4]), arguments[7]
  local job = enqueue.facts_of(cmsgpack.unpack(arguments[5]))
  local deadline_ms, begun, priority, strikes, max = enqueue.terms_of(cmsgpack.unpack(arguments[3]))
  job.id, job.deadline_ms, job.priority, job.size, job.queued = id, deadline_ms, priority, #body, call.now
  job.deadline = deadline_ms > 0 and call.now + deadline_ms or 0
  job.work = PROMPT_WEIGHT * job.prompt + OUTPUT_WEIGHT * math.min(RECKONED_TOKENS, math.max(0, job.tokens - job.prompt))
  local key = call.prefix .. 'job:' .. id
  job.queue = call.prefix .. 'queue:' .. job.tenant
  routers.beat(call, job.router)
  local former = redis.call('HMGET', key, 'attempt', 'displaced')
  if former[1] and number_of(former[1]) >= job.attempt then return {'known'} end
  if former[1] or former[2] then
    jobs.forget(call, id)
    tenants.flush(call)
  end
  if strikes > 0 then
    suspects.write(call, id, job.tenant, job.adapter, job.attempt, strikes, call.now + SUSPECT_MS, 0)
  end
  local left_ms = quarantine.left_ms(call, job.tenant, job.adapter)
  if left_ms > 0 and not quarantine.admits(job.attempt, job.prompt, job.prefill, job.rows) then
    return {'quarantined', left_ms}
  end
  tenants.read(call, job.tenant)
  local has_begun = begun == 1 and (job.attempt > 1 or enqueue.may_lead(call, job))
  if begun_bytes_when_full and (not has_begun or call.cell.begun_bytes + job.size > begun_bytes_when_full) then
    return {'full', 'begun_bytes_when_full', ''}
  end
  local arrival = jobs.record_arrival(call, id)
  local tenant_jobs, new_turn = 0, nil
  if has_begun then
    job.place, job.key = id, ''
  else
    tenant_jobs = redis.call('ZCARD', job.queue)
    job.place, new_turn = enqueue.place_of(call, job, arrival, tenant_jobs)
    local use = uses.of(tenant_jobs + 1, call.totals[job.tenant].bytes + job.size, job.weight, max)
    local answer = job.attempt == 1 and enqueue.refusal(call, job, max, tenant_jobs, use)
    if answer then return answer end
    redis.call('ZADD', call.keys.uses, use, job.tenant)
  end
  local packed = arguments[5]
  if job.attempt == 1 and demand.count(call, job.adapter, job.work) and job.prefer ~= '' then
    -- It is loaded wherever the job runs. The first worker that it would prefer is woken, so that it will find it again.
    packed = enqueue.without_preference(packed)
  end
  -- In the order that jobs.lua gives.
  local facts = packed .. cmsgpack.pack(job.place, job.size, job.work, job.queued, job.deadline)
  redis.call('HSET', key, 'body', body, 'wanted', arguments[6], 'attempt', job.attempt, 'facts', facts)
  redis.call('ZADD', call.keys.waiting, deadline_ms > 0 and job.deadline or '+inf', id)
  tenants.count_waiting(call, job.tenant, job.size, job.work, has_begun)
  tenants.count_work(call.keys.arrived_work, job.work)
  if job.key ~= '' then turns.count(call, job.tenant, job.key, 1, job.size) end
  if new_turn then redis.call('HSET', turns.hash_of(call, job.tenant), unpack(new_turn)) end
  if has_begun then
    -- A job that needs a whole worker is before all others: an empty worker does not stay so for long.
    redis.call('ZADD', call.keys.again, job.rows >= ALL_ROWS and arrival - WHOLE_WORKERS_FIRST or arrival, id)
  else
    redis.call('ZADD', job.queue, 0, job.place)
    if tenant_jobs == 0 then tenants.activate(call, job.tenant, job.weight) end
  end
  tenants.flush(call)
  enqueue.wake(call, has_begun and '' or job.prefer)
  return {'queued'}
end

register_admission('enqueue', function(_, arguments) return enqueue.put(arguments) end)
