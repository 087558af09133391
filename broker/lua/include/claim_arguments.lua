-- The arguments of a claim, in the order of broker/claims.py.
--- @include "charges"

local worker, base_digest, free_rows, all_rows, free_tokens, max_tokens, max_rank = cmsgpack.unpack(ARGV[2])
-- Routers that the worker has a link to, one a line; '*': all. The number of the last arrival that needs no second look;
-- whether to look at later ones alone, or, where nothing else is found, in this scan or in a later one; and whether the
-- worker has waited for a wake-up.
local scan_number, skipped_tenants, links, seen, news, was_woken = cmsgpack.unpack(ARGV[3])
local linked
if links ~= '*' then
  linked = {}
  for router in string.gmatch(links, '[^\n]+') do linked[router] = true end
end
local NEWS_ONLY, NEWS_LATER = 'only', 'later'
-- Usage is charged before the claim: it counts for whose turn it is.
charge_reports(ARGV[4])
-- The tenant whose row this worker would take for a tenant below its share, empty for none, and the rows, over its weight,
-- that it then still has; the tenant of all jobs that the worker has, empty without any, or where they are of several.
local row_of, rows_left, only_tenant = cmsgpack.unpack(ARGV[5])
-- Then the scan looks at more tenants, and at fewer jobs of each.
local looks_around = row_of ~= '' and free_rows < 1
-- The last digits of the adapters that the worker has, each between two ends of lines.
local adapters_here = ARGV[6]
-- The rows that each tenant has here, names and numbers in turn.
local rows_here = {}
for i = 7, #ARGV, 2 do rows_here[ARGV[i]] = tonumber(ARGV[i + 1]) end
