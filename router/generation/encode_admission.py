"""Admission of requests for vectors: each input becomes a job, all of one revision of the adapter."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from artifacts.encode import Encode
from broker.messages import AdapterRef, Job, StoppingParams
from router.catalog.adapters import check_rank, resolve_adapters
from router.catalog.classifiers import Classifier, Classifiers
from router.catalog.models import Models, ServedModel
from router.catalog.store_client import StoreClient
from router.dispatch.reach import RelayReach
from router.encode_request import EncodeRequest
from router.generation.admission import check_ids, workers_for_new_jobs
from router.text.prompt_encoder import PromptEncoder
from rpc.errors import InvalidField, Unavailable


@dataclass(frozen=True, slots=True)
class AdmittedInputs:
    """The jobs of a request's inputs, in order, and the classifier whose logits they ask for, if they do."""

    jobs: tuple[Job, ...]
    classifier: Classifier


class EncodeAdmission:
    """Makes the jobs of one router's requests for vectors; workers reach the router at `reply_to`."""

    def __init__(
        self, models: Models, store: StoreClient, reply_to: str, reach: RelayReach, encoder: PromptEncoder
    ) -> None:
        self._models = models
        self._store = store
        self._reply_to = reply_to
        self._reach = reach
        self._encoder = encoder
        self.classifiers = Classifiers(store)

    async def admit(self, request: EncodeRequest) -> AdmittedInputs:
        """Make the jobs of a request. Raises a CallError where any input can't be served."""
        model = self._models.get(request.model)
        manifest = model.manifest
        adapter = await resolve_adapters(request, manifest, self._store)
        classifier = await self.classifiers.check_task(request, manifest, adapter)
        workers = workers_for_new_jobs(self._models, self._reach, manifest)
        if not all(state.encodes for state in workers):
            raise Unavailable("a worker of a version without vectors is still there", reason="OLD_WORKER")
        check_rank(adapter, max(state.max_rank for state in workers))
        limit = min(manifest.context_length, max(state.max_tokens for state in workers))
        encoded = await self._encoder.encode_inputs(model.text, request, limit)
        for (ids, _), field in zip(encoded, request.fields, strict=True):
            if not ids:
                raise InvalidField(field, "has no tokens")
            check_ids(field, ids, manifest.vocab_size)
        request_id = request.request_id or secrets.token_hex(8)
        return AdmittedInputs(self._jobs(request, request_id, model, adapter, encoded), classifier)

    def _jobs(
        self,
        request: EncodeRequest,
        request_id: str,
        model: ServedModel,
        adapter: AdapterRef | None,
        encoded: Sequence[tuple[tuple[int, ...], int]],
    ) -> tuple[Job, ...]:
        # New with every call: messages about an older call of this request id must not reach these jobs.
        call = f"{request.tenant}/{request_id}/{secrets.token_hex(6)}"
        return tuple(
            Job(
                job_id=f"{call}.{index}",
                request_id=request_id,
                tenant=request.tenant,
                model=model.manifest.name,
                base_digest=model.manifest.digest,
                reply_to=self._reply_to,
                adapter=adapter,
                prompt_ids=ids,
                stopping=StoppingParams(max_tokens=0),
                seed=0,
                priority=request.priority,
                traceparent=request.traceparent,
                encode=Encode(request.task, request.pooling, pair_tokens),
            )
            for index, (ids, pair_tokens) in enumerate(encoded)
        )
