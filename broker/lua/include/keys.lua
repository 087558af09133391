-- Names of the cell's keys, which broker/keys.py describes. ARGV[1] is their common prefix. One a line: a script leaves
-- out those that it does not use.
local PREFIX = ARGV[1]
local WAITING = PREFIX .. 'waiting'
local REDISPATCHED = PREFIX .. 'again'
local ARRIVALS = PREFIX .. 'arrivals'
local TENANTS = PREFIX .. 'tenants'
local IDLE = PREFIX .. 'idle'
local FLOOR = PREFIX .. 'floor'
local USES = PREFIX .. 'uses'
local TOTALS = PREFIX .. 'bytes'
local CLAIM_RATE = PREFIX .. 'pace'
local WAKE = PREFIX .. 'wake'
local ROUTERS = PREFIX .. 'routers'
local WORKERS = PREFIX .. 'workers'
local SUSPECTS = PREFIX .. 'suspects'

-- Return what a key has as a number; 0 for nothing and for what is no finite number. A script that failed on a value which
-- something else has written would stop everybody's work.
local function number_of(value)
  local number = tonumber(value)
  return number and number - number == 0 and number or 0
end

-- Return fields of a key. One that is no hash is deleted.
local function hash_fields(key, ...)
  local values = redis.pcall('HMGET', key, ...)
  if not values.err then return values end
  redis.call('DEL', key)
  return {}
end

-- Count one more in a key, from 1 on; from there anew where the key has no count, or one that a place has no digits for.
local function increment(key)
  local count = redis.pcall('INCR', key)
  if type(count) == 'number' and count >= 1 and count < 1e15 then return count end
  redis.call('SET', key, 1)
  return 1
end
