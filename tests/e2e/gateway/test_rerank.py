"""Documents over HTTP and gRPC: all paths tell what the SDK's call does, and name what is wrong with a document."""

from __future__ import annotations

import json
from math import exp
from typing import Any

import pytest

from loraplex_client import AsyncClient, InvalidRequestError, LoraplexError, NotFoundError, Ranking
from tests.accounts import account_of
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import Eventually
from tests.e2e.gateway.test_adapters import ask
from tests.plans_file import set_plans

pytestmark = pytest.mark.asyncio(loop_scope="package")
# Of the hash model a byte is a token.
ANSWERS: Any = {"yes": "y", "no": "n"}
QUERY, DOCUMENTS = "Where is Paris? " * 20, [f"{number} documents tell of Paris." for number in range(12)]
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


async def post(cluster: Cluster, path: str, **body: Any) -> tuple[int, Any]:
    return await ask(cluster, "POST", path, json.dumps(body).encode(), "application/json")


async def true_logit(
    cluster: Cluster, document: str, adapter: str | None, query: str = QUERY, instruction: str = SEARCH
) -> float:
    """The log odds of y against n as Generate tells them, behind the prompt as the template writes it."""
    prompt = f"system: {JUDGE}\nuser: <Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}\nassistant: "
    answer = await cluster.client.generate(prompt, adapter_id=adapter, max_tokens=1, logprob_token_ids=[*b"yn"])
    (_, yes), (_, no) = answer.choices[0].logprobs[0].alternatives
    return yes - no


async def test_every_path_tells_the_scores_of_the_models_answers(cluster: Cluster, eventually: Eventually) -> None:
    own = await cluster.client.rerank(QUERY, DOCUMENTS, adapter_id="a", **ANSWERS)
    logits = [await true_logit(cluster, document, "a") for document in DOCUMENTS]
    assert len(set(logits)) == 2, "the documents matter"
    best = sorted(range(len(DOCUMENTS)), key=lambda index: (-logits[index], index))
    assert [(one.index, one.logit) for one in own.results] == [(index, logits[index]) for index in best]
    assert [one.score for one in own.results] == pytest.approx([1 / (1 + exp(-one.logit)) for one in own.results])
    assert own.usage.cached_tokens > 11 * len(QUERY), "the documents share the query"
    assert own.usage.completion_tokens == 0
    assert own.adapter_revision.rpartition("/")[2] == cluster.digests["a"]
    scores = {one.index: one.score for one in own.results}
    body: dict[str, Any] = {"model": "a", "query": QUERY, "documents": DOCUMENTS, **ANSWERS}
    for path, version in (("/v1/rerank", "1"), ("/v2/rerank", "2")):
        status, answer = await post(cluster, path, **body, top_n=3)
        assert status == 200, answer
        documents = [{"document": {"text": DOCUMENTS[index]}} if version == "1" else {} for index in best[:3]]
        assert answer["results"] == [
            {"index": index, "relevance_score": scores[index], **document}
            for index, document in zip(best, documents, strict=False)
        ]
        assert answer["meta"]["api_version"] == {"version": version}
        assert answer["meta"]["billed_units"] == {"input_tokens": own.usage.prompt_tokens}
        assert answer["usage"]["total_tokens"] == own.usage.prompt_tokens
    objects = [{"text": text, "title": "ignored"} for text in DOCUMENTS]
    status, answer = await post(cluster, "/v2/rerank", **body | {"documents": objects}, return_documents=True)
    assert [one["document"] for one in answer["results"]] == [{"text": DOCUMENTS[index]} for index in best]
    status, answer = await post(cluster, "/v1/rerank", **body, use_activation=False, return_documents=False)
    assert answer["results"] == [{"index": index, "relevance_score": logits[index]} for index in best]
    for texts in ({"text_1": QUERY, "text_2": DOCUMENTS}, {"queries": [QUERY], "documents": DOCUMENTS}):
        status, answer = await post(cluster, "/v1/score", model="a", **texts, **ANSWERS)
        assert status == 200, answer
        assert answer["data"] == [
            {"index": index, "object": "score", "score": scores[index]} for index in range(len(DOCUMENTS))
        ]
    await eventually(cluster.idle)


async def test_pairs_instructions_and_sets_are_scored_as_they_are_asked(cluster: Cluster) -> None:
    queries, documents = ["one", "two"], ["first", "second"]
    pairs = await cluster.client.rerank(queries, documents, **ANSWERS)
    wanted = [await true_logit(cluster, text, None, query) for query, text in zip(queries, documents, strict=True)]
    assert [(one.index, one.logit) for one in pairs.results] == [*enumerate(wanted)]
    status, answer = await post(cluster, "/v1/score", model="hash", text_1=queries, text_2=documents, **ANSWERS)
    assert (status, [one["score"] for one in answer["data"]]) == (200, [one.score for one in pairs.results])
    asked = await cluster.client.rerank("q", ["d"], instruction="Find it.", **ANSWERS)
    assert asked.results[0].logit == await true_logit(cluster, "d", None, "q", "Find it.")
    both = await cluster.client.rerank("q", ["d"], adapters={"a": 0.5, "b": 0.5}, **ANSWERS)
    assert [weight for _, weight in both.adapters] == [0.5, 0.5]
    cut = await cluster.client.rerank("q", ["document", "d"], max_document_tokens=1, **ANSWERS)
    assert cut.results[0].logit == cut.results[1].logit == await true_logit(cluster, "d", None, "q")


async def test_a_call_counts_once_and_its_prompts_are_charged(cluster: Cluster, eventually: Eventually) -> None:
    await set_plans(cluster.local.store, "[tenants.reranks]\nrequests_per_minute = 60\n")
    async with AsyncClient(cluster.local.router, "reranks") as client:

        async def ask() -> Ranking:
            return await client.rerank("query", ["a", "b", "c"], **ANSWERS)

        async def is_limited() -> bool:
            return bool((await ask()).rate_limits)

        await eventually(is_limited)  # the router has read the plan
        before = await account_of(cluster.redis, "reranks")
        ranking = await ask()
        after = await account_of(cluster.redis, "reranks")
    # Prices may be those of another test.
    counts = {name: count - before[name] for name, count in after.items() if not name.endswith("_cost")}
    changed = {name: count for name, count in counts.items() if count}
    limit = ranking.rate_limits["requests"]
    assert (limit.limit, limit.remaining < 60) == (60, True)
    tokens = ranking.usage.prompt_tokens
    assert changed == {"requests": 1, "input_tokens": tokens, "day_tokens": tokens, "month_tokens": tokens}
    await eventually(cluster.idle)


async def test_a_document_that_is_cut_fills_the_context(cluster: Cluster) -> None:
    long = "ab" * 20_000
    with pytest.raises(InvalidRequestError, match="maximum context length is 32768 tokens; the document") as refused:
        await cluster.client.rerank("q", ["fits", long], **ANSWERS)
    assert (refused.value.field, refused.value.reason) == ("documents[1]", "CONTEXT_EXCEEDED")
    for truncate in (False, True):
        with pytest.raises(InvalidRequestError, match="query: This model's maximum context length"):
            await cluster.client.rerank(long, ["fits"], truncate=truncate, **ANSWERS)
    cut = await cluster.client.rerank("q", [long], truncate=True, **ANSWERS)
    assert cut.usage.prompt_tokens == 32_767
    status, answer = await post(cluster, "/v1/score", model="hash", text_1="q", text_2=["fits", long], **ANSWERS)
    assert (status, answer["error"]["param"]) == (400, "text_2[1]")


async def test_bad_calls_are_refused_by_their_field_and_nothing_is_queued(
    cluster: Cluster, eventually: Eventually
) -> None:
    await eventually(cluster.idle)
    cases: list[tuple[Any, list[str], dict[str, Any], type[LoraplexError], str]] = [
        ("q", [], {}, InvalidRequestError, "documents: 0 documents; give 1 to 1000"),
        ("q", ["d"] * 1_001, {}, InvalidRequestError, "documents: 1001 documents"),
        (" ", ["d"], {}, InvalidRequestError, "query: is empty"),
        ("q", ["d", " "], {}, InvalidRequestError, r"documents\[1\]: is empty"),
        (
            "q" * 100_000,
            ["d"] * 200,
            {},
            InvalidRequestError,
            r"documents\[83\]: the documents up to this one.* 8388608",
        ),
        ("q", ["d"], {"top_n": 0}, InvalidRequestError, "top_n: 0; at least 1"),
        (["q"], ["d", "e"], {}, InvalidRequestError, "queries: 1 queries for 2 documents"),
        (["q", ""], ["d", "e"], {}, InvalidRequestError, r"queries\[1\]: is empty"),
        (["q"], ["d"], {"top_n": 1}, InvalidRequestError, "top_n: ranks the documents of one query"),
        ("q", ["d"], {}, InvalidRequestError, "yes: 'yes' is 3 tokens of hash; name an answer of one token in yes"),
        ("q", ["d"], {"yes": "y"}, InvalidRequestError, "no: give both answers"),
        ("q", ["d"], {"priority": 101}, InvalidRequestError, "priority"),
        ("q", ["d"], {"request_id": "x" * 129}, InvalidRequestError, "request_id"),
        ("q", ["d"], {"adapter_id": "nobody", **ANSWERS}, NotFoundError, "nobody"),
        ("q", ["d"], {"model": "other"}, NotFoundError, "other"),
    ]
    for query, documents, options, error, names in cases:
        with pytest.raises(error, match=names):
            await cluster.client.rerank(query, documents, **options)
    assert await cluster.idle()
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v2/rerank", {"documents": ["d"]}, "query"),
        ("/v2/rerank", {"query": "q", "documents": ["d", 1]}, "documents[1]"),
        ("/v2/rerank", {"query": "q", "documents": ["d", {"title": "x"}]}, "documents[1].text"),
        ("/v2/rerank", {"query": "q", "documents": ["d"], "top_n": 0}, "top_n"),
        ("/v2/rerank", {"query": "q", "documents": ["d"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/score", {"text_1": "q"}, "text_1"),
        ("/v1/score", {"text_1": "q", "documents": ["d"]}, "text_1"),
        ("/v1/score", {"queries": ["q", "r"], "documents": ["d"]}, "queries"),
        ("/v1/score", {"text_1": ["q", ""], "text_2": ["d", "e"]}, "text_1[1]"),
    ]
    for path, body, param in bodies:
        status, answer = await post(cluster, path, model="hash", **body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert answer["message"] == answer["error"]["message"]
