"""The ids of a reranker's answers: the caller's, those of the model's files, or yes and no."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.rerank.prompts import answer_ids, has_roles
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import HashTokenizer, ModelTokenizer
from loraplex.runtime.rpc.errors import InvalidField, Mismatch


def served(tokenizer: ModelTokenizer, logit_score: Any = None) -> Any:
    files = {} if logit_score is None else {"logit_score.json": json.dumps(logit_score).encode()}
    return SimpleNamespace(tokenizer=tokenizer, manifest=SimpleNamespace(name="tiny", files=files, vocab_size=300))


def test_answers_are_the_callers_or_the_models() -> None:
    own = served(HashTokenizer(), {"true_token_id": 299, "false_token_id": 3})
    assert answer_ids(own, "", "") == (299, 3)
    assert answer_ids(own, "y", "n") == (ord("y"), ord("n"))
    for yes, no, field in (("", "", "yes"), ("y", "", "no"), ("", "n", "yes"), ("y", "nn", "no")):
        with pytest.raises(InvalidField) as refused:
            answer_ids(served(HashTokenizer()), yes, no)
        assert refused.value.field == field
    with pytest.raises(Mismatch, match=r"tiny: has no tokenizer\.json"):
        answer_ids(served(ModelTokenizer()), "", "")


@pytest.mark.parametrize(
    "config", [{"true_token_id": 5, "false_token_id": None}, {"true_token_id": 5, "false_token_id": 300}, {}, []]
)
def test_a_score_of_one_answer_is_refused(config: Any) -> None:
    with pytest.raises(Mismatch, match=r"1_LogitScore/config\.json has no true_token_id and false_token_id"):
        answer_ids(served(HashTokenizer(), config), "", "")


def test_a_template_of_a_query_and_a_document_is_the_rerankers_own() -> None:
    assert has_roles(ChatTemplate("{{ m.role == 'query' }}{{ m.role == \"document\" }}"))
    assert not has_roles(ChatTemplate("{{ m.role == 'query' }}{{ documents }}"))
    assert not has_roles(ChatTemplate())
