-- Names of the cell's keys, which broker/keys.py describes. ARGV[1] is their common prefix.
local PREFIX = ARGV[1]
local WAITING, REDISPATCHED, ARRIVALS = PREFIX .. 'waiting', PREFIX .. 'again', PREFIX .. 'arrivals'
local TENANTS, IDLE, FLOOR = PREFIX .. 'tenants', PREFIX .. 'idle', PREFIX .. 'floor'
local USES = PREFIX .. 'uses'
local TOTALS, CLAIM_RATE, WAKE = PREFIX .. 'bytes', PREFIX .. 'pace', PREFIX .. 'wake'
local ROUTERS, WORKERS = PREFIX .. 'routers', PREFIX .. 'workers'
