"""Sends calls of Embed and Classify, each with several texts, and records how many were answered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import loraplex_client as lx

from clients.loadtest.grpc_sender import GrpcSender
from clients.loadtest.plan import Plan
from clients.loadtest.samples import Outcome
from clients.loadtest.sender import Call
from clients.loadtest.workload import Request, Workload


class EncodeSender(GrpcSender):
    """Sends a workload's calls. The answer is one message, which comes with the last text's vector."""

    def __init__(self, router: str, workload: Workload, pool: Sequence[int], plan: Plan) -> None:
        super().__init__(router, workload, pool, plan)
        self._task = plan.task
        self._texts = plan.texts

    def prepare(self, request: Request) -> Call:
        """Build what sends a call and reads its answer, before it is due."""
        texts = self._workload.texts(request, self._pool, self._texts)
        options = lx.EncodeOptions(
            adapter_id=None if request.adapter is None else self._workload.adapters[request.adapter][1],
            model=self._model,
        )
        return partial(self._encode, request, texts, options)

    async def _encode(
        self, request: Request, texts: Sequence[str | list[int]], options: lx.EncodeOptions, outcome: Outcome
    ) -> None:
        client, timeout_s = self._clients[request.tenant], request.deadline_s or self._timeout_s
        found: lx.Embeddings | lx.Classifications
        if self._task == "embed":
            found = await client.embed(texts, timeout_s=timeout_s, **options)
            outcome.texts = len(found.vectors)
        else:
            found = await client.classify(texts, timeout_s=timeout_s, **options)
            outcome.texts = len(found.classifications)
        outcome.first_s = outcome.last_s = self.now_s()
        outcome.messages = 1
        outcome.prompt_tokens = found.usage.prompt_tokens
        outcome.cached_tokens = found.usage.cached_tokens
        outcome.queue_s = found.timings.queue_s
        outcome.adapter_s = found.timings.adapter_s
        outcome.server_ttft_s = found.timings.ttft_s
        outcome.continuations = found.continuations
