-- The claim rate: how much work the cell claims in a ms while more waits than the workers take.
--- @include "keys"
--- @include "clock"
--- @include "tenant_counters"

-- Count claimed work. An interval of CLAIM_RATE_MS replaces the one before. A queue that ran empty, or a worker that
-- found no more, ends the measurement: the claim deletes the key.
local function measure_claim_rate(claimed_work)
  local rate = redis.call('HMGET', CLAIM_RATE, 'since', 'work')
  local since, work = number_of(rate[1]), number_of(rate[2]) + claimed_work
  if since == 0 or since > now then -- the clock went back
    redis.call('HSET', CLAIM_RATE, 'since', now, 'work', 0)
  elseif now - since >= CLAIM_RATE_MS then
    redis.call('HSET', CLAIM_RATE, 'since', now, 'work', 0, 'pace', exact(work / (now - since)))
  else
    redis.call('HSET', CLAIM_RATE, 'work', work)
  end
end
