"""The arguments of broker/lua/claim.lua, in the order in which the script reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from broker.messages import Capacity, RowToShare
from broker.terms import ADAPTER_DIGITS, UsageReport


@dataclass(frozen=True, slots=True)
class ScanPlace:
    """The number of a scan, the tenants that it skips, and when it looks at the arrivals after `seen`.

    `news` is `only` for a scan of these alone, `now` or `later` for one that looks at them if it finds no job, or
    leaves them to a later scan. `woken`: the scan follows a wait for a wake-up.
    """

    scan_number: int
    skipped_tenants: int
    seen: int
    news: str
    woken: bool


def scan_arguments(
    base_digest: str, capacity: Capacity, reports: Sequence[UsageReport], place: ScanPlace
) -> list[str | bytes | int | float]:
    """Return the arguments after the prefix and the worker: what it can take, and where the scan begins."""
    return [
        base_digest,
        *(capacity.rows, capacity.rows_limit, capacity.tokens, capacity.max_tokens, capacity.max_rank),
        *(place.scan_number, place.skipped_tenants),
        "*" if capacity.routers is None else "\n".join(capacity.routers),
        *(place.seen, place.news, int(place.woken)),
        packed_reports(reports),
        *_share_arguments(capacity.row_to_share),
        capacity.only_tenant,
        "\n".join(("", *(adapter[-ADAPTER_DIGITS:] for adapter in capacity.adapters), "")),
    ]


def packed_reports(reports: Sequence[UsageReport]) -> bytes:
    """Return the fields of reports, one after the other, as broker/lua/include/charges.lua reads them."""
    fields: list[str | int | bool] = []
    for report in reports:
        fields += [report.job_id, report.attempt, report.tokens, report.ended, report.ran]
    return msgspec.msgpack.encode(fields)


def _share_arguments(row: RowToShare | None) -> list[str | int | float]:
    """Return the tenant above its share, its rows left, the number of tenants, and their names and rows."""
    if row is None:
        return ["", 0, 0]
    return [row.tenant, row.rows_left, len(row.tenant_rows), *(part for pair in row.tenant_rows for part in pair)]
