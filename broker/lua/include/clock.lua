-- The time in milliseconds by the server's own clock: no client's clock matters.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
