"""The arguments of broker/lua/claim.lua, in the order in which the script reads them."""

from __future__ import annotations

from collections.abc import Sequence

from broker.messages import Capacity, RowToShare
from broker.terms import UsageReport


def scan_arguments(
    base_digest: str, capacity: Capacity, reports: Sequence[UsageReport], scan_number: int, skipped_tenants: int
) -> list[str | int | float]:
    """Return the arguments after the prefix and the worker: what it can take, and where the scan begins."""
    return [
        base_digest,
        *(capacity.rows, capacity.rows_limit, capacity.tokens, capacity.max_tokens, capacity.max_rank),
        *(scan_number, skipped_tenants),
        "*" if capacity.routers is None else "\n".join(capacity.routers),
        *report_arguments(reports),
        *_share_arguments(capacity.row_to_share),
        *capacity.adapters,
    ]


def report_arguments(reports: Sequence[UsageReport]) -> list[str | int]:
    """Return how many reports there are, and their fields as broker/lua/include/charges.lua reads them."""
    arguments: list[str | int] = [len(reports)]
    for report in reports:
        arguments += [report.job_id, report.attempt, report.tokens, int(report.ended), int(report.ran)]
    return arguments


def _share_arguments(row: RowToShare | None) -> list[str | int | float]:
    """Return the tenant above its share, its rows left, the number of tenants, and their names and rows."""
    if row is None:
        return ["", 0, 0]
    return [row.tenant, row.rows_left, len(row.tenant_rows), *(part for pair in row.tenant_rows for part in pair)]
