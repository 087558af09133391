-- Totals over the waiting jobs, a packed record for each tenant with jobs: bytes and work of its newcomers and of its jobs
-- that have begun, its weight, and whether its newcomers have turns (see key_turns.lua). Work is in charged tokens, as
-- though every answer had its full length. A record of the cell is beside them: the bytes of both kinds in all, the counter
-- that the next idle tenant is lifted to, the claim rate (see claim_rate.lua), and whether USES is kept (queue_shares.lua).
-- A script adds its changes up and writes them once, with `flush_counts`. The bytes in all change as the tenants' do, and a tenant without a queue has no
-- newcomers, so that what a lost key has left behind goes with the last of them.
--- @include "keys"
--- @include "packed"

-- The field of the cell's record; no tenant's name has a slash.
local CELL_FIELD = '/cell'
-- The records that were read, by tenant, the changes to them, and the cell's record.
local totals, changes, cell = {}, {}, nil

-- Return a tenant's record. Raises an error on one that these scripts cannot have packed.
local function checked_totals(bytes, work, begun_bytes, begun_work, weight, turns)
  if bytes >= 0 and work >= 0 and begun_bytes >= 0 and begun_work >= 0 and weight > 0 and turns >= 0
      and bytes + work + begun_bytes + begun_work + weight + turns < math.huge then
    return {bytes = bytes, work = work, begun_bytes = begun_bytes, begun_work = begun_work, weight = weight, turns = turns}
  end
  error('unreadable')
end

-- Return the cell's record. Raises an error on one that these scripts cannot have packed.
local function checked_cell(bytes, begun_bytes, next_lift, rate_since, rate_work, rate, uses)
  if bytes >= 0 and begun_bytes >= 0 and next_lift >= 0 and rate_since >= 0 and rate_work >= 0 and rate >= 0
      and uses >= 0 and bytes + begun_bytes + next_lift + rate_since + rate_work + rate + uses < math.huge then
    return {bytes = bytes, begun_bytes = begun_bytes, next_lift = next_lift, rate_since = rate_since,
      rate_work = rate_work, rate = rate, uses = uses}
  end
  error('unreadable')
end

-- Read the records of tenants, and the cell's.
local function read_totals(...)
  local records = redis.call('HMGET', TOTALS, CELL_FIELD, ...)
  for i, packed in ipairs(records) do
    local is_readable, record = false, nil
    if packed then is_readable, record = read_packed(i == 1 and checked_cell or checked_totals, packed) end
    if i == 1 then
      record = is_readable and record
        or {bytes = 0, begun_bytes = 0, next_lift = 0, rate_since = 0, rate_work = 0, rate = 0, uses = 0}
      cell = cell or record
    else
      record = is_readable and record
        or {bytes = 0, work = 0, begun_bytes = 0, begun_work = 0, weight = 1, turns = 0}
      totals[select(i - 1, ...)] = record
    end
    record.packed = packed or nil
  end
end

local function change_of(tenant)
  if not changes[tenant] then changes[tenant] = {bytes = 0, work = 0, begun_bytes = 0, begun_work = 0} end
  return changes[tenant]
end

-- Count `bytes` and `work` more; negative numbers count less.
local function count_waiting(tenant, bytes, work, has_begun)
  local change = change_of(tenant)
  if has_begun then
    change.begun_bytes, change.begun_work = change.begun_bytes + bytes, change.begun_work + work
  else
    change.bytes, change.work = change.bytes + bytes, change.work + work
  end
end

-- Forget the totals of a tenant's newcomers: its queue is empty, or was lost.
local function clear_totals(tenant) change_of(tenant).is_cleared = true end

-- Set a tenant's weight, and whether its newcomers have turns; nil leaves what there is.
local function set_terms(tenant, weight, turns)
  local change = change_of(tenant)
  change.weight, change.turns = weight or change.weight, turns or change.turns
end

-- Apply a tenant's changes to its record, and to the cell's.
local function apply(change, record)
  local bytes, begun_bytes = record.bytes, record.begun_bytes
  record.bytes = change.is_cleared and 0 or math.max(0, bytes + change.bytes)
  record.work = change.is_cleared and 0 or math.max(0, record.work + change.work)
  record.begun_bytes = math.max(0, begun_bytes + change.begun_bytes)
  record.begun_work = math.max(0, record.begun_work + change.begun_work)
  record.weight, record.turns = change.weight or record.weight, change.turns or record.turns
  cell.bytes = math.max(0, cell.bytes + record.bytes - bytes)
  cell.begun_bytes = math.max(0, cell.begun_bytes + record.begun_bytes - begun_bytes)
end

local function flush_counts()
  local unread = {}
  for tenant in pairs(changes) do
    if not totals[tenant] then unread[#unread + 1] = tenant end
  end
  if #unread > 0 then read_totals(unpack(unread)) end
  if not cell then return end
  local written, gone = {}, {}
  local function write(field, record, is_empty, ...)
    local packed = not is_empty and cmsgpack.pack(...) or nil
    if packed == record.packed then return end
    record.packed = packed
    if packed then
      written[#written + 1], written[#written + 2] = field, packed
    else
      gone[#gone + 1] = field
    end
  end
  for tenant, change in pairs(changes) do
    local of = totals[tenant]
    apply(change, of)
    write(tenant, of, of.bytes + of.work + of.begun_bytes + of.begun_work + of.turns == 0 and of.weight == 1,
      of.bytes, of.work, of.begun_bytes, of.begun_work, of.weight, of.turns)
  end
  changes = {}
  cell.next_lift = cell.next_lift < math.huge and math.max(0, cell.next_lift) or 0
  write(CELL_FIELD, cell, cell.bytes + cell.begun_bytes + cell.next_lift + cell.rate_since == 0, cell.bytes,
    cell.begun_bytes, cell.next_lift, cell.rate_since, cell.rate_work, cell.rate, cell.uses)
  if #written > 0 then redis.call('HSET', TOTALS, unpack(written)) end
  if #gone > 0 then redis.call('HDEL', TOTALS, unpack(gone)) end
end
