-- Records of charges for claimed jobs, so that each token is charged once: tenant, weight, attempt, output tokens, the cost
-- of the prompt for as long as it may be refunded, and the refund that the next claim charges again. The order is a format,
-- as that of the facts; records of older versions have no refund.
--- @include "keys"
--- @include "tenant_counters"
--- @include "suspects"
--- @include "packed"

-- Return a record's values. Raises an error on those that these scripts cannot have packed.
local function checked_charges(tenant, weight, attempt, tokens, refundable, refunded)
  refunded = refunded or 0
  if tenant >= '' and weight > 0 and attempt >= 0 and tokens >= 0 and refundable >= 0 and refunded >= 0
      and weight + attempt + tokens + refundable + refunded < math.huge then
    return tenant, weight, attempt, tokens, refundable, refunded
  end
  error('unreadable')
end

-- Return the values of a record; nothing without one, and for one that cannot be read, which is deleted.
local function read_charges(key)
  local record = redis.pcall('GET', key)
  if not record then return end
  local is_readable, tenant, weight, attempt, tokens, refundable, refunded = read_packed(checked_charges, record)
  if is_readable then return tenant, weight, attempt, tokens, refundable, refunded end
  redis.call('DEL', key)
end

local function write_charges(key, ttl_ms, ...)
  redis.call('SET', key, cmsgpack.pack(...), 'PX', ttl_ms)
end

-- Record a claim. Returns what it costs the tenant: the prompt and the adapter's load at the first claim of the first
-- attempt, or of one that no worker has had before, and what was refunded at the claim after a refund.
local function charge_claim(id, tenant, weight, attempt, has_begun, prompt, load)
  local key, is_first = PREFIX .. 'charged:' .. id, attempt == 1 or not has_begun
  local prompt_cost = is_first and PROMPT_WEIGHT * prompt / weight or 0
  local fresh = cmsgpack.pack(tenant, weight, attempt, 0, prompt_cost, 0)
  local record = redis.pcall('SET', key, fresh, 'PX', CHARGE_RECORD_MS, 'NX', 'GET')
  if not record then return is_first and prompt_cost + load / weight or 0 end
  local is_readable, _, _, charged_attempt, _, refundable, refunded = read_packed(checked_charges, record)
  if not is_readable then
    redis.call('SET', key, fresh, 'PX', CHARGE_RECORD_MS)
    return is_first and prompt_cost + load / weight or 0
  end
  if charged_attempt < attempt or refunded > 0 then
    write_charges(key, CHARGE_RECORD_MS, tenant, weight, attempt, 0, refundable + refunded, 0)
  end
  return refunded
end

-- Charge a usage report. Tokens of an earlier report are not charged again. An attempt that ended and never ran gets
-- the cost of its prompt back, if no attempt before it has run.
local function charge_report(key, report_attempt, report_tokens, ended, ran)
  local tenant, weight, attempt, tokens, refundable, refunded = read_charges(key)
  if not tenant or attempt ~= report_attempt then return end
  local new_tokens = report_tokens - tokens
  if new_tokens > 0 then charge_tenant(tenant, OUTPUT_WEIGHT * new_tokens / weight) end
  if ran then refundable = 0 end
  if not ended then
    tokens = tokens + math.max(new_tokens, 0)
    write_charges(key, CHARGE_RECORD_MS, tenant, weight, attempt, tokens, refundable, refunded)
  elseif refundable > 0 then
    charge_tenant(tenant, -refundable)
    write_charges(key, REFUND_RECORD_MS, tenant, weight, attempt, tokens, 0, refundable)
  elseif refunded == 0 then
    redis.call('DEL', key)
  end
end

-- Charge the usage reports that begin at argument `first`; returns how many arguments they take. Each is id, attempt,
-- output tokens so far, whether the attempt ended, whether it ran at all.
local function charge_reports(first, reports)
  read_suspects()
  for i = first, first + 5 * (reports - 1), 5 do
    local attempt, tokens, ended = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), ARGV[i + 3] == '1'
    charge_report(PREFIX .. 'charged:' .. ARGV[i], attempt, tokens, ended, ARGV[i + 4] == '1')
    report_suspect(ARGV[i], attempt, tokens, ended)
  end
  return 5 * reports
end
