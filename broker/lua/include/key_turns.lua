-- Fields about a tenant's API keys, in a hash that is removed with the tenant's queue:
--   jobs:KEY, bytes:KEY    newcomers of a key whose plan bounds or weighs them
--   turn:PRIORITY          the highest turn of the jobs that were claimed
--   finish:PRIORITY:KEY    the end of a key's last turn
-- From the first job of a key with a weight on, until the queue is empty, every job that comes has a turn. Turns are the
-- start tags of Goyal et al., Start-Time Fair Queueing, 1996: a key's next turn begins with the job that is being claimed,
-- or at the end of the key's last turn if that is later, and ends as much later as the job has work for the key's weight.
-- Calls without a key, and with keys that have no weight, have turns in common, as one key of weight 1. Each priority has
-- turns of its own.
--- @include "keys"
--- @include "totals"

-- Return the name of the hash.
local function keys_of(tenant) return PREFIX .. 'queue:' .. tenant .. '/keys' end

-- Count a key's newcomers.
local function count_of_key(tenant, key, jobs, bytes)
  local name, jobs_field, bytes_field = keys_of(tenant), 'jobs:' .. key, 'bytes:' .. key
  local kept = hash_fields(name, jobs_field, bytes_field)
  jobs = number_of(kept[1]) + jobs
  if jobs > 0 then
    redis.call('HSET', name, jobs_field, jobs, bytes_field, math.max(0, number_of(kept[2]) + bytes))
  else
    redis.call('HDEL', name, jobs_field, bytes_field)
  end
end

-- Return the fields of a priority, given as the beginning of a place, and of the key, '' for all those without a weight.
local function turn_fields(place, key, key_weight)
  local priority = string.sub(place, 1, TURN_BYTE - 1)
  return 'turn:' .. priority, 'finish:' .. priority .. ':' .. (key_weight > 0 and key or '')
end

-- Return how long a turn lasts.
local function turn_length(work, key_weight) return work / (key_weight > 0 and key_weight or 1) end

-- Return the turn that a place of a newcomer has; nil for one that has a deadline instead.
local function turn_of(place)
  if string.sub(place, TURN_BYTE, TURN_BYTE) == ':' then
    return number_of(string.sub(place, TURN_BYTE + 1, ARRIVAL_BYTE - 1))
  end
end

-- Note that a job is claimed: no later job has an earlier turn.
local function note_turn(tenant, place)
  local turn = turn_of(place)
  if not turn then return end
  local name, field = keys_of(tenant), turn_fields(place, '', 0)
  if turn > number_of(hash_fields(name, field)[1]) then redis.call('HSET', name, field, turn) end
end

-- Give the turn of a job that leaves without a claim back to its key: the next one begins earlier.
local function give_turn_back(tenant, place, work, key, key_weight)
  if not turn_of(place) then return end
  local name, _, field = keys_of(tenant), turn_fields(place, key, key_weight)
  local finish = hash_fields(name, field)[1]
  if not finish then return end
  redis.call('HSET', name, field, math.max(0, number_of(finish) - turn_length(work, key_weight)))
end
