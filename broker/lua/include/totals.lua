-- Totals over the waiting jobs: bytes in all and of each tenant, and each tenant's work in charged tokens, as though
-- every answer had its full length. A script adds its changes up and writes them once, with `flush_counts`.
--- @include "keys"

local changes = {all = 0}

-- Count `bytes` and `work` more; negative numbers count less.
local function count_waiting(tenant, bytes, work)
  local bytes_field, work_field = 'of:' .. tenant, 'work:' .. tenant
  changes.all = changes.all + bytes
  changes[bytes_field] = (changes[bytes_field] or 0) + bytes
  changes[work_field] = (changes[work_field] or 0) + work
end

local function flush_counts()
  for field, change in pairs(changes) do
    if change ~= 0 and redis.call('HINCRBY', TOTALS, field, change) <= 0 then redis.call('HDEL', TOTALS, field) end
  end
end
