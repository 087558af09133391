#!lua flags=allow-oom
-- Answers {the server's run and the name of its data, the states of all live workers, keys that were set aside and their
-- types}. Incarnations whose key has expired are taken off the list; a router that asks is recorded as alive.
--- @include "workers"
--- @include "routers"
--- @include "lost_keys"
--- @include "charges"
--- @include "wrong_types"

local router, new_data_name = ARGV[2], ARGV[3]
-- Types of the keys that all tenants share.
local types = {waiting = 'zset', again = 'zset', uses = 'zset', tenants = 'zset', idle = 'zset', quarantine = 'zset',
  routers = 'zset', totals = 'hash', charged = 'hash', rooms = 'hash', suspects = 'hash', deaths = 'hash', pins = 'hash', workers = 'hash',
  news = 'list', wake = 'list', dead = 'list', arrivals = 'string', floor = 'string', passed_on = 'string', born = 'string'}

set_aside_unless('hash', 'aside')
for name, wanted in pairs(types) do set_aside_unless(wanted, name) end
for _, tenant in ipairs(redis.call('ZRANDMEMBER', TENANTS, QUEUES_PER_CENSUS)) do
  set_aside_unless('zset', 'queue:' .. tenant)
end
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
rebase_counters()
prune_idle_tenants()
drop_remains()
drop_old_charges()
drop_old_rooms()
redis.call('SET', PREFIX .. 'born', new_data_name, 'NX')
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local aside = redis.call('HGETALL', ASIDE)
redis.call('DEL', ASIDE)
return {run .. ' ' .. redis.call('GET', PREFIX .. 'born'), states, aside}
