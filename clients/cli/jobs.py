"""`loraplex jobs`: a router's running and waiting jobs, and the jobs that killed engines."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import ROUTER, TENANT, JsonOption, RouterOption, TenantOption
from clients.cli.service import cluster_service
from clients.cli.terminal import print_json, print_rows

if TYPE_CHECKING:
    from loraplex.cluster.v1 import cluster_pb2


class Which(StrEnum):
    """Kinds of jobs to list."""

    OPEN = "open"
    DEAD = "dead"


WhichArgument = Annotated[
    Which,
    typer.Argument(
        help="open: running and waiting jobs of this router. dead: the latest jobs that killed engines, of all routers."
    ),
]


def jobs(
    which: WhichArgument = Which.OPEN,
    router: RouterOption = ROUTER,
    tenant: TenantOption = TENANT,
    as_json: JsonOption = False,
) -> None:
    """List a router's running and waiting jobs; with `dead`, the jobs that were ended because they killed engines."""
    found = _fetch(router, tenant, which)
    if as_json:
        print_json(found)
    elif which is Which.OPEN:
        _print_open(found)
    else:
        _print_dead(found)


def _print_open(found: list[dict[str, Any]]) -> None:
    print_rows(
        ("job", "tenant", "model", "adapter", "worker", "attempt", "strikes", "prompt", "answer", "age s"),
        (
            (
                job["job_id"],
                job["tenant"],
                job["model"],
                _short(job["adapter_revision"]),
                job["worker_id"] or "(waits)",
                job["attempt"],
                job["strikes"],
                job["prompt_tokens"],
                job["completion_tokens"],
                f"{job['age']:.1f}",
            )
            for job in found
        ),
    )


def _print_dead(found: list[dict[str, Any]]) -> None:
    print_rows(
        ("job", "tenant", "model", "adapter", "attempts", "prompt", "answer", "reason", "died at"),
        (
            (
                job["job_id"],
                job["tenant"],
                job["model"],
                _short(job["adapter_revision"]),
                job["attempts"],
                job["prompt_tokens"],
                job["completion_tokens"],
                job["reason"],
                job["died_at"],
            )
            for job in found
        ),
    )


def _short(revision: str) -> str:
    """Shorten a revision's name to the adapter's name and the beginning of the digest."""
    if not revision:
        return "(base)"
    name, _, digest = revision.rpartition("/revisions/")
    return f"{name.removeprefix('tenants/')}@{digest[:15]}" if name else revision[:15]


def _fetch(router: str, tenant: str, which: Which) -> list[dict[str, Any]]:
    """Return the jobs as JSON values. Raises CommandError."""
    from loraplex.cluster.v1 import cluster_pb2

    service = cluster_service(router, tenant)
    if which is Which.OPEN:
        open_jobs = service.ask("ListJobs", cluster_pb2.ListJobsRequest()).jobs
        return [_plain(job) for job in open_jobs]
    dead_jobs = service.ask("ListDeadJobs", cluster_pb2.ListDeadJobsRequest()).jobs
    return [_plain(job) | {"died_at": job.died_at.ToJsonString()} for job in dead_jobs]


def _plain(message: cluster_pb2.Job | cluster_pb2.DeadJob) -> dict[str, Any]:
    """Convert a message to a mapping of field names to values."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
