-- Live routers and workers, the free rows that workers reported, and the lists that wake idle workers.
local routers, workers = {}, {}

-- Time in ms after a router's beat within which another one is not recorded.
local ROUTER_BEAT_MS = 250

-- A router lives for ROUTER_TTL_MS after its last beat. The clock may go back: where another server takes over, or it
-- was wrong before. Then the last beat is later than now.

-- Return the time of the last beat; nothing where none is known.
function routers.last_beat(call)
  local latest = redis.call('ZRANGE', call.keys.routers, -1, -1, 'WITHSCORES')[2]
  return latest and tonumber(latest) - ROUTER_TTL_MS
end

-- Return whether no router has beaten for ROUTERS_QUIET_MS, or the key is lost: then no router is taken for dead.
function routers.are_quiet(call)
  local last = routers.last_beat(call)
  return not last or last + ROUTERS_QUIET_MS < call.now
end

-- Record a router's beat, unless the last one was within ROUTER_BEAT_MS. The first beat after an outage, or after the
-- clock went back, gives all routers their full time again.
function routers.beat(call, router)
  local key, now = call.keys.routers, call.now
  local known = tonumber(redis.call('ZSCORE', key, router) or 0)
  if known > now + ROUTER_TTL_MS - ROUTER_BEAT_MS and known <= now + ROUTER_TTL_MS then return end
  local last = routers.last_beat(call) or 0
  if last + ROUTERS_QUIET_MS < now or last > now then
    for _, other in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZADD', key, now + ROUTER_TTL_MS, other) end
    if last > now then workers.shorten(call) end
  end
  redis.call('ZADD', key, now + ROUTER_TTL_MS, router)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
end

-- Return the addresses of the live routers.
function routers.live(call)
  return redis.call('ZRANGEBYSCORE', call.keys.routers, routers.are_quiet(call) and '-inf' or '(' .. call.now, '+inf')
end

function routers.is_alive(call, router)
  return tonumber(redis.call('ZSCORE', call.keys.routers, router) or 0) > call.now or routers.are_quiet(call)
end

-- Shorten what was to expire by the clock before it went back: the keys of workers, and their free rows.
function workers.shorten(call)
  local found = redis.call('HGETALL', call.keys.workers)
  for i = 1, #found, 2 do
    redis.call('PEXPIRE', call.prefix .. 'worker:' .. found[i], WORKER_TTL_MS)
    redis.call('HDEL', call.keys.rooms, workers.id_in(found[i + 1]))
  end
end

-- Return the worker's id in what `workers` has of an incarnation: the id, and after a line break its row.
function workers.id_in(value) return string.match(value, '^[^\n]*') end

-- Return the rows of a packed room. Raises an error on one that this library cannot have packed, or that is too old.
function workers.checked_room(now, rows, until_ms)
  if until_ms > now and until_ms <= now + FREE_ROWS_MS and rows < math.huge then return rows end
  error('unreadable')
end

-- Return how many free rows a worker had after its last claim; 0 for a worker that has not claimed for FREE_ROWS_MS.
function workers.free_rows_in(call, room)
  if not room then return 0 end
  local is_readable, rows = read_packed(workers.checked_room, room, call.now)
  return is_readable and rows or 0
end

function workers.note_free_rows(call, worker, rows)
  redis.call('HSET', call.keys.rooms, worker, cmsgpack.pack(rows, call.now + FREE_ROWS_MS))
end

-- Drop the free rows of workers that have not claimed for long.
function workers.drop_old_rooms(call)
  local rooms = redis.call('HGETALL', call.keys.rooms)
  for i = 1, #rooms, 2 do
    if not read_packed(workers.checked_room, rooms[i + 1], call.now) then
      redis.call('HDEL', call.keys.rooms, rooms[i])
    end
  end
end

-- Wake one idle worker, unless a wake-up is on its way already.
function workers.wake_any(call)
  if redis.call('EXISTS', call.keys.wake) == 0 then redis.call('LPUSH', call.keys.wake, 1) end
end

-- Wake another worker in place of one that could not use its wake-up. Each worker does so once for an arrival, and all
-- of them together at most PASSED_ON_LIMIT times in PASSED_ON_MS.
function workers.pass_wake_up_on(call)
  local key = call.keys.passed_on
  local count = increment(key)
  if count > PASSED_ON_LIMIT and redis.call('PTTL', key) > PASSED_ON_MS then count = 1 end -- the clock went back
  if count == 1 then redis.call('SET', key, 1, 'PX', PASSED_ON_MS) end
  if count <= PASSED_ON_LIMIT then workers.wake_any(call) end
end

-- Wake this worker.
function workers.wake(call, worker)
  local list = call.keys.wake .. ':' .. worker
  if redis.call('LPUSH', list, 1) > WAKE_LIMIT then redis.call('LPOP', list) end
  redis.call('PEXPIRE', list, FREE_ROWS_MS)
end

-- Record that a worker takes no jobs now. A wake-up that was meant for this worker goes to another.
function workers.clear_free_rows(call, worker)
  redis.call('HDEL', call.keys.rooms, worker)
  redis.call('DEL', call.keys.wake .. ':' .. worker)
  if redis.call('ZCARD', call.keys.waiting) > 0 then workers.wake_any(call) end
end

-- Record that a worker's incarnation lives, with its state, row and card. Answers the addresses of the live routers.
register('beat', function(_, arguments)
  local call, incarnation, worker, state, row, card = new_call(arguments), unpack(arguments, 2, 6)
  redis.call('HSET', call.keys.workers, incarnation, worker .. '\n' .. row)
  redis.call('HSET', call.keys.cards, incarnation, card)
  redis.call('SET', call.prefix .. 'worker:' .. incarnation, state, 'PX', WORKER_TTL_MS)
  return routers.live(call)
end)

-- Record that a worker's incarnation lives no more.
register('declare_dead', function(_, arguments)
  local call, incarnation = new_call(arguments), arguments[2]
  local worker = redis.call('HGET', call.keys.workers, incarnation)
  redis.call('DEL', call.prefix .. 'worker:' .. incarnation)
  redis.call('HDEL', call.keys.workers, incarnation)
  redis.call('HDEL', call.keys.cards, incarnation)
  if worker then workers.clear_free_rows(call, workers.id_in(worker)) end
end)

-- Answers the addresses of the live routers.
register('live_routers', function(_, arguments) return routers.live(new_call(arguments)) end)

-- Record that a worker claims no more for now.
register('stop_claiming', function(_, arguments) workers.clear_free_rows(new_call(arguments), arguments[2]) end)

-- End the wait of a worker's claim, by a wake-up for this worker alone.
register('stop_waiting', function(_, arguments) workers.wake(new_call(arguments), arguments[2]) end)
