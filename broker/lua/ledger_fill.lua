#!lua flags=allow-oom
-- Fill accounts of a ledger that has lost data. A count is the higher of both, because it only grows in its window.
--- @include "ledger"

for first = 1, #ARGV, #COUNTS + 1 do
  local account, told = account_of(ARGV[first]), {}
  for i, field in ipairs(COUNTS) do told[field] = tonumber(ARGV[first + i]) end
  local function higher(window, ...)
    for _, field in ipairs({...}) do
      if told[window] >= account[window] then account[field] = math.max(account[field], told[field]) end
    end
  end
  higher('minute', 'requests', 'input', 'output')
  higher('day', 'day_tokens')
  higher('month', 'month_tokens')
end
write_accounts()
return 'filled'
