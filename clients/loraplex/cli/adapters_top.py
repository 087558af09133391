"""`loraplex adapters top`: a live view of the adapters on each worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.cluster import ClusterReader
from loraplex.cli.options import ROUTER, STORE, TENANT, JsonOption, RouterOption, StoreOption, TenantOption
from loraplex.cli.service import Service
from loraplex.cli.terminal import (
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
# Intervals in seconds at which the store is asked again: after an answer, and after none.
_AGAIN_S, _AGAIN_AFTER_FAILURE_S = 5.0, 60.0
# Maximum number of digests that one call to the store takes.
_MOST_DIGESTS = 1000
# Number of a digest's characters that are shown: `sha256:` and 12 digits.
_DIGEST_CHARACTERS = 19


def adapters_top(
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    store: StoreOption = STORE,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where adapters are, live: on the device, in host memory, on disk; hits, misses and swaps since the start.

    A hit is a request whose adapter is on the device; a disk hit, one whose adapter is fetched from the disk. The store
    names the adapters, to an operator or auditor.
    """
    cluster, names = ClusterReader(router, tenant), AdapterNames(store, tenant)

    def look() -> list[dict[str, Any]]:
        return named_workers(cluster.workers(), names)

    if as_json:
        fields = ("worker_id", "phase", "model", "adapter_slots", "adapter_tiers", "adapters", "adapter_names")
        print_json([{field: worker[field] for field in fields} for worker in look()])
        names.warn()
    elif not out().is_terminal:
        print_table(look(), COLUMNS)
        names.warn()
    elif once:
        out().print(view(look(), names))
    else:
        show_live(lambda: view(look(), names), REFRESH_S)


def named_workers(workers: Sequence[Mapping[str, Any]], names: AdapterNames) -> list[dict[str, Any]]:
    """Return workers with the names of the adapters on their devices, as `adapter_names`."""
    return [{**worker, "adapter_names": named} for worker, named in zip(workers, names.of(workers), strict=True)]


def view(workers: Sequence[Mapping[str, Any]], names: AdapterNames | None = None) -> RenderableType:
    """Render named workers for a terminal: tables of devices, memory and disks, and each worker's adapters.

    A last line says why the store did not name these.
    """
    from rich.console import Group
    from rich.text import Text

    tables: list[RenderableType] = []
    for columns in _TABLES:
        tables += [table_of(columns, table_rows(workers, {name: COLUMNS[name] for name in columns})), ""]
    lines = [
        f"  {worker['worker_id']}: {', '.join(worker['adapter_names']) or 'no adapter on the device'}"
        for worker in workers
    ]
    if names is not None and names.problem:
        lines.append(f"  {names.warning}")
    return Group(*tables, *(Text(printable(line), no_wrap=True, overflow="ellipsis") for line in lines))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


class AdapterNames:
    """Names the adapters on workers' devices, of all tenants, as the store knows them.

    A revision is `acme/support` if the alias `live` points at it, else `acme/support@canary` by another alias, else
    `acme/support@sha256:0123456789ab`; a weighted set is `acme/support=0.5 + acme/sales=0.5`. The store is asked anew
    every _AGAIN_S, because aliases move.
    """

    def __init__(self, store: str, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._names: dict[str, str] = {}
        self._ask_at_s = 0.0
        # Why the store could not be asked; empty: it was.
        self.problem = ""

    def of(self, workers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the names of each worker's adapters, sorted."""
        sets = {one["digest"]: one["parts"] for worker in workers for one in worker["adapter_sets"]}
        if time.monotonic() >= self._ask_at_s:
            digests = {digest for worker in workers for digest in worker["adapters"] if digest not in sets}
            self._ask(sorted(digests | {part["digest"] for parts in sets.values() for part in parts}))
        named = {
            digest: " + ".join(f"{self._name(part['digest'])}={part['weight']:g}" for part in parts)
            for digest, parts in sets.items()
        }
        return [sorted(named.get(digest) or self._name(digest) for digest in worker["adapters"]) for worker in workers]

    @property
    def warning(self) -> str:
        """Return a line that says why there are digests instead of names."""
        return f"the store does not name the adapters: {self.problem}"

    def warn(self) -> None:
        """Print this line on stderr, if there is a problem."""
        if self.problem:
            typer.echo(printable(self.warning), err=True)

    def _name(self, digest: str) -> str:
        short = digest[:_DIGEST_CHARACTERS]
        return self._names.get(digest) or (short if self.problem else f"{short} (not in the store)")

    def _ask(self, digests: Sequence[str]) -> None:
        found: dict[str, list[Any]] = {}
        self.problem, self._ask_at_s = "", time.monotonic() + _AGAIN_S
        try:
            store = Service("store", self._store, "adapters.v1.adapters", self._tenant, _ASK_S)
            for start in range(0, len(digests), _MOST_DIGESTS):
                answer = store.ask("FindRevisions", digests=digests[start : start + _MOST_DIGESTS])
                for one in answer.revisions:
                    found.setdefault(one.digest, []).append(one)
        except CommandError as error:
            self.problem, self._ask_at_s = str(error), time.monotonic() + _AGAIN_AFTER_FAILURE_S
            return
        self._names = {digest: _name_of(ones) for digest, ones in found.items()}


def _name_of(revisions: Sequence[Any]) -> str:
    """Return the name of a revision, whose bytes several adapters may have."""
    first, *others = [one for one in revisions if not one.HasField("delete_time")] or revisions
    _, tenant, _, adapter = first.adapter.split("/", 3)
    aliases = sorted(first.aliases, key=lambda alias: (alias != "live", alias))
    at = "" if aliases[:1] == ["live"] else f"@{(*aliases, first.digest[:_DIGEST_CHARACTERS])[0]}"
    deleted = " (deleted)" if first.HasField("delete_time") else ""
    also = ", ".join("/".join(one.adapter.split("/")[1::2]) for one in others)
    return f"{tenant}/{adapter}{at}{deleted}" + (f" (also {also})" if also else "")
