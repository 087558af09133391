"""`loraplex adapters top`: a live view of the adapters on each worker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.cluster import ClusterReader
from clients.cli.options import ROUTER, STORE, TENANT, JsonOption, RouterOption, StoreOption, TenantOption
from clients.cli.service import cluster_service
from clients.cli.terminal import CommandError, out, print_json, print_rows, printable, table_of

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
# Timeout in seconds of the call to the store, which holds up a live view.
_ASK_S = 2.0
# Intervals in seconds at which the store is asked again for unknown digests: after an answer, and after none.
_AGAIN_S, _AGAIN_AFTER_FAILURE_S = 5.0, 60.0


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
    cluster, names = ClusterReader(router, tenant), AdapterNames(store, tenant, router)
    if as_json:
        fields = ("worker_id", "phase", "model", "adapter_slots", "adapter_tiers", "adapters")
        print_json(
            [
                {field: worker[field] for field in fields} | {"adapter_names": names.of(worker["adapters"])}
                for worker in cluster.workers()
            ]
        )
    elif not out().is_terminal:
        print_rows(HEADERS, _rows(cluster.workers(), names))
    elif once:
        out().print(view(_rows(cluster.workers(), names)))
    else:
        _live(cluster, names)


def _live(cluster: ClusterReader, names: AdapterNames) -> None:
    """Refresh the table until Ctrl-C, or until the router is gone."""
    from rich.live import Live

    with Live(view(_rows(cluster.workers(), names)), console=out(), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(view(_rows(cluster.workers(), names)), refresh=True)


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


class AdapterNames:
    """Names digests as `tenant/adapter`, as far as the store lists them; others by their beginning.

    The store is asked as the tenant, and for digests that it then lacks as each tenant with traffic at the router: it
    lists them where nobody has credentials.
    """

    def __init__(self, store: str, tenant: str, router: str = "") -> None:
        self._store = store
        self._tenant = tenant
        self._router = router
        self._names: dict[str, str] = {}
        self._ask_at_s = 0.0

    def of(self, digests: Sequence[str]) -> list[str]:
        """Return the names of revisions, sorted."""
        if any(digest not in self._names for digest in digests) and time.monotonic() >= self._ask_at_s:
            self._ask(digests)
        return sorted(self._names.get(digest, digest[:19]) for digest in digests)

    def _ask(self, digests: Sequence[str]) -> None:
        from loraplex_client import LoraplexError

        self._ask_at_s = time.monotonic() + _AGAIN_S
        try:
            self._list(self._tenant)
        except LoraplexError:
            self._ask_at_s = time.monotonic() + _AGAIN_AFTER_FAILURE_S
            return
        for tenant in self._others():
            if all(digest in self._names for digest in digests):
                break
            with suppress(LoraplexError):
                self._list(tenant)

    def _list(self, as_tenant: str) -> None:
        """Add the names of all adapters that a tenant may use. Raises LoraplexError."""
        from loraplex_client import StoreClient

        with StoreClient(self._store, as_tenant, timeout_s=_ASK_S) as client:
            for adapter in client.list():
                _, tenant, _, name = adapter.name.split("/")
                for alias, digest in sorted(adapter.aliases.items(), key=lambda item: item[0] == "live"):
                    self._names[digest] = f"{tenant}/{name}" + ("" if alias == "live" else f"@{alias}")

    def _others(self) -> Iterator[str]:
        """Yield the tenants whose adapters the router has answered with."""
        from loraplex.cluster.v1 import cluster_pb2

        if self._router:
            with suppress(CommandError):
                service = cluster_service(self._router, self._tenant, _ASK_S)
                traffic = service.ask("GetTraffic", cluster_pb2.GetTrafficRequest())
                yield from sorted({row.tenant for row in traffic.adapters} - {self._tenant})
