-- Totals over the waiting jobs: bytes in all and of each tenant, and each tenant's work in charged tokens, as though
-- every answer had its full length, also of its jobs that have begun alone. A script adds its changes up, and
-- `flush_counts` writes them.
--- @include "keys"

local changes = {all = 0}

-- Count `bytes` and `work` more; negative numbers count less.
local function count_waiting(tenant, bytes, work, has_begun)
  local bytes_field, work_field, begun_field = 'of:' .. tenant, 'work:' .. tenant, 'begun:' .. tenant
  changes.all = changes.all + bytes
  changes[bytes_field] = (changes[bytes_field] or 0) + bytes
  changes[work_field] = (changes[work_field] or 0) + work
  if has_begun then changes[begun_field] = (changes[begun_field] or 0) + work end
end

local function flush_counts()
  for field, change in pairs(changes) do
    if change ~= 0 and redis.call('HINCRBY', TOTALS, field, change) <= 0 then redis.call('HDEL', TOTALS, field) end
  end
  changes = {all = 0}
end
