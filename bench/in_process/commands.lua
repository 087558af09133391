-- Redis servers in this process: their data, and the commands that the queue's functions and their callers use, as far as
-- these use them. It is given what message_pack.lua returns. What Redis leaves to chance, such as the order of a hash's
-- fields, is the same in every run.
local cmsgpack, packed_answer = ...
local floor, sort, sub, char, format = math.floor, table.sort, string.sub, string.char, string.format

-- The data of the server whose command runs: the values of its keys, the times at which keys end, its functions, the name
-- of its start, and its chance.
local data
-- Its time in ms, and the keys of the lists that have grown, for which clients may wait.
local now_ms, pushed = 0, {}
local commands = {}

-- Most of what a call makes is gone at its end: the collector need not look so often. Compiled traces cost a run of
-- some hundred calls more than they save.
collectgarbage('setpause', 400)
jit.off()

local function fail(message) error({err = message}, 0) end

-- Return an argument as Redis gets it from a script.
local function text(value)
  if type(value) == 'string' then return value end
  if type(value) ~= 'number' then fail('ERR Lua redis lib command arguments must be strings or integers') end
  if value == floor(value) and value > -1e17 and value < 1e17 then return format('%.0f', value) end
  return format('%.17g', value)
end

local function whole(value)
  local number = tonumber(value)
  if not number or number ~= floor(number) then fail('ERR value is not an integer or out of range') end
  return number
end

local function score_of(value)
  local number = tonumber(value == '+inf' and 'inf' or value)
  if not number or number ~= number then fail('ERR value is not a valid float') end
  return number
end

-- Return a number from 1 to `most` (Park and Miller's generator).
local function draw(most)
  data.chance = data.chance * 16807 % 2147483647
  return data.chance % most + 1
end

-- Return some of a list's items, each once.
local function draw_some(items, count)
  for place = 1, math.min(count, #items) do
    local other = place + draw(#items - place + 1) - 1
    items[place], items[other] = items[other], items[place]
  end
  for place = #items, count + 1, -1 do items[place] = nil end
  return items
end

local function remove(key)
  local was_there = data.values[key] ~= nil
  data.values[key], data.ends[key] = nil, nil
  return was_there and 1 or 0
end

-- Return the value of a key; nil where it has none, or has ended.
local function value_of(key)
  local ends = data.ends[key]
  if ends and ends <= now_ms then remove(key) end
  return data.values[key]
end

-- Return the value of a key, which is of this kind; nil where it has none. Strings are their own values.
local function find(key, kind)
  local value = value_of(key)
  if value ~= nil and (type(value) == 'string' and 'string' or value.kind) ~= kind then
    fail('WRONGTYPE Operation against a key holding the wrong kind of value')
  end
  return value
end

local BLANK = {
  hash = function() return {kind = 'hash', fields = {}, size = 0} end,
  set = function() return {kind = 'set', fields = {}, size = 0} end,
  list = function() return {kind = 'list', items = {}} end,
  stream = function() return {kind = 'stream', items = {}, last = 0} end,
  -- `order` has the members by score, equals by their bytes.
  zset = function() return {kind = 'zset', scores = {}, order = {}} end,
}

local function find_or_begin(key, kind)
  local value = find(key, kind)
  if not value then
    value = BLANK[kind]()
    data.values[key] = value
  end
  return value
end

-- Keys of any type.

function commands.TIME() return {text(floor(now_ms / 1000)), text(now_ms % 1000 * 1000)} end
function commands.INFO() return 'redis_version:7.4.0\r\nrun_id:' .. data.run .. '\r\n' end
function commands.PING() return {ok = 'PONG'} end

function commands.TYPE(key)
  local value = value_of(key)
  return {ok = value == nil and 'none' or type(value) == 'string' and 'string' or value.kind}
end

function commands.EXISTS(...)
  local count = 0
  for _, key in ipairs({...}) do count = count + (value_of(key) ~= nil and 1 or 0) end
  return count
end

function commands.DEL(...)
  local count = 0
  for _, key in ipairs({...}) do
    value_of(key)
    count = count + remove(key)
  end
  return count
end

function commands.RENAME(key, new)
  local value = value_of(key)
  if value == nil then fail('ERR no such key') end
  data.values[new], data.ends[new] = value, data.ends[key]
  remove(key)
  return {ok = 'OK'}
end

function commands.PEXPIRE(key, ms)
  if value_of(key) == nil then return 0 end
  data.ends[key] = now_ms + whole(ms)
  return 1
end

function commands.PTTL(key)
  if value_of(key) == nil then return -2 end
  return data.ends[key] and data.ends[key] - now_ms or -1
end

function commands.KEYS()
  local found = {}
  for key in pairs(data.values) do
    if value_of(key) ~= nil then found[#found + 1] = key end
  end
  sort(found)
  return found
end

function commands.FLUSHALL()
  data.values, data.ends = {}, {}
  return {ok = 'OK'}
end

-- Strings.

function commands.GET(key) return find(key, 'string') or false end

function commands.GETRANGE(key, first, last)
  return sub(find(key, 'string') or '', whole(first) + 1, whole(last) + 1)
end

function commands.MGET(...)
  local found = {}
  for place, key in ipairs({...}) do found[place] = find(key, 'string') or false end
  return found
end

function commands.SET(key, value, ...)
  local options, is_new_only, ms = {...}, false, nil
  for place, option in ipairs(options) do
    if option == 'NX' then is_new_only = true end
    if option == 'PX' then ms = whole(options[place + 1]) end
  end
  if is_new_only and value_of(key) ~= nil then return false end
  data.values[key], data.ends[key] = text(value), ms and now_ms + ms or nil
  return {ok = 'OK'}
end

function commands.INCR(key)
  local before = find(key, 'string') or '0'
  if not string.match(before, '^-?%d+$') then fail('ERR value is not an integer or out of range') end
  data.values[key] = format('%.0f', tonumber(before) + 1)
  return tonumber(before) + 1
end

-- Hashes and sets.

local function names_of(value)
  local names = {}
  for name in pairs(value and value.fields or {}) do names[#names + 1] = name end
  sort(names)
  return names
end

local function put(value, name, content)
  local is_new = value.fields[name] == nil
  value.fields[name] = content
  value.size = value.size + (is_new and 1 or 0)
  return is_new and 1 or 0
end

local function take_out(key, value, ...)
  local count = 0
  if not value then return 0 end
  for _, name in ipairs({...}) do
    if value.fields[text(name)] ~= nil then
      value.fields[text(name)] = nil
      count = count + 1
    end
  end
  value.size = value.size - count
  if value.size == 0 then remove(key) end
  return count
end

function commands.HGET(key, field)
  local value = find(key, 'hash')
  return value and value.fields[text(field)] or false
end

function commands.HMGET(key, ...)
  local value, found = find(key, 'hash'), {}
  for place = 1, select('#', ...) do
    found[place] = value and value.fields[text((select(place, ...)))] or false
  end
  return found
end

function commands.HSET(key, ...)
  local value, pairs_of, count = find_or_begin(key, 'hash'), {...}, 0
  if #pairs_of % 2 == 1 then fail("ERR wrong number of arguments for 'hset' command") end
  for place = 1, #pairs_of, 2 do count = count + put(value, text(pairs_of[place]), text(pairs_of[place + 1])) end
  return count
end

function commands.HSETNX(key, field, content)
  local value = find_or_begin(key, 'hash')
  return value.fields[field] == nil and put(value, field, text(content)) or 0
end

function commands.HDEL(key, ...) return take_out(key, find(key, 'hash'), ...) end

function commands.HEXISTS(key, field)
  local value = find(key, 'hash')
  return value and value.fields[text(field)] ~= nil and 1 or 0
end

function commands.HKEYS(key) return names_of(find(key, 'hash')) end

function commands.HLEN(key)
  local value = find(key, 'hash')
  return value and value.size or 0
end

local function with_contents(value, names)
  local found = {}
  for _, name in ipairs(names) do found[#found + 1], found[#found + 2] = name, value.fields[name] end
  return found
end

function commands.HGETALL(key)
  local value = find(key, 'hash')
  return with_contents(value, names_of(value))
end

-- Always with the values.
function commands.HRANDFIELD(key, count)
  local value = find(key, 'hash')
  return with_contents(value, draw_some(names_of(value), whole(count)))
end

function commands.SADD(key, ...)
  local value, count = find_or_begin(key, 'set'), 0
  for _, name in ipairs({...}) do count = count + put(value, text(name), true) end
  return count
end

function commands.SREM(key, ...) return take_out(key, find(key, 'set'), ...) end
function commands.SMEMBERS(key) return names_of(find(key, 'set')) end
function commands.SRANDMEMBER(key, count) return draw_some(names_of(find(key, 'set')), whole(count)) end

function commands.SCARD(key)
  local value = find(key, 'set')
  return value and value.size or 0
end

-- Lists and streams.

-- Return the part of a list between two indexes, both included; those below 0 count from the end.
local function slice(items, first, last)
  local size, found = #items, {}
  first, last = whole(first), whole(last)
  first, last = first < 0 and math.max(0, first + size) or first, last < 0 and last + size or last
  for place = first + 1, math.min(last + 1, size) do found[#found + 1] = items[place] end
  return found
end

function commands.LPUSH(key, ...)
  local items = find_or_begin(key, 'list').items
  for _, item in ipairs({...}) do table.insert(items, 1, text(item)) end
  pushed[#pushed + 1] = key
  return #items
end

function commands.RPUSH(key, ...)
  local items = find_or_begin(key, 'list').items
  for _, item in ipairs({...}) do items[#items + 1] = text(item) end
  pushed[#pushed + 1] = key
  return #items
end

function commands.LPOP(key)
  local value = find(key, 'list')
  if not value then return false end
  local item = table.remove(value.items, 1)
  if #value.items == 0 then remove(key) end
  return item
end

-- Pop from the first of some lists that has an item, without a wait; the timeout comes last.
function commands.BLPOP(...)
  for place = 1, select('#', ...) - 1 do
    local key = select(place, ...)
    local item = commands.LPOP(key)
    if item then return {key, item} end
  end
  return false
end

function commands.LINDEX(key, index)
  local value = find(key, 'list')
  return value and slice(value.items, index, index)[1] or false
end

function commands.LSET(key, index, item)
  find(key, 'list').items[whole(index) + 1] = text(item)
  return {ok = 'OK'}
end

function commands.LLEN(key)
  local value = find(key, 'list')
  return value and #value.items or 0
end

function commands.LRANGE(key, first, last)
  local value = find(key, 'list')
  return value and slice(value.items, first, last) or {}
end

function commands.LTRIM(key, first, last)
  local value = find(key, 'list')
  if value then value.items = slice(value.items, first, last) end
  if value and #value.items == 0 then remove(key) end
  return {ok = 'OK'}
end

-- Always of all that are equal.
function commands.LREM(key, _, item)
  local value, rest = find(key, 'list'), {}
  if not value then return 0 end
  local before = #value.items
  for _, other in ipairs(value.items) do
    if other ~= item then rest[#rest + 1] = other end
  end
  value.items = rest
  if #rest == 0 then remove(key) end
  return before - #rest
end

function commands.XADD(key, _, ...)
  local value, fields = find_or_begin(key, 'stream'), {...}
  for place, field in ipairs(fields) do fields[place] = text(field) end
  value.last = value.last + 1
  value.items[#value.items + 1] = {format('%.0f-0', value.last), fields}
  return format('%.0f-0', value.last)
end

-- Always of all.
function commands.XRANGE(key)
  local value = find(key, 'stream')
  return value and value.items or {}
end

-- Sorted sets.

local function score_text(score)
  if score == math.huge then return 'inf' end
  return text(score)
end

-- Return the place of the first member that is not before this score and member.
local function place_of(zset, score, member)
  local order, scores = zset.order, zset.scores
  local low, high = 1, #order + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local other = scores[order[middle]]
    if other < score or other == score and order[middle] < member then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Return the place of the first member whose score is not before a bound: a score, or one beyond ( that is left out.
local function place_of_bound(zset, bound, is_last)
  local is_open = sub(bound, 1, 1) == '('
  local score = score_of(is_open and sub(bound, 2) or bound)
  if is_open == is_last then return place_of(zset, score, '') end
  local low, high = 1, #zset.order + 1
  while low < high do
    local middle = floor((low + high) / 2)
    if zset.scores[zset.order[middle]] <= score then low = middle + 1 else high = middle end
  end
  return low
end

local function add_member(zset, member, score)
  local before = zset.scores[member]
  if before == score then return 0 end
  if before then table.remove(zset.order, place_of(zset, before, member)) end
  table.insert(zset.order, place_of(zset, score, member), member)
  zset.scores[member] = score
  return before and 0 or 1
end

local function remove_member(zset, member)
  local score = zset.scores[member]
  if not score then return 0 end
  table.remove(zset.order, place_of(zset, score, member))
  zset.scores[member] = nil
  return 1
end

function commands.ZADD(key, ...)
  local zset, scored, count = find_or_begin(key, 'zset'), {...}, 0
  local is_new_only = scored[1] == 'NX'
  for place = is_new_only and 2 or 1, #scored, 2 do
    local member = text(scored[place + 1])
    if not (is_new_only and zset.scores[member]) then
      count = count + add_member(zset, member, score_of(scored[place]))
    end
  end
  return count
end

function commands.ZREM(key, ...)
  local zset, count = find(key, 'zset'), 0
  if not zset then return 0 end
  for _, member in ipairs({...}) do count = count + remove_member(zset, text(member)) end
  if #zset.order == 0 then remove(key) end
  return count
end

function commands.ZCARD(key)
  local zset = find(key, 'zset')
  return zset and #zset.order or 0
end

function commands.ZSCORE(key, member)
  local zset = find(key, 'zset')
  return zset and zset.scores[member] and score_text(zset.scores[member]) or false
end

function commands.ZMSCORE(key, ...)
  local found = {}
  for place = 1, select('#', ...) do found[place] = commands.ZSCORE(key, (select(place, ...))) end
  return found
end

local function with_scores(zset, members, wanted)
  if not wanted then return members end
  local found = {}
  for _, member in ipairs(members) do found[#found + 1], found[#found + 2] = member, score_text(zset.scores[member]) end
  return found
end

function commands.ZRANGE(key, first, last, wanted)
  local zset = find(key, 'zset')
  return zset and with_scores(zset, slice(zset.order, first, last), wanted) or {}
end

function commands.ZREVRANGE(key, first, last, wanted)
  local zset, reversed = find(key, 'zset'), {}
  if not zset then return {} end
  for _, member in ipairs(slice(zset.order, -1 - last, -1 - first)) do table.insert(reversed, 1, member) end
  return with_scores(zset, reversed, wanted)
end

function commands.ZRANGEBYSCORE(key, lowest, highest, limit, _, count)
  local zset, found = find(key, 'zset'), {}
  if not zset then return found end
  lowest, highest = text(lowest), text(highest)
  local first, last = place_of_bound(zset, lowest, false), place_of_bound(zset, highest, true) - 1
  if limit then last = math.min(last, first + whole(count) - 1) end
  for place = first, last do found[#found + 1] = zset.order[place] end
  return found
end

function commands.ZREMRANGEBYSCORE(key, lowest, highest)
  local found = commands.ZRANGEBYSCORE(key, lowest, highest)
  for _, member in ipairs(found) do commands.ZREM(key, member) end -- more than one call may have arguments
  return #found
end

function commands.ZRANDMEMBER(key, count)
  local zset = find(key, 'zset')
  return zset and draw_some(slice(zset.order, 0, -1), whole(count)) or {}
end

-- Always from the first on, to one that is left out, of members with the same score.
function commands.ZLEXCOUNT(key, _, before)
  local zset = find(key, 'zset')
  if not zset then return 0 end
  return place_of(zset, zset.scores[zset.order[1]], sub(before, 2)) - 1
end

-- Functions.

local function call(name, ...)
  local command = commands[name]
  if not command then fail("ERR unknown command '" .. name .. "'") end
  return command(...)
end

local function checked(is_carried_out, ...)
  if is_carried_out then return ... end
  local message = ...
  if type(message) ~= 'table' or not message.err then error(message, 0) end
  return message
end

local redis = {call = call}

function redis.pcall(...) return checked(pcall(call, ...)) end

function commands.FCALL(name, count, ...)
  local callback, arguments, keys = data.functions[name], {...}, {}
  if not callback then fail('ERR Function not found') end
  for place = 1, whole(count) do keys[place] = arguments[place] end
  return callback(keys, {select(whole(count) + 1, ...)})
end

-- Loads a library, once in this process: its text has its name.
local libraries = {}

commands['FUNCTION LOAD'] = function(library)
  if not libraries[library] then
    local found = {}
    redis.register_function = function(one) found[one.function_name] = one.callback end
    local chunk, message = loadstring(string.gsub(library, '^#![^\n]*', ''))
    if not chunk then fail('ERR ' .. message) end
    setfenv(chunk, setmetatable({redis = redis, cmsgpack = cmsgpack}, {__index = _G}))()
    libraries[library] = found
  end
  for name, callback in pairs(libraries[library]) do data.functions[name] = callback end
  return 'loaded'
end

local function copy(value)
  if type(value) ~= 'table' then return value end
  local other = {}
  for key, one in pairs(value) do other[key] = copy(one) end
  return other
end

local server = {}

function server.new() return {values = {}, ends = {}, functions = {}, run = '', chance = 1} end
function server.copy(of) return copy(of) end

-- Carry out a command of a client at a time. Return its answer, and the keys of lists that have grown, one a line.
function server.execute(of, at_ms, name, ...)
  data, now_ms, pushed = of, at_ms, {}
  local is_carried_out, answer = pcall(call, name, ...)
  if not is_carried_out and type(answer) ~= 'table' then answer = {err = 'ERR ' .. tostring(answer)} end
  return packed_answer(answer), table.concat(pushed, '\n')
end

return server
