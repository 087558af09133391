-- What a claimed job's tenant has been charged, so that each token is charged once: tenant, weight, attempt, output
-- tokens, and the cost of the prompt. The order is a format, as that of the facts.
--- @include "keys"
--- @include "tenant_counters"

-- Record a claim. Returns what it costs the tenant: the prompt and the adapter's load, at the first attempt's first claim.
local function charge_claim(id, tenant, weight, attempt, prompt, load)
  local key, is_first = PREFIX .. 'charged:' .. id, attempt == 1
  local prompt_cost = is_first and PROMPT_WEIGHT * prompt / weight or 0
  local record = cmsgpack.pack(tenant, weight, attempt, 0, prompt_cost)
  if not is_first then
    redis.call('SET', key, record, 'PX', CHARGE_RECORD_MS)
    return 0
  end
  if not redis.call('SET', key, record, 'PX', CHARGE_RECORD_MS, 'NX') then return 0 end
  return prompt_cost + load / weight
end

-- Charge the usage reports that begin at argument `first`; returns how many arguments they take. Each is id, attempt,
-- output tokens so far, whether the attempt ended, whether it ran at all. Tokens of an earlier report are not charged
-- again; an attempt that never ran gets the cost of its prompt back.
local function charge_reports(first, reports)
  for i = first, first + 5 * (reports - 1), 5 do
    local key = PREFIX .. 'charged:' .. ARGV[i]
    local record = redis.call('GET', key)
    local tenant, weight, attempt, tokens, prompt_cost
    if record then tenant, weight, attempt, tokens, prompt_cost = cmsgpack.unpack(record) end
    if attempt == tonumber(ARGV[i + 1]) then
      local new_tokens = tonumber(ARGV[i + 2]) - tokens
      local ended, ran = ARGV[i + 3] == '1', ARGV[i + 4] == '1'
      if new_tokens > 0 then charge_tenant(tenant, OUTPUT_WEIGHT * new_tokens / weight) end
      if not ended then
        tokens = tokens + math.max(new_tokens, 0)
        redis.call('SET', key, cmsgpack.pack(tenant, weight, attempt, tokens, prompt_cost), 'PX', CHARGE_RECORD_MS)
      else
        if not ran then charge_tenant(tenant, -prompt_cost) end
        redis.call('DEL', key)
      end
    end
  end
  return 5 * reports
end
