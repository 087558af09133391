"""Lists of jobs: a tenant sees its own, operators and auditors see all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.contracts.broker.messages import DeadJob
from loraplex.contracts.broker.terms import Placement
from loraplex.router.api.cluster import ClusterService
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, set_caller


def routed(tenant: str) -> Any:
    """Return a waiting job."""
    job = SimpleNamespace(
        job_id=f"of-{tenant}",
        tenant=tenant,
        adapter=None,
        attempt=1,
        prompt_ids=(1, 2),
        request_id="",
        model="m",
        strikes=0,
    )
    return SimpleNamespace(job=job, link=None, emitted_tokens=0, admitted_at=0.0, placement=Placement(cell="main"))


class DeadJobs:
    """The dead letters of two tenants."""

    async def list(self) -> list[DeadJob]:
        """Return them."""
        return [
            DeadJob(
                job_id=f"of-{tenant}",
                request_id="",
                tenant=tenant,
                model="m",
                adapter_revision="",
                prompt_tokens=1,
                completion_tokens=0,
                attempts=3,
                reason="POISON_REQUEST",
                died_at_ms=1,
            )
            for tenant in ("acme", "globex")
        ]


@pytest.fixture
def service() -> ClusterService:
    """The service of a router with two tenants' jobs."""
    cell = SimpleNamespace(queue=SimpleNamespace(dead=DeadJobs()))
    models: Any = SimpleNamespace(served=[None], reached=lambda model: [cell])
    dispatcher: Any = SimpleNamespace(jobs=[routed("acme"), routed("globex")])
    unused: Any = None
    return ClusterService(models, dispatcher, RouterMetrics(), *[unused] * 4)


@pytest.mark.parametrize(
    ("role", "tenant", "seen"),
    [
        (Role.TENANT_USER, "acme", {"acme"}),
        (Role.TENANT_ADMIN, "globex", {"globex"}),
        (Role.TENANT_USER, "initech", set()),
        (Role.OPERATOR, "", {"acme", "globex"}),
        (Role.AUDITOR, "", {"acme", "globex"}),
    ],
)
async def test_lists_show_what_the_caller_may_see(
    service: ClusterService, role: Role, tenant: str, seen: set[str]
) -> None:
    set_caller(Principal("one", frozenset({role}), CredentialKind.API_KEY, tenant))
    context: Any = None
    jobs = await service.ListJobs(pb.ListJobsRequest(), context)
    dead = await service.ListDeadJobs(pb.ListDeadJobsRequest(), context)
    assert {job.tenant for job in jobs.jobs} == {job.tenant for job in dead.jobs} == seen
