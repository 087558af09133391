-- The claim rate: how much work the cell claims in a ms while more waits than the workers take.
--- @include "clock"
--- @include "totals"

-- Count claimed work. An interval of CLAIM_RATE_MS replaces the one before. A queue that ran empty, or a worker that
-- found no more, ends the measurement. `flush_counts` comes after it.
local function measure_claim_rate(claimed_work, is_ended)
  if not cell then read_totals() end
  local since, work = cell.rate_since, cell.rate_work + claimed_work
  if is_ended then
    cell.rate_since, cell.rate_work, cell.rate = 0, 0, 0
  elseif since == 0 or since > now then -- the clock went back
    cell.rate_since, cell.rate_work = now, 0
  elseif now - since >= CLAIM_RATE_MAX_MS then -- claims had stopped, or the clock was put forward
    cell.rate_since, cell.rate_work, cell.rate = now, 0, 0
  elseif now - since >= CLAIM_RATE_MS then
    cell.rate_since, cell.rate_work, cell.rate = now, 0, work / (now - since)
  else
    cell.rate_work = work
  end
end

-- Return the claim rate, work in ms: that of the last interval, or of the current one if it is higher; 0 where no work
-- waits for a row.
local function claim_rate()
  local since, rate = cell.rate_since, cell.rate
  local age = now - since
  if age >= CLAIM_RATE_MAX_MS then return 0 end
  if since > 0 and age >= CLAIM_RATE_MIN_MS then rate = math.max(rate, cell.rate_work / age) end
  return rate
end
