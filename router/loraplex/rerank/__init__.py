"""Rerank: how well documents fit a query, by a decoder's answer yes or no, or by a classification head.

    query + document ──▶ prompt ids ──▶ log probabilities of yes and no at the first position of an answer: their
                    │                   difference is the logit
                    └─▶ the pair ──▶ the logit of a head with one label, an encoder's or an adapter's

The score is the logistic function of the logit. Of a decoder's prompts the first runs alone, so that the others find
the query in the prefix cache, then TEXTS_AT_ONCE of them at once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.decisions import first_logprobs
from loraplex.rerank.prompts import Document, Prompts, answer_ids, pair_of
from loraplex.router.api.convert import read_request
from loraplex.router.api.encoding import logistic
from loraplex.router.api.request_telemetry import RequestRecord
from loraplex.router.api.service import InferenceService
from loraplex.router.catalog.adapters import find_classifier
from loraplex.router.catalog.models import ServedModel
from loraplex.router.generation.unary_calls import (
    TEXTS_AT_ONCE,
    Vector,
    countdown,
    run_some_at_once,
    total_of,
    with_revision,
)
from loraplex.router.quotas.quotas import CallBudget, Facts, rates_of
from loraplex.router.request import EncodeInput, EncodeRequest, Request, Summary
from loraplex.runtime.rpc.errors import InvalidField, Mismatch

# Maximum documents of a call, and maximum bytes of all documents, each with its query and the instruction, of which a
# router keeps prompts.
DOCUMENTS, TEXT_BYTES = 1_000, 8 * 1024 * 1024


def read_documents(request: pb.RerankRequest) -> list[Document]:
    """Return a request's documents. Raises InvalidField."""
    count = len(request.documents)
    if not 1 <= count <= DOCUMENTS:
        raise InvalidField("documents", f"{count} documents; give 1 to {DOCUMENTS}")
    if request.HasField("top_n") and request.top_n < 1:
        raise InvalidField("top_n", f"{request.top_n}; at least 1")
    if request.queries:
        _check_queries(request)
    elif not request.query.strip():
        raise InvalidField("query", "is empty")
    size, documents, instruction = 0, list[Document](), len(request.instruction.encode())
    for index, text in enumerate(request.documents):
        query, query_field = (
            (request.queries[index], f"queries[{index}]") if request.queries else (request.query, "query")
        )
        if not text.strip():
            raise InvalidField(f"documents[{index}]", "is empty")
        size += len(query.encode()) + len(text.encode()) + instruction
        if size > TEXT_BYTES:
            what = "the documents up to this one, each with its query and the instruction,"
            raise InvalidField(f"documents[{index}]", f"{what} have {size} bytes; at most {TEXT_BYTES}")
        documents.append(Document(query, text, f"documents[{index}]", query_field))
    return documents


def _check_queries(request: pb.RerankRequest) -> None:
    """Raise InvalidField where there is not one query for each document."""
    if request.query:
        raise InvalidField("queries", "give either query or queries")
    if request.HasField("top_n"):
        raise InvalidField("top_n", "ranks the documents of one query; leave it unset with queries")
    queries, documents = len(request.queries), len(request.documents)
    if queries != documents:
        raise InvalidField("queries", f"{queries} queries for {documents} documents; give one for each document")
    for index, query in enumerate(request.queries):
        if not query.strip():
            raise InvalidField(f"queries[{index}]", "is empty")


class _Call:
    """Scores the documents of one call, within its deadline."""

    def __init__(
        self, service: InferenceService, request: pb.RerankRequest, record: RequestRecord, deadline_s: float | None
    ) -> None:
        self._service, self._message, self._record = service, request, record
        self._left_s = countdown(deadline_s)
        self._documents = read_documents(request)
        self._request = self._read()

    def _read(self) -> Request:
        """Return the call as a request whose prompt is its query."""
        message = self._message
        spec = pb.GenerateSpec(
            request_id=message.request_id or secrets.token_hex(8),
            model=message.model,
            adapter=message.adapter,
            adapters=message.adapters,
            prompt=self._documents[0].query,
            priority=message.priority,
            session_id=message.session_id,
        )
        read = read_request(spec, self._record.tenant)
        fingerprint = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
        read = replace(
            read,
            prompt_field=self._documents[0].query_field,
            session_id=read.session_id or read.request_id,  # all parts are on one side of a rollout
            fingerprint=fingerprint,
        )
        return self._record.begin(read)

    async def score(self) -> tuple[list[float], Summary]:
        """Return each document's logit, and the summary of all. Raises a CallError."""
        service, request, message = self._service, self._request, self._message
        admission = service.admission
        texts = [*message.queries[1:], *message.documents, *([message.instruction] if message.instruction else [])]
        await service.generation.check_prompt(request, texts)
        model, adapter, context = await admission.adapted(request, await admission.side_of(request))
        prompts = Prompts(service.prompts, model, request.tenant, context, message.instruction)
        if message.max_document_tokens:
            self._documents = [await prompts.cut(one, message.max_document_tokens) for one in self._documents]
        settings = await admission.configs.of(request.tenant, adapter)
        if settings.has_head or "generate" not in model.manifest.tasks:
            return await self._by_head(model, prompts)
        answers = answer_ids(model, message.yes, message.no)
        prompt_ids = [await prompts.ids(one, room=1, truncate=message.truncate) for one in self._documents]
        revision = adapter.revision if adapter else ""
        facts = Facts(request_id=request.request_id, model=model.manifest.name, adapter_revision=revision)
        async with service.generation.reserved(request.tenant, facts, sum(map(len, prompt_ids))) as budget:
            first = await self._by_answer(request, 0, prompt_ids[0], answers, budget)
            pinned = with_revision(request, first[1])
            others = [
                partial(self._by_answer, pinned, index, ids, answers, budget)
                for index, ids in enumerate(prompt_ids[1:], 1)
            ]
            scored = [first, *await run_some_at_once(others, TEXTS_AT_ONCE)]
        summary = total_of(request.request_id, [summary for _, summary in scored])
        return [logit for logit, _ in scored], replace(summary, rate_limits=rates_of(budget))

    async def _by_answer(
        self, request: Request, index: int, ids: tuple[int, ...], answers: tuple[int, int], budget: CallBudget | None
    ) -> tuple[float, Summary]:
        """Return the log odds of the answer yes against no."""
        field = self._documents[index].field
        part = replace(request, request_id=f"{request.request_id}.{index}", prompt_field=field)
        (yes, no), summary = await first_logprobs(self._service, part, ids, answers, self._left_s(), budget)
        return yes - no, summary

    async def _by_head(self, model: ServedModel, prompts: Prompts) -> tuple[list[float], Summary]:
        """Return the logits of a head with one label."""
        message, request = self._message, self._request
        name = message.adapter or model.manifest.name
        for field in ("yes", "no"):
            if getattr(message, field):
                raise InvalidField(field, f"{name} scores by its classification head, not by an answer; leave it unset")
        if message.instruction and not prompts.renders:
            raise InvalidField("instruction", f"{name} has no template that takes one; leave it unset")
        if message.adapters:
            raise InvalidField(
                "adapters", "a sum of adapters has no classification head; give one adapter in `adapter`"
            )
        texts: Sequence[EncodeInput] = [pair_of(one) for one in self._documents]
        if prompts.renders:
            texts = [await prompts.ids(one, room=0, truncate=message.truncate) for one in self._documents]
        call = EncodeRequest(
            request.tenant,
            "classify",
            tuple(texts),
            tuple(one.field for one in self._documents),
            request_id=request.request_id,
            model=request.model,
            adapter=request.adapter,
            truncate=message.truncate,
            priority=request.priority,
            traceparent=request.traceparent,
        )
        adapter = (await self._service.admission.adapted(call))[1]
        classifier = await find_classifier(call, model.manifest, adapter, self._service.admission.configs)
        if len(classifier.labels) > 1:
            raise _not_a_reranker(name, len(classifier.labels))
        return await self._service.unary_calls.encode(call, self._left_s(), partial(_logit, name))


def _logit(name: str, vector: Vector) -> float:
    if len(vector.values) != 1:  # a head whose adapter does not name its labels
        raise _not_a_reranker(name, len(vector.values))
    return vector.values[0]


def _not_a_reranker(name: str, labels: int) -> Mismatch:
    message = f"its classification head has {labels} labels; a reranker's has one"
    return Mismatch(name, message, reason="NO_RERANKER")


async def rerank(
    service: InferenceService, request: pb.RerankRequest, record: RequestRecord, deadline_s: float | None
) -> tuple[pb.RerankResponse, Summary]:
    """Return the scores of a request's documents and the summary of all. Raises a CallError."""
    logits, summary = await _Call(service, request, record, deadline_s).score()
    record.count_texts("rerank", len(logits), summary)
    results = [pb.DocumentScore(index=index, score=logistic(one), logit=one) for index, one in enumerate(logits)]
    if not request.queries:
        results.sort(key=lambda result: (-result.logit, result.index))
    response = pb.RerankResponse(
        results=results[: request.top_n] if request.HasField("top_n") else results,
        adapter_revision=summary.adapter_revision,
        adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in summary.adapters],
        usage=pb.Usage(prompt_tokens=summary.prompt_tokens, cached_tokens=summary.cached_tokens),
        request_id=summary.request_id,
    )
    return response, summary
