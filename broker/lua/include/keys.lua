-- Names of the cell's keys, which broker/keys.py describes. ARGV[1] is their common prefix. One a line: a script leaves
-- out those that it does not use.
local PREFIX = ARGV[1]
local WAITING = PREFIX .. 'waiting'
local REDISPATCHED = PREFIX .. 'again'
local ARRIVALS = PREFIX .. 'arrivals'
local TENANTS = PREFIX .. 'tenants'
local IDLE = PREFIX .. 'idle'
local FLOOR = PREFIX .. 'floor'
local USES = PREFIX .. 'uses'
local TOTALS = PREFIX .. 'bytes'
local CLAIM_RATE = PREFIX .. 'pace'
local WAKE = PREFIX .. 'wake'
local ROUTERS = PREFIX .. 'routers'
local WORKERS = PREFIX .. 'workers'
local SUSPECTS = PREFIX .. 'suspects'
