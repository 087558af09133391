#!lua
-- Answers for each job, given by id and attempt, 1 if that attempt or a newer one waits, 2 if it was displaced, else 0.
--- @include "keys"

local answers = {}
for i = 2, #ARGV, 2 do
  local values = redis.call('HMGET', PREFIX .. 'job:' .. ARGV[i], 'attempt', 'displaced')
  local waits = values[1] and tonumber(values[1]) >= tonumber(ARGV[i + 1])
  answers[#answers + 1] = waits and 1 or values[2] and 2 or 0
end
return answers
