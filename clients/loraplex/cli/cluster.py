"""A cluster as a router sees it: its workers, queues and jobs; snapshots, and the difference of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from loraplex.cli.options import ROUTER, TENANT, JsonOption, RouterOption, TenantOption, worker_ids
from loraplex.cli.service import cluster_service
from loraplex.cli.terminal import Columns, message_values, print_table

if TYPE_CHECKING:
    from loraplex.cluster.v1 import cluster_pb2

WorkerArgument = Annotated[
    str,
    typer.Argument(metavar="WORKER", help="The worker's id from `loraplex workers`.", autocompletion=worker_ids),
]


@dataclass(frozen=True)
class Snapshot:
    """The cluster's state at one moment. `traffic` is the asked router's own, since its start."""

    workers: Sequence[Mapping[str, Any]]
    queues: Sequence[Mapping[str, Any]]
    traffic: cluster_pb2.GetTrafficResponse

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        return {"workers": list(self.workers), "queues": list(self.queues), "traffic": message_values(self.traffic)}


class ClusterReader:
    """A connection to one router's ClusterService. Every method raises CommandError."""

    def __init__(self, router: str, tenant: str) -> None:
        self.router = router
        self._cluster = cluster_service(router, tenant)

    def look(self) -> Snapshot:
        """Take a snapshot."""
        traffic = self._cluster.ask("GetTraffic")
        return Snapshot(self.workers(), self.queues(), traffic)

    def workers(self) -> list[dict[str, Any]]:
        """Return the live workers as JSON values."""
        answer = self._cluster.ask("ListWorkers")
        return [message_values(worker) for worker in answer.workers]

    def queues(self) -> list[dict[str, Any]]:
        """Return the models' queues as JSON values."""
        answer = self._cluster.ask("ListQueues")
        return [message_values(queue) for queue in answer.queues]


@dataclass(frozen=True)
class Interval:
    """The change between two snapshots, or from the router's start to a single one."""

    now: Snapshot
    before: Snapshot | None

    @property
    def seconds(self) -> float:
        """Return the interval's length."""
        return max(1e-3, self.now.traffic.uptime - self._last.uptime)

    @property
    def since_start(self) -> bool:
        """Tell whether the interval begins at the router's start: no earlier snapshot, or one of before a restart."""
        return self.before is None or self.before.traffic.uptime >= self.now.traffic.uptime

    @property
    def _last(self) -> cluster_pb2.GetTrafficResponse:
        """Return the traffic at the interval's beginning: none at the router's start."""
        return type(self.now.traffic)() if self.since_start or self.before is None else self.before.traffic

    def requests(self) -> dict[str, int]:
        """Return the number of requests that ended, by status."""
        last = self._last.requests
        return {code: count - last.get(code, 0) for code, count in self.now.traffic.requests.items()}

    def count(self, field: str) -> int:
        """Return the increase of a counter of the traffic."""
        return int(getattr(self.now.traffic, field) - getattr(self._last, field))

    def quantile(self, field: str, fraction: float) -> float | None:
        """Return a quantile in seconds, interpolated like Prometheus's histogram_quantile; None without samples."""
        now = getattr(self.now.traffic, field)
        counts = list(now.counts)
        last = getattr(self._last, field).counts
        counts = [count - before for count, before in zip(counts, last, strict=False)] or counts
        total, below = sum(counts), 0
        if not total:
            return None
        for place, count in enumerate(counts):
            if count and below + count >= fraction * total:
                low = now.bounds[place - 1] if place else 0.0
                high = now.bounds[place] if place < len(now.bounds) else low
                return float(low + (high - low) * (fraction * total - below) / count)
            below += count
        return None

    def steps_per_s(self, worker: Mapping[str, Any]) -> float | None:
        """Return a worker's steps per second; None if the earlier snapshot lacks it."""
        for earlier in self.before.workers if self.before is not None else ():
            if earlier["incarnation"] == worker["incarnation"] and not self.since_start:
                return float(worker["steps"] - earlier["steps"]) / self.seconds
        return None

    def adapters(self) -> list[dict[str, Any]]:
        """Return the increase of each tenant's adapters, the busiest first."""
        last = {(row.tenant, row.adapter): row for row in self._last.adapters}
        rows = []
        for row in self.now.traffic.adapters:
            before = last.get((row.tenant, row.adapter), type(row)())
            requests = row.requests - before.requests
            waited = row.time_to_first_token - before.time_to_first_token
            rows.append(
                {
                    "tenant": row.tenant,
                    "adapter": row.adapter,
                    "requests": requests,
                    "tokens": row.completion_tokens - before.completion_tokens,
                    "ttft_s": waited / requests if requests else None,
                    "all_requests": row.requests,
                }
            )
        return sorted(rows, key=lambda row: (-row["tokens"], -row["all_requests"], row["tenant"], row["adapter"]))


def workers(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """List the live workers: running rows, KV blocks, adapters on the device."""
    columns: Columns = {
        "worker": "worker_id",
        "phase": "phase",
        "model": "model",
        "rows": lambda worker: f"{worker['rows_running']}/{worker['rows_limit']}",
        "waiting": "rows_waiting",
        "blocks free": lambda worker: (
            f"{worker['blocks']['free'] + worker['blocks']['cached']}/{worker['blocks']['total']}"
        ),
        "in use": lambda worker: worker["blocks"]["referenced"],
        "adapters": lambda worker: f"{worker['adapter_slots']['used']}/{worker['adapter_slots']['total']}",
        "pinned": lambda worker: worker["adapter_slots"]["pinned"],
        "steps": "steps",
        "base": lambda worker: worker["base_digest"][:19],
        "cell": "cell",
    }
    print_table(ClusterReader(router, tenant).workers(), columns, as_json=as_json)


def queues(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """List the models' queues in each cell: jobs that wait for a worker, and running answers."""
    columns: Columns = {"model": "model", "waiting": "waiting", "running": "running", "cell": "cell"}
    print_table(ClusterReader(router, tenant).queues(), columns, as_json=as_json)


def drain(worker: WorkerArgument, router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Drain a worker: it claims no more jobs, its running answers end or continue on other workers, and it exits."""
    cluster_service(router, tenant).ask("DrainWorker", worker_id=worker)
    typer.echo(f"{worker} is draining; it has ended when `loraplex workers` no longer shows it")


cells = typer.Typer(
    no_args_is_help=True, help="List, drain and open cells: queues with a Redis and workers of their own."
)

CellArgument = Annotated[str, typer.Argument(metavar="CELL", help="The cell's name from `loraplex cells list`.")]


@cells.command("list")
def list_cells(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """List the cells: workers, waiting jobs, and the share of a Redis's measured rate of jobs."""
    from loraplex.contracts.broker.cells import CELL_JOBS

    columns: Columns = {
        "cell": "cell",
        "model": "model",
        "state": "state",
        "workers": "workers",
        "rows": lambda queue: f"{queue['running']}/{queue['rows']}",
        "waiting": "waiting",
        "oldest s": lambda queue: f"{queue['oldest_wait']:.1f}",
        "jobs/s": lambda queue: f"{queue['jobs_per_second']:.1f}",
        "of its most": lambda queue: f"{queue['jobs_per_second'] / CELL_JOBS:.0%}",
    }
    found = sorted(ClusterReader(router, tenant).queues(), key=lambda queue: (queue["cell"], queue["model"]))
    print_table(found, columns, as_json=as_json)


@cells.command("drain")
def drain_cell(cell: CellArgument, router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Send no more jobs to a cell; waiting ones move to other cells, running ones end there."""
    cluster_service(router, tenant).ask("DrainCell", cell=cell)
    typer.echo(f"{cell} gets no more jobs; it is empty when `loraplex cells list` shows none that wait or run")


@cells.command("open")
def open_cell(cell: CellArgument, router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Send jobs to a drained or new cell; its workers get the adapters pinned in others."""
    pins = cluster_service(router, tenant).ask("OpenCell", cell=cell).pins
    typer.echo(f"{cell} is open" + (f"; {pins} pins were copied to it" if pins else ""))


quarantine = typer.Typer(
    no_args_is_help=True, help="List and lift quarantines: tenants whose requests killed engines are refused."
)
resume_keys = typer.Typer(no_args_is_help=True, help="Rotate and withdraw the keys that sign resume tokens.")


@quarantine.command("list")
def list_quarantine(router: RouterOption = ROUTER, tenant: TenantOption = TENANT, as_json: JsonOption = False) -> None:
    """List quarantined tenants and adapters, and for how long."""
    columns: dict[str, Any] = {
        "model": "model",
        "tenant": "tenant",
        "adapter": lambda one: {"": "(base)", "*": "(all)"}.get(one["adapter"], one["adapter"]),
        "refused for s": lambda one: f"{one['left']:.0f}",
    }
    found = cluster_service(router, tenant).ask("ListQuarantine").subjects
    print_table(map(message_values, found), columns, as_json=as_json)


@quarantine.command("lift")
def lift_quarantine(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant to release.")],
    router: RouterOption = ROUTER,
) -> None:
    """End a tenant's quarantine and forget its strikes."""
    answer = cluster_service(router, name).ask("LiftQuarantine", tenant=name)
    typer.echo(
        f"{name}: {answer.removed_count} records removed" if answer.removed_count else f"{name}: nothing to lift"
    )


@resume_keys.command("rotate")
def rotate_resume_keys(router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Create a new signing key for all routers; tokens of former keys stay valid."""
    answer = cluster_service(router, tenant).ask("RotateResumeKeys")
    typer.echo(f"a new key signs; tokens of {answer.valid_count} keys are valid")


@resume_keys.command("withdraw")
def withdraw_resume_keys(router: RouterOption = ROUTER, tenant: TenantOption = TENANT) -> None:
    """Remove all keys but the signing one; then restart the routers one by one."""
    answer = cluster_service(router, tenant).ask("WithdrawResumeKeys")
    typer.echo(f"{answer.removed_count} keys removed; start the routers again one by one to end their tokens")


WhichArgument = Annotated[
    Literal["open", "dead"],
    typer.Argument(
        help="open: running and waiting jobs of this router; dead: the latest that killed engines, of all routers."
    ),
]


def jobs(
    which: WhichArgument = "open",
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    as_json: JsonOption = False,
) -> None:
    """List a router's running and waiting jobs; `dead`: jobs that killed engines."""
    service = cluster_service(router, tenant)
    columns: dict[str, Any] = {
        "job": "job_id",
        "tenant": "tenant",
        "model": "model",
        "adapter": lambda job: _short(job["adapter_revision"]),
    }
    if which == "open":
        listed = service.ask("ListJobs").jobs
        columns |= {"worker": lambda job: job["worker_id"] or "(waits)", "attempt": "attempt", "strikes": "strikes"}
        columns |= {"prompt": "prompt_tokens", "answer": "completion_tokens", "age s": lambda job: f"{job['age']:.1f}"}
        columns |= {"cell": "cell"}
    else:
        listed = service.ask("ListDeadJobs").jobs
        columns |= {"attempts": "attempts", "prompt": "prompt_tokens", "answer": "completion_tokens"}
        columns |= {"reason": "reason", "died at": "died_at"}
    print_table(map(message_values, listed), columns, as_json=as_json)


def _short(revision: str) -> str:
    """Shorten a revision's name to the adapter's name and the beginning of the digest."""
    if not revision:
        return "(base)"
    name, _, digest = revision.rpartition("/revisions/")
    return f"{name.removeprefix('tenants/')}@{digest[:15]}" if name else revision[:15]
