-- Names of the cell's keys, which broker/keys.py describes. ARGV[1] is their common prefix. One a line: a script leaves
-- out those that it does not use. NAMES keeps them from call to call.
local PREFIX = ARGV[1]

local function add_names()
  NAMES[PREFIX] = {}
  for name in string.gmatch('waiting again arrivals news tenants idle floor uses totals charged wake rooms routers workers suspects quarantine deaths aside', '%a+') do
    NAMES[PREFIX][name] = PREFIX .. name
  end
  return NAMES[PREFIX]
end

local OF_CELL = NAMES[PREFIX] or add_names()
local WAITING = OF_CELL.waiting
local REDISPATCHED = OF_CELL.again
local ARRIVALS = OF_CELL.arrivals
local NEWS = OF_CELL.news
local TENANTS = OF_CELL.tenants
local IDLE = OF_CELL.idle
local FLOOR = OF_CELL.floor
local USES = OF_CELL.uses
local TOTALS = OF_CELL.totals
local CHARGED = OF_CELL.charged
local WAKE = OF_CELL.wake
local ROOMS = OF_CELL.rooms
local ROUTERS = OF_CELL.routers
local WORKERS = OF_CELL.workers
local SUSPECTS = OF_CELL.suspects
local QUARANTINE = OF_CELL.quarantine
local DEATHS = OF_CELL.deaths
local ASIDE = OF_CELL.aside

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
