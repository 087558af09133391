"""`loraplex adapters top`: a live view of the adapters on each worker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.cluster import ClusterReader
from clients.cli.options import ROUTER, STORE, TENANT, JsonOption, RouterOption, StoreOption, TenantOption
from clients.cli.service import cluster_service
from clients.cli.terminal import (
    Columns,
    CommandError,
    out,
    print_json,
    print_table,
    printable,
    show_live,
    table_of,
    table_rows,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

# Refresh interval in seconds: workers publish their state this often.
REFRESH_S = 0.5

COLUMNS: Columns = {
    "worker": "worker_id",
    "resident": lambda worker: f"{worker['adapter_slots']['used']}/{worker['adapter_slots']['total']}",
    "pinned": lambda worker: worker["adapter_slots"]["pinned"],
    "loading": lambda worker: worker["adapter_tiers"]["loading"],
    "fetching": lambda worker: worker["adapter_tiers"]["fetching"],
    "hits": lambda worker: worker["adapter_tiers"]["hits"],
    "misses": lambda worker: worker["adapter_tiers"]["misses"],
    "swaps": lambda worker: worker["adapter_tiers"]["swaps"],
    "device MiB": lambda worker: _mib(worker["adapter_tiers"]["device_bytes"]),
    "host MiB": lambda worker: _mib(worker["adapter_tiers"]["host_bytes"]),
    "disk MiB": lambda worker: (
        f"{_mib(worker['adapter_tiers']['disk_bytes'])}/{_mib(worker['adapter_tiers']['disk_bytes_limit'])}"
    ),
    "on disk": lambda worker: worker["adapter_tiers"]["disk_adapters"],
    "disk hits": lambda worker: worker["adapter_tiers"]["disk_hits"],
    "disk misses": lambda worker: worker["adapter_tiers"]["disk_misses"],
    "adapters": lambda worker: ", ".join(worker["adapter_names"]),
}
# The columns of the tables at a terminal: these fit 80 characters, and names have lines of their own.
_TABLES = (
    ("worker", "resident", "pinned", "loading", "hits", "misses", "swaps"),
    ("worker", "device MiB", "host MiB", "disk MiB"),
    ("worker", "fetching", "on disk", "disk hits", "disk misses"),
)
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
        fields = ("worker_id", "phase", "model", "adapter_slots", "adapter_tiers", "adapters", "adapter_names")
        print_json([{field: worker[field] for field in fields} for worker in named_workers(cluster.workers(), names)])
    elif not out().is_terminal:
        print_table(named_workers(cluster.workers(), names), COLUMNS)
    elif once:
        out().print(view(named_workers(cluster.workers(), names)))
    else:
        show_live(lambda: view(named_workers(cluster.workers(), names)), REFRESH_S)


def named_workers(workers: Sequence[Mapping[str, Any]], names: AdapterNames) -> list[dict[str, Any]]:
    """Return workers with the names of the adapters on their devices, as `adapter_names`."""
    return [{**worker, "adapter_names": names.of(worker["adapters"])} for worker in workers]


def view(workers: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Render named workers for a terminal: tables of devices, memory and disks, and each worker's adapters."""
    from rich.console import Group
    from rich.text import Text

    tables: list[RenderableType] = []
    for names in _TABLES:
        tables += [table_of(names, table_rows(workers, {name: COLUMNS[name] for name in names})), ""]
    lines = [
        f"  {worker['worker_id']}: {', '.join(worker['adapter_names']) or 'no adapter on the device'}"
        for worker in workers
    ]
    return Group(*tables, *(Text(printable(line), no_wrap=True, overflow="ellipsis") for line in lines))


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
                _, tenant, _, name = adapter.name.split("/", 3)
                for alias, digest in sorted(adapter.aliases.items(), key=lambda item: item[0] == "live"):
                    self._names[digest] = f"{tenant}/{name}" + ("" if alias == "live" else f"@{alias}")

    def _others(self) -> Iterator[str]:
        """Yield the tenants whose adapters the router has answered with."""
        if self._router:
            with suppress(CommandError):
                service = cluster_service(self._router, self._tenant, _ASK_S)
                traffic = service.ask("GetTraffic")
                yield from sorted({row.tenant for row in traffic.adapters} - {self._tenant})
