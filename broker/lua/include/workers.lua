-- What workers said of their free rows, and the lists that wake idle workers.
--- @include "keys"

-- Return how many free rows a worker had after its last claim; 0 for a worker that has not claimed for FREE_ROWS_MS.
local function free_rows_of(worker) return tonumber(redis.call('GET', PREFIX .. 'room:' .. worker) or 0) end

-- Wake one idle worker, unless a wake-up is on its way already.
local function wake_a_worker()
  if redis.call('EXISTS', WAKE) == 0 then redis.call('LPUSH', WAKE, 1) end
end

-- Record that a worker takes no jobs now. A wake-up that was meant for this worker goes to another.
local function clear_free_rows(worker)
  redis.call('DEL', PREFIX .. 'room:' .. worker, WAKE .. ':' .. worker)
  if redis.call('ZCARD', WAITING) > 0 then wake_a_worker() end
end
