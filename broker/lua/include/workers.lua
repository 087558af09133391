-- Free rows that workers reported, and the lists that wake idle workers.
--- @include "keys"
--- @include "clock"
--- @include "packed"

-- Return the rows of a packed room. Raises an error on one that these scripts cannot have packed, or that is too old.
local function checked_room(rows, until_ms)
  if until_ms > now and until_ms <= now + FREE_ROWS_MS and rows < math.huge then return rows end
  error('unreadable')
end

-- Return how many free rows a worker had after its last claim; 0 for a worker that has not claimed for FREE_ROWS_MS.
local function free_rows_in(room)
  if not room then return 0 end
  local is_readable, rows = read_packed(checked_room, room)
  return is_readable and rows or 0
end

local function note_free_rows(worker, rows)
  redis.call('HSET', ROOMS, worker, cmsgpack.pack(rows, now + FREE_ROWS_MS))
end

-- Drop the free rows of workers that have not claimed for long.
local function drop_old_rooms()
  local rooms = redis.call('HGETALL', ROOMS)
  for i = 1, #rooms, 2 do
    if not read_packed(checked_room, rooms[i + 1]) then redis.call('HDEL', ROOMS, rooms[i]) end
  end
end

-- Wake one idle worker, unless a wake-up is on its way already.
local function wake_a_worker()
  if redis.call('EXISTS', WAKE) == 0 then redis.call('LPUSH', WAKE, 1) end
end

-- Wake another worker in place of one that could not use its wake-up. Each worker does so once for an arrival, and all
-- of them together at most PASSED_ON_LIMIT times in PASSED_ON_MS.
local function pass_wake_up_on()
  local key = PREFIX .. 'passed_on'
  local count = increment(key)
  if count > PASSED_ON_LIMIT and redis.call('PTTL', key) > PASSED_ON_MS then count = 1 end -- the clock went back
  if count == 1 then redis.call('SET', key, 1, 'PX', PASSED_ON_MS) end
  if count <= PASSED_ON_LIMIT then wake_a_worker() end
end

-- Wake this worker.
local function wake_worker(worker)
  local list = WAKE .. ':' .. worker
  if redis.call('LPUSH', list, 1) > WAKE_LIMIT then redis.call('LPOP', list) end
  redis.call('PEXPIRE', list, FREE_ROWS_MS)
end

-- Record that a worker takes no jobs now. A wake-up that was meant for this worker goes to another.
local function clear_free_rows(worker)
  redis.call('HDEL', ROOMS, worker)
  redis.call('DEL', WAKE .. ':' .. worker)
  if redis.call('ZCARD', WAITING) > 0 then wake_a_worker() end
end
