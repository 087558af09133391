-- The arguments of a claim, in the order of broker/claim_arguments.py.
--- @include "charges"

local worker, base_digest = ARGV[2], ARGV[3]
local free_rows, all_rows, free_tokens = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local max_tokens, max_rank = tonumber(ARGV[7]), tonumber(ARGV[8])
local scan_number, skipped_tenants = tonumber(ARGV[9]), tonumber(ARGV[10])
-- Routers that the worker has a link to, one a line; '*': all.
local linked
if ARGV[11] ~= '*' then
  linked = {}
  for router in string.gmatch(ARGV[11], '[^\n]+') do linked[router] = true end
end
-- The number of the last arrival that needs no second look; whether to look at later ones alone, or, where nothing else
-- is found, in this scan or in a later one; and whether the worker has waited for a wake-up.
local seen, news, was_woken = tonumber(ARGV[12]), ARGV[13], ARGV[14] == '1'
local NEWS_ONLY, NEWS_LATER = 'only', 'later'
-- Usage is charged before the claim: it counts for whose turn it is.
charge_reports(ARGV[15])
-- The tenant whose row this worker would take for a tenant below its share, empty for none; the rows, over its weight,
-- that it then still has; and the rows that each tenant has here.
local row_of, rows_left, tenants_here = ARGV[16], tonumber(ARGV[17]), tonumber(ARGV[18])
local tenants_end = 18 + 2 * tenants_here
-- The tenant of all jobs that the worker has; empty without any, or where they are of several.
local only_tenant = ARGV[tenants_end + 1]
-- Then the scan looks at more tenants, and at fewer jobs of each.
local looks_around = row_of ~= '' and free_rows < 1
local rows_here = {}
for i = 19, tenants_end, 2 do rows_here[ARGV[i]] = tonumber(ARGV[i + 1]) end
-- The last digits of the adapters that the worker has, each between two ends of lines.
local adapters_here = ARGV[tenants_end + 2]
