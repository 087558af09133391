"""What attempts have made, charged to their tenants: the part of a script that does it, and its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from broker import terms
from broker.terms import Usage

# Lua: charges so many reports, which begin at that argument, and returns how many arguments they were. Each is id,
# attempt, tokens, whether it ended, whether it ran; only what is more than the attempt's last report is charged.
CHARGE_REPORTS = f"""
local function charge_reports(first, reports)
  for i = first, first + 5 * (reports - 1), 5 do
    local key = P .. 'charged:' .. ARGV[i]
    local known = redis.call('GET', key)
    local tenant, weight, attempt, tokens, prompt
    if known then tenant, weight, attempt, tokens, prompt = cmsgpack.unpack(known) end
    if attempt == tonumber(ARGV[i + 1]) then
      local made = tonumber(ARGV[i + 2]) - tokens
      if made > 0 then charge(tenant, {terms.OUTPUT_WEIGHT} * made / weight) end
      if ARGV[i + 3] == '1' then
        if ARGV[i + 4] == '0' then charge(tenant, -prompt) end
        redis.call('DEL', key)
      else
        tokens = tokens + math.max(made, 0)
        redis.call('SET', key, cmsgpack.pack(tenant, weight, attempt, tokens, prompt), 'PX', {terms.CHARGED_MS})
      end
    end
  end
  return 5 * reports
end
"""

# ARGV: prefix, how many reports, these
CHARGE = f"""
{CHARGE_REPORTS}
charge_reports(3, tonumber(ARGV[2]))
"""


def report_arguments(reports: Sequence[Usage]) -> list[str | int]:
    """How many there are, and their fields."""
    arguments: list[str | int] = [len(reports)]
    for one in reports:
        arguments += [one.job_id, one.attempt, one.tokens, int(one.ended), int(one.ran)]
    return arguments
