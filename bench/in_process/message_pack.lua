-- MessagePack as Redis's cmsgpack has it: values one after the other.
local ffi = require('ffi')
local floor, byte, sub, char = math.floor, string.byte, string.sub, string.char

local double = ffi.new('union { double number; uint8_t bytes[8]; }')
-- What is packed now; and each byte as a text.
local out, BYTES = require('string.buffer').new(), {}
for number = 0, 255 do BYTES[number] = char(number) end

-- Put an unsigned number in so many bytes.
local function put_big_endian(number, bytes)
  if bytes > 1 then put_big_endian(floor(number / 256), bytes - 1) end
  out:put(BYTES[number % 256])
end

-- Put the head of what has a length: `short` and the length below `limit`, else one of the heads for 1, 2 or 4 bytes.
local function put_head(length, short, limit, head8, head16, head32)
  if length < limit then
    out:put(BYTES[short + length])
  elseif head8 and length < 256 then
    out:put(BYTES[head8], BYTES[length])
  else
    out:put(BYTES[length < 65536 and head16 or head32])
    put_big_endian(length, length < 65536 and 2 or 4)
  end
end

local function put_number(number)
  if number >= 0 and number < 2 ^ 53 and number == floor(number) then
    if number < 128 then
      out:put(BYTES[number])
    elseif number < 256 then
      out:put(BYTES[0xcc], BYTES[number])
    else
      local bytes = number < 65536 and 2 or number < 2 ^ 32 and 4 or 8
      out:put(BYTES[bytes == 2 and 0xcd or bytes == 4 and 0xce or 0xcf])
      put_big_endian(number, bytes)
    end
  elseif number < 0 and number >= -32 and number == floor(number) then
    out:put(BYTES[256 + number])
  else
    double.number = number
    local b = double.bytes
    out:put(char(0xcb, b[7], b[6], b[5], b[4], b[3], b[2], b[1], b[0]))
  end
end

-- Return an array's length; nil for a table with other keys.
local function length_of(values)
  local count, highest = 0, 0
  for key in pairs(values) do
    if type(key) ~= 'number' or key < 1 or key ~= floor(key) then return nil end
    count, highest = count + 1, math.max(highest, key)
  end
  return count == highest and count or nil
end

local put

local function put_table(values)
  local length, names = length_of(values), {}
  if length then
    put_head(length, 0x90, 16, nil, 0xdc, 0xdd)
    for place = 1, length do put(values[place]) end
    return
  end
  for name in pairs(values) do names[#names + 1] = name end
  put_head(#names, 0x80, 16, nil, 0xde, 0xdf)
  for _, name in ipairs(names) do
    put(name)
    put(values[name])
  end
end

function put(value)
  local kind = type(value)
  if kind == 'string' then
    put_head(#value, 0xa0, 32, 0xd9, 0xda, 0xdb)
    out:put(value)
  elseif kind == 'number' then
    put_number(value)
  elseif kind == 'table' then
    put_table(value)
  else
    out:put(BYTES[value == true and 0xc3 or value == false and 0xc2 or 0xc0])
  end
end

-- Put an answer as a client of Redis gets it: texts are bytes, numbers whole, an array ends before nil.
local function put_answer(value)
  local kind = type(value)
  if kind == 'string' then
    put_head(#value, 0, 0, 0xc4, 0xc5, 0xc6)
    out:put(value)
  elseif kind == 'number' then
    put_number(value < 0 and math.ceil(value) or floor(value))
  elseif kind ~= 'table' then
    out:put(BYTES[value == true and 1 or 0xc0])
  elseif value.err then
    put({err = value.err})
  elseif value.ok then
    put_answer(value.ok)
  else
    local length = 0
    while value[length + 1] ~= nil do length = length + 1 end
    put_head(length, 0x90, 16, nil, 0xdc, 0xdd)
    for place = 1, length do put_answer(value[place]) end
  end
end

local function packed_answer(value)
  out:reset()
  put_answer(value)
  return out:get()
end

local cmsgpack = {}

function cmsgpack.pack(...)
  out:reset()
  for place = 1, select('#', ...) do put((select(place, ...))) end
  return out:get()
end

local function unpack_big_endian(packed, at, bytes)
  local number = 0
  if at + bytes - 1 > #packed then error('Missing bytes in input.') end
  for place = at, at + bytes - 1 do number = number * 256 + byte(packed, place) end
  return number, at + bytes
end

local SIZES = {[0xcc] = 1, [0xcd] = 2, [0xce] = 4, [0xcf] = 8, [0xd0] = 1, [0xd1] = 2, [0xd2] = 4, [0xd3] = 8}
local LENGTHS = {[0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4, [0xdc] = 2, [0xdd] = 4,
  [0xde] = 2, [0xdf] = 4}
local unpack_value

local function unpack_string(packed, at, length)
  if at + length - 1 > #packed then error('Missing bytes in input.') end
  return sub(packed, at, at + length - 1), at + length
end

local function unpack_array(packed, at, length)
  local values = {}
  for place = 1, length do values[place], at = unpack_value(packed, at) end
  return values, at
end

local function unpack_map(packed, at, length)
  local values = {}
  for _ = 1, length do
    local key, value
    key, at = unpack_value(packed, at)
    value, at = unpack_value(packed, at)
    values[key] = value
  end
  return values, at
end

-- Return the value that begins at a place, and the place after it.
function unpack_value(packed, at)
  local head = byte(packed, at)
  at = at + 1
  if head < 0x80 then return head, at end
  if head < 0x90 then return unpack_map(packed, at, head - 0x80) end
  if head < 0xa0 then return unpack_array(packed, at, head - 0x90) end
  if head < 0xc0 then return unpack_string(packed, at, head - 0xa0) end
  if head >= 0xe0 then return head - 256, at end
  if head == 0xc0 then return nil, at end
  if head == 0xc2 or head == 0xc3 then return head == 0xc3, at end
  if SIZES[head] then
    local number, rest = unpack_big_endian(packed, at, SIZES[head])
    if head >= 0xd0 and number >= 2 ^ (8 * SIZES[head] - 1) then number = number - 2 ^ (8 * SIZES[head]) end
    return number, rest
  end
  if LENGTHS[head] then
    local length, rest = unpack_big_endian(packed, at, LENGTHS[head])
    if head <= 0xdb then return unpack_string(packed, rest, length) end
    return (head <= 0xdd and unpack_array or unpack_map)(packed, rest, length)
  end
  if head == 0xcb then
    if at + 7 > #packed then error('Missing bytes in input.') end
    local b = double.bytes
    b[7], b[6], b[5], b[4], b[3], b[2], b[1], b[0] = byte(packed, at, at + 7)
    return double.number, at + 8
  end
  error('Bad data format in input.')
end

function cmsgpack.unpack(packed)
  if type(packed) ~= 'string' then error('bad argument #1 to unpack (string expected)') end
  local values, count, at = {}, 0, 1
  while at <= #packed do
    count = count + 1
    values[count], at = unpack_value(packed, at)
  end
  return unpack(values, 1, count)
end

return cmsgpack, packed_answer
