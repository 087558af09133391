-- The demand for adapters: the work that has lately come for each. It decides how many homes an adapter has, workers that
-- its jobs prefer (broker/homes.py): several where it is more than one worker should take, none where it has decayed to
-- nothing.
--
-- Work decays to 1/e in DEMAND_MS. The score of an adapter is the time in ms at which one token of its work will be left:
-- it stays while the work decays, so that the order of the scores is that of the work.
local demand = {}

-- The member that has the work of all jobs, those without an adapter too. More work than MOST_WORK has not come: a score
-- of so much is from before the clock went back.
local ALL, MOST_WORK, MOST_HOMES = '*', 1e10, 1e6
-- Maximum number of adapters beyond DEMAND_LIMIT that a census drops, which each router takes twice a second; and of
-- adapters with several homes.
local TRIMMED_AT_ONCE, HOT_LIMIT = 4000, 256
-- Homes are given up once the others would have less than so many percent of HOME_PERCENT: chance is not to add and
-- remove homes in turns.
local HOMES_KEPT_PERCENT = 70

-- Return how much work is left by a score.
function demand.left(call, score)
  local work = score and math.exp((number_of(score) - call.now) / DEMAND_MS) or 0
  return work < MOST_WORK and work or 0
end

function demand.score(call, work) return call.now + DEMAND_MS * math.log(math.max(1, work)) end

-- Count the work of a job that comes. Returns whether its adapter is cold: of the work before less than a token is left.
function demand.count(call, adapter, work)
  local members, scored, left = {ALL, adapter ~= '' and string.sub(adapter, -ADAPTER_DIGITS) or nil}, {}, 0
  local scores = redis.call('ZMSCORE', call.keys.demand, unpack(members))
  for place, member in ipairs(members) do
    left = demand.left(call, scores[place])
    scored[#scored + 1], scored[#scored + 2] = demand.score(call, left + work), member
  end
  redis.call('ZADD', call.keys.demand, unpack(scored))
  return left < 1
end

-- Drop the adapters whose work has decayed to nothing, and beyond DEMAND_LIMIT those with the least. Scores from before
-- the clock went back are dropped as well. ALL, which is not counted, has the highest score.
function demand.trim(call)
  local key = call.keys.demand
  redis.call('ZREMRANGEBYSCORE', key, '-inf', call.now)
  redis.call('ZREMRANGEBYSCORE', key, demand.score(call, MOST_WORK), '+inf')
  local excess = math.min(redis.call('ZCARD', key) - DEMAND_LIMIT - 1, TRIMMED_AT_ONCE)
  if excess > 0 then redis.call('ZREM', key, unpack(redis.call('ZRANGE', key, 0, excess - 1))) end
end

-- Return how many homes an adapter has that wants so many, a number with a fraction, and had some `before`.
function demand.with_hysteresis(before, wanted)
  if wanted > before or wanted < (before - 1) * HOMES_KEPT_PERCENT / 100 then return math.max(1, math.ceil(wanted)) end
  return before
end

-- Return the adapters with several homes, and how many. They are decided anew where `busy` is known: how many workers'
-- rows all jobs take. An adapter takes of these as much as it has of the work.
function demand.homes(call, busy)
  local before, known, homes, is_changed = {}, {}, {}, false
  local found = redis.call('HGETALL', call.keys.homes)
  for i = 1, #found, 2 do
    local count = math.min(math.floor(number_of(found[i + 1])), MOST_HOMES)
    before[found[i]] = count
    if count > 1 then known[#known + 1], known[#known + 2] = found[i], count end
  end
  if busy == '' then return known end
  demand.trim(call)
  local all = demand.left(call, redis.call('ZSCORE', call.keys.demand, ALL))
  local homes_of_a_token = math.min(number_of(busy), MOST_HOMES) * 100 / HOME_PERCENT / math.max(1, all)
  local top = redis.call('ZREVRANGE', call.keys.demand, 0, HOT_LIMIT, 'WITHSCORES')
  for i = 1, #top, 2 do
    local adapter, wanted = top[i], demand.left(call, top[i + 1]) * homes_of_a_token
    local count = adapter == ALL and 1 or demand.with_hysteresis(before[adapter] or 1, wanted)
    if count > 1 then
      homes[#homes + 1], homes[#homes + 2] = adapter, count
      is_changed = is_changed or before[adapter] ~= count
    end
  end
  if is_changed or #homes ~= #found then
    redis.call('DEL', call.keys.homes)
    if #homes > 0 then redis.call('HSET', call.keys.homes, unpack(homes)) end
  end
  return homes
end
