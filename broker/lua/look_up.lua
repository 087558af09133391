#!lua flags=allow-oom
-- Answers for each job, given by id and attempt, 1 if that attempt or a newer one waits, 2 if it was displaced, else 0. A
-- part of the jobs, by the number of this look, is put back where lost keys have taken it out of its queue.
--- @include "lost_keys"
--- @include "workers"

local look_number = tonumber(ARGV[2])
local answers, is_restored = {}, false
for i = 3, #ARGV, 2 do
  local key, values = PREFIX .. 'job:' .. ARGV[i], nil
  if (#answers + look_number) % LOOKS_PER_CHECK == 0 then
    values = hash_fields(key, 'attempt', 'displaced', 'facts')
    if values[3] then
      local was_missing = restore_job(ARGV[i], values[3])
      if was_missing == nil then values = {} end
      is_restored = was_missing or is_restored
    end
  else
    values = hash_fields(key, 'attempt', 'displaced')
  end
  local waits = values[1] and number_of(values[1]) >= tonumber(ARGV[i + 1])
  answers[#answers + 1] = waits and 1 or values[2] and 2 or 0
end
flush_counts()
if is_restored then wake_a_worker() end
return answers
