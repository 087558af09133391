#!lua
-- Answers for each job, given by id and attempt, 1 if that attempt or a newer one waits, else 0.
--- @include "keys"

local answers = {}
for i = 2, #ARGV, 2 do
  local attempt = redis.call('HGET', PREFIX .. 'job:' .. ARGV[i], 'attempt')
  answers[#answers + 1] = attempt and tonumber(attempt) >= tonumber(ARGV[i + 1]) and 1 or 0
end
return answers
