-- Records of charges for claimed jobs, so that each token is charged once, packed in this order: tenant, weight,
-- attempt, output tokens, the cost of the prompt for as long as it may be refunded, the refund that the next claim
-- charges again, and the time of the last change. A census drops the records that nothing has changed for long.
local charges = {}

-- Number of claimed jobs' charges, drawn by chance, of which a census drops those that are old.
local CHARGES_PER_CENSUS = 32

-- Return a record's values. Raises an error on those that this library cannot have packed.
function charges.checked(_, tenant, weight, attempt, tokens, refundable, refunded, changed)
  if tenant >= '' and weight > 0 and attempt >= 0 and tokens >= 0 and refundable >= 0 and refunded >= 0 and changed >= 0
      and weight + attempt + tokens + refundable + refunded + changed < math.huge then
    return tenant, weight, attempt, tokens, refundable, refunded, changed
  end
  error('unreadable')
end

-- Record a claim. Returns what it costs the tenant: the prompt and the adapter's load at the first claim of the first
-- attempt, or of one that no worker has had before, and what was refunded at the claim after a refund.
function charges.claim(call, id, tenant, weight, attempt, has_begun, prompt, load)
  local is_first = attempt == 1 or not has_begun
  local key, prompt_cost = call.keys.charged, is_first and PROMPT_WEIGHT * prompt / weight or 0
  local fresh = cmsgpack.pack(tenant, weight, attempt, 0, prompt_cost, 0, call.now)
  local is_new = redis.call('HSETNX', key, id, fresh)
  local record = is_new == 0 and redis.call('HGET', key, id)
  local is_readable, _, _, charged_attempt, _, refundable, refunded = read_packed(charges.checked, record or '')
  if not is_readable then
    if is_new ~= 1 then redis.call('HSET', key, id, fresh) end -- the record is nobody's here
    return is_first and prompt_cost + load / weight or 0
  end
  if charged_attempt < attempt or refunded > 0 then
    redis.call('HSET', key, id, cmsgpack.pack(tenant, weight, attempt, 0, refundable + refunded, 0, call.now))
  end
  return refunded
end

-- Return a record after a report, nil for none, and what the tenant is charged. Tokens of an earlier report are not
-- charged again. An attempt that ended and never ran gets the cost of its prompt back, if no attempt before it has run.
function charges.after_report(call, record, report_attempt, report_tokens, ended, ran)
  local is_readable, tenant, weight, attempt, tokens, refundable, refunded = read_packed(charges.checked, record)
  if not is_readable then return end
  if attempt ~= report_attempt then return record end
  local new_tokens = math.max(0, report_tokens - tokens)
  local cost = OUTPUT_WEIGHT * new_tokens / weight
  if ran then refundable = 0 end
  if not ended then
    return cmsgpack.pack(tenant, weight, attempt, tokens + new_tokens, refundable, refunded, call.now), tenant, cost
  elseif refundable > 0 then
    return cmsgpack.pack(tenant, weight, attempt, tokens, 0, refundable, call.now), tenant, cost, refundable
  end
  return refunded > 0 and record or nil, tenant, cost
end

-- Charge usage reports, given packed: id, attempt, output tokens so far, whether the attempt ended, and whether it ran
-- at all, of one after the other.
function charges.report(call, packed)
  suspects.read(call)
  local reports = cmsgpack.unpack(packed)
  if #reports == 0 then return end
  local key, ids, records, costs, written, gone = call.keys.charged, {}, {}, {}, {}, {}
  for i = 1, #reports, 5 do ids[#ids + 1] = reports[i] end
  for i, record in ipairs(redis.call('HMGET', key, unpack(ids))) do records[ids[i]] = record end
  for i = 1, #reports, 5 do
    local id, attempt, tokens, ended = reports[i], reports[i + 1], reports[i + 2], reports[i + 3]
    local former, tenant, cost, refund = records[id], nil, nil, nil
    if former then
      records[id], tenant, cost, refund = charges.after_report(call, former, attempt, tokens, ended, reports[i + 4])
      if cost and cost > 0 then costs[#costs + 1], costs[#costs + 2] = tenant, cost end
      if refund then costs[#costs + 1], costs[#costs + 2] = tenant, -refund end
      if not records[id] then
        gone[#gone + 1] = id
      elseif records[id] ~= former then
        written[#written + 1], written[#written + 2] = id, records[id]
      end
    end
    suspects.report(call, id, attempt, tokens, ended)
  end
  tenants.charge(call, costs)
  if #written > 0 then redis.call('HSET', key, unpack(written)) end
  if #gone > 0 then redis.call('HDEL', key, unpack(gone)) end
end

-- Forget a job's charges, up to an attempt.
function charges.forget(call, id, last_attempt)
  local record = redis.call('HGET', call.keys.charged, id)
  if not record then return end
  local is_readable, _, _, attempt = read_packed(charges.checked, record)
  if not is_readable or attempt <= last_attempt then redis.call('HDEL', call.keys.charged, id) end
end

-- Drop records of which nothing has changed for long, among some drawn by chance.
function charges.drop_old(call)
  local drawn = redis.call('HRANDFIELD', call.keys.charged, CHARGES_PER_CENSUS, 'WITHVALUES')
  for i = 1, #drawn, 2 do
    local is_readable, _, _, _, _, _, refunded, changed = read_packed(charges.checked, drawn[i + 1])
    if not is_readable or math.abs(call.now - changed) > (refunded > 0 and REFUND_RECORD_MS or CHARGE_RECORD_MS) then
      redis.call('HDEL', call.keys.charged, drawn[i])
    end
  end
end

-- Charge tenants for the usage that workers report.
register('charge', function(_, arguments) charges.report(new_call(arguments), arguments[2]) end)
