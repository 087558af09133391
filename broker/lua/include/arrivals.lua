-- The numbered arrivals of jobs. NEWS has the ids of the last ones: a worker that has looked at all others, and found
-- none that suits it, looks at these alone.
--- @include "keys"

-- Record an arrival; returns its number. NEWS is cut to NEWS_LIMIT when it has twice as many.
local function record_arrival(id)
  local arrival = increment(ARRIVALS)
  redis.call('RPUSH', NEWS, id)
  if arrival % NEWS_LIMIT == 0 then redis.call('LTRIM', NEWS, -NEWS_LIMIT, -1) end
  return arrival
end
