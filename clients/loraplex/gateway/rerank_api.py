"""Documents by how well they fit a query: Cohere's paths, whose shapes are Jina's and vLLM's too, and vLLM's scores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Required

from typing_extensions import TypedDict

from loraplex.gateway.bodies import Body
from loraplex.gateway.endpoint import HttpCall
from loraplex.gateway.errors import HttpError, invalid
from loraplex.gateway.openai_api import PROTOCOL as OPENAI
from loraplex_client import DocumentScore, Ranking


class TextDocument(TypedDict, total=False):
    """A document as an object; its other fields do not matter."""

    text: Required[str]


class RerankRequest(TypedDict, total=False):
    """Body of a request to /v1/rerank or /v2/rerank; from `instruction` on beyond Cohere's."""

    model: Required[str]
    query: Required[str]
    documents: Required[list[str | TextDocument]]
    top_n: int | None
    return_documents: bool | None
    rank_fields: list[Literal["text"]] | None
    max_tokens_per_doc: int | None
    instruction: str | None
    truncate: bool | None
    use_activation: bool | None
    yes: str | None
    no: str | None


class ScoreRequest(TypedDict, total=False):
    """Body of a request to /v1/score: vLLM's two texts, or queries and documents, one to one or one to many."""

    model: Required[str]
    text_1: str | list[str] | None
    text_2: str | list[str] | None
    queries: str | list[str] | None
    documents: str | list[str] | None
    instruction: str | None
    truncate: bool | None
    use_activation: bool | None
    yes: str | None
    no: str | None


RERANK = Body(RerankRequest, [TextDocument])
SCORE = Body(ScoreRequest)


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer: OpenAI's, with the message where Cohere's clients look for it."""
    told: Any = OPENAI.error(error)
    return {"message": told["error"]["message"], **told}


PROTOCOL = replace(OPENAI, error=error_of)


async def _ranked(
    call: HttpCall, request: Mapping[str, Any], query: str | Sequence[str], documents: Sequence[str]
) -> Ranking:
    """Return the scores of documents by a model or an adapter."""
    named = await call.named(request["model"])
    options = {name: request.get(name) for name in ("top_n", "instruction", "truncate", "yes", "no")}
    for name in ("top_n", "max_tokens_per_doc"):
        if (number := request.get(name)) is not None and not 1 <= number < 1 << 32:
            raise invalid(name, f"{number}; at least 1")
    options["max_document_tokens"] = request.get("max_tokens_per_doc")
    answer: Ranking = await call.caller.rerank(query, documents, timeout_s=call.timeout_s, **options, **named)
    call.exchange.rate_limits = answer.rate_limits
    return answer


def _told(request: Mapping[str, Any], one: DocumentScore) -> float:
    """Return a score, or its logit where the request wants no activation."""
    return one.logit if request.get("use_activation") is False else one.score


def _usage(answer: Ranking) -> dict[str, Any]:
    tokens = answer.usage.prompt_tokens
    details = {"cached_tokens": answer.usage.cached_tokens}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}


async def _rerank(call: HttpCall, api_version: str, returns_documents: bool) -> None:
    request = await call.read(RERANK)
    texts = [one if isinstance(one, str) else one["text"] for one in request["documents"]]
    answer = await _ranked(call, request, request["query"], texts)
    results: list[dict[str, Any]] = [
        {"index": one.index, "relevance_score": _told(request, one)} for one in answer.results
    ]
    if request.get("return_documents", returns_documents):
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    tokens = answer.usage.prompt_tokens
    meta = {"api_version": {"version": api_version}, "billed_units": {"input_tokens": tokens}}
    body = {"id": answer.request_id, "model": request["model"], "results": results, "meta": meta}
    await call.exchange.answer({**body, "usage": _usage(answer)})


async def rerank_v1(call: HttpCall) -> None:
    """Answer with documents by how well they fit a query. Raises HttpError, LoraplexError."""
    await _rerank(call, "1", returns_documents=True)


async def rerank_v2(call: HttpCall) -> None:
    """Answer with the indices of documents by how well they fit a query. Raises HttpError, LoraplexError."""
    await _rerank(call, "2", returns_documents=False)


def _pairs(request: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str], tuple[str, str]]:
    """Return as many queries as documents, or one query, the documents, and the two fields' names. Raises HttpError."""
    given = [name for name in ("text_1", "text_2", "queries", "documents") if request.get(name) is not None]
    if given == ["queries", "documents"]:
        names = ("queries", "documents")
    elif given == ["text_1", "text_2"]:
        names = ("text_1", "text_2")
    else:
        raise invalid("text_1", "give text_1 and text_2, or queries and documents")
    first, second = ([value] if isinstance(value := request[name], str) else value for name in names)
    if len(first) != 1 and len(first) != len(second):
        raise invalid(names[0], f"{len(first)} texts for {len(second)}; give one, or one for each of {names[1]}")
    return first, second, names


async def score(call: HttpCall) -> None:
    """Answer with how well texts fit others, one to one or one to many. Raises HttpError, LoraplexError."""
    request = await call.read(SCORE)
    queries, documents, (first, second) = _pairs(request)
    call.exchange.names = {r"query\b|queries": first, "documents": second}
    answer = await _ranked(call, request, queries[0] if len(queries) == 1 else queries, documents)
    results = sorted(answer.results, key=lambda one: one.index)
    data = [{"index": one.index, "object": "score", "score": _told(request, one)} for one in results]
    body = {"id": answer.request_id, "object": "list", "created": int(time.time()), "model": request["model"]}
    await call.exchange.answer({**body, "data": data, "usage": _usage(answer)})
