"""Data that one router has of a tenant: calls, names and settings of adapters, and caches of texts."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.relay.v1 import relay_pb2 as pb

from broker.pins import is_of_tenant
from router.api.formats import forget_formats
from router.catalog.adapter_settings import AdapterConfigs
from router.catalog.fitness import forget_warnings
from router.catalog.store_client import StoreClient
from router.dispatch.dispatcher import Dispatcher
from router.generation.grammar_proofs import GrammarProofs
from router.generation.tool_grammar import forget_tools
from router.quotas.quotas import Quotas
from router.text.prompt_encoder import PromptEncoder
from rpc.errors import CallError, NotFound, PermissionDenied


class RouterData:
    """The tenants' data of one router."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        store: StoreClient,
        settings: Sequence[AdapterConfigs],
        encoder: PromptEncoder,
        proofs: GrammarProofs,
        quotas: Quotas,
    ) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._settings = settings
        self._encoder = encoder
        self._proofs = proofs
        self._quotas = quotas

    async def forget(self, tenant: str) -> list[pb.Removal]:
        """End a tenant's calls, and those with its adapters, and remove what is kept of it; by place."""
        ended, open_jobs = self._end_jobs(tenant)
        names = self._store.forget_tenant(tenant)
        settings = sum(configs.forget_tenant(tenant) for configs in self._settings)
        forget_warnings()
        texts = forget_formats() + forget_tools() + self._proofs.forget() + self._encoder.forget()
        await self._quotas.forget_tenant()
        return [
            pb.Removal(place="jobs", removed=ended, left=open_jobs),
            pb.Removal(place="names of adapters", removed=names),
            pb.Removal(place="settings of adapters", removed=settings),
            pb.Removal(place="templates and formats", removed=texts, of_all_tenants=True),
        ]

    def _end_jobs(self, tenant: str) -> tuple[int, int]:
        """Fail jobs; returns how many, and how many are still there, until their calls have ended."""
        failed = open_jobs = 0
        for routed in self._dispatcher.jobs:
            error: CallError | None = None
            if routed.job.tenant == tenant:
                error = PermissionDenied(f"tenant {tenant} was purged", "TENANT_PURGED")
            elif routed.job.adapter is not None:
                parts = (part.revision for part in routed.job.adapter.summands)
                gone = next((revision for revision in parts if is_of_tenant(revision, tenant)), None)
                error = NotFound("adapter", gone) if gone is not None else None
            if error is None:
                continue
            open_jobs += 1
            if not routed.ended:
                routed.fail(error)
                failed += 1
                if routed.link is not None:  # else its worker would go on until its next frame is refused
                    routed.link.cancel(routed.job.job_id, routed.job.attempt)
        return failed, open_jobs
