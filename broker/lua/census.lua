#!lua flags=allow-oom
-- Answers {the server's run and the name of its data, the states of all live workers}. Incarnations whose key has
-- expired are taken off the list; a router that asks is recorded as alive.
--- @include "workers"
--- @include "routers"
--- @include "lost_keys"

local router, new_data_name = ARGV[2], ARGV[3]
if router ~= '' then beat_router(router) end
local states, living, lapsed = {}, {}, {}
local incarnations = redis.call('HGETALL', WORKERS)
for i = 1, #incarnations, 2 do
  local incarnation, worker = incarnations[i], incarnations[i + 1]
  local state = redis.pcall('GET', PREFIX .. 'worker:' .. incarnation)
  if type(state) == 'string' then
    states[#states + 1] = state
    living[worker] = true
  else
    redis.call('HDEL', WORKERS, incarnation)
    lapsed[#lapsed + 1] = worker
  end
end
for _, worker in ipairs(lapsed) do
  if not living[worker] then clear_free_rows(worker) end
end
prune_idle_tenants()
drop_remains()
redis.call('SET', PREFIX .. 'born', new_data_name, 'NX')
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
return {run .. ' ' .. redis.call('GET', PREFIX .. 'born'), states}
