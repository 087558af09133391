"""`loraplex adapters top`: a live view of the adapters on each worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.adapter_names import AdapterNames
from clients.cli.options import ROUTER, STORE, TENANT, JsonOption, RouterOption, StoreOption, TenantOption
from clients.cli.terminal import out, print_json, print_rows, printable, table_of
from clients.cli.workers import WorkerList

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    "adapters",
)
# The columns of the tables at a terminal, by number: these fit 80 characters, and names have lines of their own.
_TABLES = ((0, 1, 2, 3, 5, 6, 7), (0, 8, 9, 10), (0, 4, 11, 12, 13))


def adapters_top(
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end, as in a pipe.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where adapters are, live: on the device, in host memory, on disk; hits, misses and swaps since the start.

    A hit is a request whose adapter is on the device; a disk hit, one whose adapter is fetched from the disk. The store
    names the adapters.
    """
    workers, names = WorkerList(router, tenant), AdapterNames(store, tenant, router)
    if as_json:
        fields = ("worker_id", "phase", "model", "adapter_slots", "adapter_tiers", "adapters")
        print_json(
            [
                {field: worker[field] for field in fields} | {"adapter_names": names.of(worker["adapters"])}
                for worker in workers.fetch()
            ]
        )
    elif not out().is_terminal:
        print_rows(HEADERS, _rows(workers.fetch(), names))
    elif once:
        out().print(view(_rows(workers.fetch(), names)))
    else:
        _live(workers, names)


def _live(workers: WorkerList, names: AdapterNames) -> None:
    """Refresh the table until Ctrl-C, or until the router is gone."""
    from rich.live import Live

    with Live(view(_rows(workers.fetch(), names)), console=out(), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(view(_rows(workers.fetch(), names)), refresh=True)


def view(rows: Sequence[tuple[object, ...]]) -> RenderableType:
    """Render the rows for a terminal: tables of devices, memory and disks, and each worker's adapters."""
    from rich.console import Group
    from rich.text import Text

    tables: list[RenderableType] = []
    for columns in _TABLES:
        tables += [table_of([HEADERS[at] for at in columns], [[row[at] for at in columns] for row in rows]), ""]
    lines = [
        Text(printable(f"  {row[0]}: {row[-1] or 'no adapter on the device'}"), no_wrap=True, overflow="ellipsis")
        for row in rows
    ]
    return Group(*tables, *lines)


def _rows(workers: Sequence[dict[str, Any]], names: AdapterNames) -> list[tuple[object, ...]]:
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
                ", ".join(names.of(worker["adapters"])),
            )
        )
    return rows


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"
