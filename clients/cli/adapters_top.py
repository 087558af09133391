"""`loraplex adapters top`: a live view of the adapters on each worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from clients.cli.options import ROUTER, TENANT, JsonOption, RouterOption, TenantOption
from clients.cli.terminal import out, print_json, print_rows, table_of
from clients.cli.workers import WorkerList

# Refresh interval in seconds: workers publish their state this often.
REFRESH_S = 0.5

HEADERS = (
    "worker",
    "resident",
    "pinned",
    "loading",
    "fetching",
    "hits",
    "misses",
    "swaps",
    "device MiB",
    "host MiB",
    "disk MiB",
    "on disk",
    "disk hits",
    "disk misses",
)


def adapters_top(
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end, as in a pipe.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where adapters are, live: on the device, in host memory, on disk; hits, misses and swaps since the start.

    A hit is a request whose adapter is on the device; a disk hit, one whose adapter is fetched from the disk.
    """
    workers = WorkerList(router, tenant)
    if as_json:
        fields = ("worker_id", "phase", "model", "adapter_slots", "adapter_tiers", "adapters")
        print_json([{field: worker[field] for field in fields} for worker in workers.fetch()])
    elif once or not out().is_terminal:
        print_rows(HEADERS, _rows(workers.fetch()))
    else:
        _live(workers)


def _live(workers: WorkerList) -> None:
    """Refresh the table until Ctrl-C, or until the router is gone."""
    from rich.live import Live

    with Live(table_of(HEADERS, _rows(workers.fetch())), console=out(), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(table_of(HEADERS, _rows(workers.fetch())), refresh=True)


def _rows(workers: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for worker in workers:
        slots, tiers = worker["adapter_slots"], worker["adapter_tiers"]
        rows.append(
            (
                worker["worker_id"],
                f"{slots['used']}/{slots['total']}",
                slots["pinned"],
                tiers["loading"],
                tiers["fetching"],
                tiers["hits"],
                tiers["misses"],
                tiers["swaps"],
                _mib(tiers["device_bytes"]),
                _mib(tiers["host_bytes"]),
                f"{_mib(tiers['disk_bytes'])}/{_mib(tiers['disk_bytes_limit'])}",
                tiers["disk_adapters"],
                tiers["disk_hits"],
                tiers["disk_misses"],
            )
        )
    return rows


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"
