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
    worker_id: str, base_digest: str, capacity: Capacity, reports: Sequence[UsageReport], place: ScanPlace
) -> list[str | bytes | int]:
    """Return the arguments after the prefix: the worker, what it can take, and where the scan begins."""
    links = "*" if capacity.routers is None else "\n".join(capacity.routers)
    row = capacity.row_to_share or RowToShare("", 0, ())
    limits = (capacity.rows, capacity.rows_limit, capacity.tokens, capacity.max_tokens, capacity.max_rank)
    return [
        _packed(worker_id, base_digest, *limits),
        _packed(place.scan_number, place.skipped_tenants, links, place.seen, place.news, place.woken),
        packed_reports(reports),
        _packed(row.tenant, row.rows_left, capacity.only_tenant),
        "\n".join(("", *(adapter[-ADAPTER_DIGITS:] for adapter in capacity.adapters), "")),
        *(part for pair in row.tenant_rows for part in pair),
    ]


def packed_reports(reports: Sequence[UsageReport]) -> bytes:
    """Return the fields of reports, one after the other, as broker/lua/include/charges.lua reads them."""
    fields: list[str | int | bool] = []
    for report in reports:
        fields += [report.job_id, report.attempt, report.tokens, report.ended, report.ran]
    return msgspec.msgpack.encode(fields)


def _packed(*values: str | float) -> bytes:
    """Return at most 15 values in MessagePack, without the array's one byte."""
    return msgspec.msgpack.encode(values)[1:]
