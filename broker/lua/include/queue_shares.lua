-- Shares of a full queue. A tenant's use is the larger of its shares of jobs and bytes, over its weight, as in Ghodsi et
-- al., Dominant Resource Fairness, 2011. A job whose tenant would have a lower use than another displaces the last job
-- of the tenant with the highest. So a tenant is refused only where no tenant uses more of the queue than it would
-- itself: below its share it is always admitted, whatever the number of tenants. Jobs that have begun take no place of
-- a newcomer: they come on top of the limits.
--- @include "keys"
--- @include "waiting_jobs"

local function use_of(jobs, bytes, weight, max) return math.max(jobs / max.jobs, bytes / max.bytes) / weight end

-- Return the limit that a further newcomer of `size` bytes would exceed; nil: it fits.
local function exceeded_limit(size, max)
  local waiting = redis.call('ZCARD', WAITING)
  if waiting >= max.jobs and waiting - redis.call('ZCARD', REDISPATCHED) >= max.jobs then return 'jobs' end
  if cell.bytes + size > max.bytes then return 'bytes' end
end

-- Begin to keep the uses of all tenants, for as long as the queue is more than half full.
local function keep_uses(max)
  if cell.uses == 1 and redis.call('EXISTS', USES) == 1 then return end
  redis.call('DEL', USES)
  cell.uses = 1
  for _, tenant in ipairs(redis.call('ZRANGE', TENANTS, 0, -1)) do
    local jobs = redis.pcall('ZCARD', PREFIX .. 'queue:' .. tenant)
    if type(jobs) == 'number' then
      read_totals(tenant)
      redis.call('ZADD', USES, use_of(jobs, totals[tenant].bytes, totals[tenant].weight, max), tenant)
    end
  end
end

-- Note the use of a tenant with another job.
local function note_use(tenant, use, max)
  if cell.uses == 0 then return end
  if 2 * redis.call('ZCARD', WAITING) < max.jobs and 2 * cell.bytes < max.bytes then
    redis.call('DEL', USES)
    cell.uses = 0
  else
    redis.call('ZADD', USES, use, tenant)
  end
end

-- Displace other tenants' jobs until one of `size` bytes fits, whose tenant's use is then `use`. Their routers find the
-- mark that a displaced job leaves. Returns the limit that is still exceeded. Its functions are made here, since each
-- costs the server time where they are not needed.
local function displace(limit, size, use, max)
  -- Return a tenant's use of the queue now and its last job; nil without a job that has not begun, or for a queue of
  -- another type, which a census sets aside.
  local function use_now(tenant)
    local queue = PREFIX .. 'queue:' .. tenant
    local place = redis.pcall('ZREVRANGE', queue, 0, 0)[1]
    if not place then return end
    local id = string.sub(place, PLACE_BYTES + 1)
    local facts = hash_fields(PREFIX .. 'job:' .. id, 'facts')[1]
    local is_readable, _, _, _, _, _, _, weight = read_packed(checked_facts, facts)
    if not is_readable then return end
    read_totals(tenant)
    return use_of(redis.call('ZCARD', queue), totals[tenant].bytes, weight, max), id
  end

  -- Return the highest use of a tenant, if it is above `use`, and that tenant's last job. Jobs that were claimed have not
  -- been taken off the uses in USES: those that turn out too high are corrected.
  local function highest_use()
    for _ = 1, USES_PER_ENQUEUE do
      local top = redis.call('ZREVRANGE', USES, 0, 0, 'WITHSCORES')
      if not top[1] or tonumber(top[2]) <= use then return end
      local found, id = use_now(top[1])
      if not found then
        redis.call('ZREM', USES, top[1])
      elseif found < tonumber(top[2]) then
        redis.call('ZADD', USES, found, top[1])
      else
        return found, id
      end
    end
  end

  keep_uses(max)
  for _ = 1, DISPLACED_PER_ENQUEUE do
    local _, id = highest_use()
    if not id then return limit end
    forget_job(id)
    flush_counts()
    redis.call('HSET', PREFIX .. 'job:' .. id, 'displaced', 1)
    redis.call('PEXPIRE', PREFIX .. 'job:' .. id, DISPLACED_MS)
    limit = exceeded_limit(size, max)
    if not limit then return end
  end
  return limit
end

-- Make room for a newcomer; returns the limit that is still exceeded.
local function make_room(size, use, max)
  local limit = exceeded_limit(size, max)
  return limit and displace(limit, size, use, max)
end
