"""Calls that score documents: how well each fits a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call, Script
from loraplex_client.connection import method
from loraplex_client.errors import InvalidRequestError, RateLimit, rate_limits_in
from loraplex_client.generation import Usage
from loraplex_client.options import fill, with_keywords


class RerankOptions(TypedDict, total=False):
    """The keywords of `rerank`; those of GenerateOptions mean the same. None is the default."""

    adapter_id: str | None
    adapters: Mapping[str, float] | Sequence[tuple[str, float]] | None
    model: str | None
    request_id: str | None
    priority: int | None
    session_id: str | None
    # what a document has to do for a query, for models with a prompt
    instruction: str | None
    # answers of a decoder whose probabilities are compared, each of one token
    yes: str | None
    no: str | None
    # cuts documents that are longer than the model takes, which are refused otherwise
    truncate: bool | None
    # cuts each document to its first so many tokens
    max_document_tokens: int | None


@dataclass(frozen=True)
class DocumentScore:
    """How well the document with this index fits: `score` from 0 to 1 is the logistic function of `logit`."""

    index: int
    score: float
    logit: float


@dataclass(frozen=True)
class Ranking:
    """The scores of a call, the best first; in the documents' order with a query for each. See Generation."""

    results: tuple[DocumentScore, ...]
    usage: Usage
    adapter_revision: str
    request_id: str
    adapters: tuple[tuple[str, float], ...] = ()
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)


class RerankingCalls:
    """The methods of clients that score documents."""

    @method
    @with_keywords(RerankOptions)
    def rerank(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RerankOptions],
    ) -> Script[Ranking]:
        """Return the `top_n` best documents for a query with their scores, or all. Raises LoraplexError.

        A sequence of queries has one for each document, whose results stay in the documents' order.
        """
        if isinstance(documents, str):
            raise InvalidRequestError("documents: give a list of texts", field="documents")
        request = inference_pb2.RerankRequest()
        values: dict[str, Any] = {"documents": documents, "top_n": top_n}
        values |= {"query": query} if isinstance(query, str) else {"queries": query}
        fill(request, values)
        fill(request, options, (*RerankOptions.__annotations__, "top_n", "timeout_s"))
        told: list[Any] = []
        response = yield Call("Rerank", request, timeout_s=timeout_s, hear=told.extend)
        return Ranking(
            results=tuple(DocumentScore(one.index, one.score, one.logit) for one in response.results),
            usage=Usage(response.usage.prompt_tokens, response.usage.cached_tokens, response.usage.completion_tokens),
            adapter_revision=response.adapter_revision,
            request_id=response.request_id,
            adapters=tuple((part.adapter, part.weight) for part in response.adapters),
            rate_limits=rate_limits_in(told),
        )
