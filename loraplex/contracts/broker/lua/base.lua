-- What the functions of the library share. Its files are joined in the order of broker/functions.py, after the library's
-- name and the whole numbers of broker/terms.py, such as HOLD_MS. A file is a module, a table of functions: each call
-- hands its state down to them as one table. A file ends with the functions that routers and workers call.

-- Register a function that also runs when Redis is out of memory, because it takes away or adds a bounded amount: so a
-- full Redis can empty itself.
local function register(name, callback)
  redis.register_function{function_name = LIBRARY .. name, callback = callback, flags = {'allow-oom'}}
end

-- Register a function that admits requests. In a Redis without memory only NAME_when_full runs.
local function register_admission(name, callback)
  redis.register_function{function_name = LIBRARY .. name, callback = callback}
  register(name .. '_when_full', callback)
end

-- The keys that all tenants of a cell share, which broker/keys.py describes.
local SHARED_KEYS = {'waiting', 'again', 'uses', 'tenants', 'idle', 'quarantine', 'routers', 'demand', 'homes',
  'totals', 'charged', 'rooms', 'suspects', 'deaths', 'pins', 'workers', 'cards', 'news', 'wake', 'dead', 'arrivals',
  'floor', 'passed_on', 'born', 'arrived_work', 'claimed_work'}
-- The names of these keys, by the cell's prefix and the name without it, kept from call to call.
local key_names = {}

local function add_key_names(prefix)
  key_names[prefix] = {}
  for _, name in ipairs(SHARED_KEYS) do key_names[prefix][name] = prefix .. name end
  return key_names[prefix]
end

-- Return the time in ms by the server's own clock: no client's clock matters.
local function read_clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Return the state of a call. The first argument is the prefix of the cell's keys.
local function new_call(arguments)
  local prefix = arguments[1]
  return {prefix = prefix, keys = key_names[prefix] or add_key_names(prefix), now = read_clock(), totals = {}, changes = {}}
end

-- Return what a key has as a number; 0 for nothing and for what is no finite number. A function that failed on a value
-- which something else has written would stop everybody's work.
local function number_of(value)
  local number = tonumber(value)
  return number and number - number == 0 and number or 0
end

-- Count one more in a key, from 1 on; from there anew where the key has no count, or one that a place has no digits
-- for.
local function increment(key)
  local count = redis.pcall('INCR', key)
  if type(count) == 'number' and count >= 1 and count < 1e15 then return count end
  redis.call('SET', key, 1)
  return 1
end

local function unpack_into(check, packed, now) return check(now, cmsgpack.unpack(packed)) end

-- Return true and what `check` returns for the time and the packed values; false where they cannot be read, or `check`
-- raises an error, as a comparison does where a type is another: something else than this library has written them.
local function read_packed(check, packed, now) return pcall(unpack_into, check, packed, now) end
