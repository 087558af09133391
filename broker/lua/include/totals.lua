-- Totals over the waiting jobs: bytes and work of each tenant's newcomers (of:, work:) and of its jobs that have begun
-- (begun_of:, begun:), and the bytes of both in all. Work is in charged tokens, as though every answer had its full
-- length. Besides: the weight of each tenant with a queue, unless it is 1 (weight:), whether its jobs have
-- turns (turns:, see key_turns.lua), and the counter that the next idle tenant is lifted to (next_lift). A script adds its
-- changes up and writes them once, with `flush_counts`. The bytes in all change as the tenants' do, and a tenant without a
-- queue has no newcomers, so that what a lost key has left behind goes with the last of them.
--- @include "keys"

local totals, changes, fixed = {}, {}, {}

-- Write a number with all its digits; Lua's own conversion writes 14.
local function exact(number) return string.format('%.17g', number) end

local function count(field, change) changes[field] = (changes[field] or 0) + change end

-- Set a total, whatever is counted besides.
local function set_total(field, value)
  count(field, 0)
  fixed[field] = value
end

-- Count `bytes` and `work` more; negative numbers count less.
local function count_waiting(tenant, bytes, work, has_begun)
  count((has_begun and 'begun_of:' or 'of:') .. tenant, bytes)
  count((has_begun and 'begun:' or 'work:') .. tenant, work)
end

-- Forget the totals of a tenant's newcomers: its queue is empty, or was lost.
local function clear_totals(tenant)
  set_total('of:' .. tenant, 0)
  set_total('work:' .. tenant, 0)
end

-- Read fields into `totals`.
local function read_totals(...)
  local values = redis.call('HMGET', TOTALS, ...)
  for i = 1, #values do totals[select(i, ...)] = number_of(values[i]) end
end

local function flush_counts()
  if next(changes) == nil then return end
  local unread = {}
  if totals.all == nil then unread[#unread + 1] = 'all' end
  if totals.begun_bytes == nil then unread[#unread + 1] = 'begun_bytes' end
  for field in pairs(changes) do
    if totals[field] == nil then unread[#unread + 1] = field end
  end
  if #unread > 0 then read_totals(unpack(unread)) end
  local values = {all = totals.all, begun_bytes = totals.begun_bytes}
  for field, change in pairs(changes) do
    values[field] = fixed[field] or math.max(0, totals[field] + change)
    local sum = string.sub(field, 1, 3) == 'of:' and 'all' or string.sub(field, 1, 9) == 'begun_of:' and 'begun_bytes'
    if sum then values[sum] = values[sum] + values[field] - totals[field] end
  end
  local written, gone = {}, {}
  for field, value in pairs(values) do
    if value > 0 and value ~= totals[field] then
      written[#written + 1], written[#written + 2] = field, value % 1 == 0 and value or exact(value)
    elseif value <= 0 and totals[field] ~= 0 then
      gone[#gone + 1] = field
    end
    totals[field] = math.max(0, value)
  end
  changes, fixed = {}, {}
  if #written > 0 then redis.call('HSET', TOTALS, unpack(written)) end
  if #gone > 0 then redis.call('HDEL', TOTALS, unpack(gone)) end
end
