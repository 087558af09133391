"""Cohere's package: its two clients rerank."""

from __future__ import annotations

from typing import Any

import cohere
from cohere.errors import BadRequestError

from tests.trials.libraries.scenarios import KEY, MODEL, QUESTION, TOO_LONG, URL, check_refused, run

old = cohere.Client(api_key=KEY, base_url=URL)
new = cohere.ClientV2(api_key=KEY, base_url=URL)
DOCUMENTS = ["It rains in Oslo.", "Paris is a city.", "Bread is baked."]
# Answers that are a token of any model here; those of a reranker are the model's own.
OPTIONS: Any = {"additional_body_parameters": {"yes": "A", "no": "B"}}


def check(results: Any) -> list[int]:
    """Assert that results come from the best to the worst; return their indices."""
    scores = [one.relevance_score for one in results]
    assert scores == sorted(scores, reverse=True), scores
    assert all(0 <= score <= 1 for score in scores), scores
    return [one.index for one in results]


def rerank_v1() -> None:
    """Get documents with their texts, all and the best alone."""
    asked: dict[str, Any] = {"model": MODEL, "query": QUESTION, "request_options": OPTIONS}
    whole = old.rerank(documents=DOCUMENTS, return_documents=True, **asked).results
    assert sorted(check(whole)) == [0, 1, 2]
    assert all(one.document and one.document.text == DOCUMENTS[one.index] for one in whole), whole
    objects: Any = [{"text": text, "title": "none"} for text in DOCUMENTS]
    best = old.rerank(documents=objects, top_n=1, rank_fields=["text"], **asked).results
    assert check(best) == check(whole)[:1]


def rerank_v2() -> None:
    """Get indices, what was billed, and the scores of documents that are cut."""
    asked: dict[str, Any] = {"model": MODEL, "query": QUESTION, "request_options": OPTIONS}
    answer = new.rerank(documents=DOCUMENTS, **asked)
    assert sorted(check(answer.results)) == [0, 1, 2]
    assert answer.meta, answer
    assert answer.meta.billed_units, answer
    assert answer.meta.billed_units.input_tokens, answer
    cut = new.rerank(documents=[TOO_LONG, "word word"], max_tokens_per_doc=2, **asked).results
    assert len(check(cut)) == 2


def overflow() -> None:
    """Get the error for a document that is too long."""
    refused = check_refused(
        lambda: new.rerank(model=MODEL, query=QUESTION, documents=["x", TOO_LONG], request_options=OPTIONS),
        BadRequestError,
    )
    assert "documents[1]" in str(refused), refused


if __name__ == "__main__":
    run(rerank_v1, rerank_v2, overflow)
