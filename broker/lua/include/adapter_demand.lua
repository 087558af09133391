-- The adapters of jobs that suit a worker but do not fit now, so that the worker can fetch them beforehand.
local demanded, demand, first_seen = {}, {}, {}

-- Count a job that needs an adapter, given as the bytes of its request; '' or nothing for none.
local function count_demand(request)
  if not request or request == '' then return end
  if not demand[request] then
    demanded[#demanded + 1] = request
    demand[request], first_seen[request] = 0, #demanded
  end
  demand[request] = demand[request] + 1
end

-- Return the requests of which most jobs have need, at most ADAPTER_REQUESTS_LIMIT.
local function most_demanded()
  if #demanded < 2 then return demanded end
  table.sort(demanded, function(a, b)
    if demand[a] ~= demand[b] then return demand[a] > demand[b] end
    return first_seen[a] < first_seen[b]
  end)
  while #demanded > ADAPTER_REQUESTS_LIMIT do table.remove(demanded) end
  return demanded
end
