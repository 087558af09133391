"""The ids of a reranker's answers: the caller's, those of the model's files, or yes and no."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.rerank import TEXT_BYTES, read_documents
from loraplex.rerank.prompts import INSTRUCTION, Document, Prompts, answer_ids, has_roles
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import HashTokenizer, ModelTokenizer, PromptTokenizer
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


@pytest.mark.parametrize("instruction", ["", "x" * 1_000])
def test_what_stands_in_every_prompt_counts_with_every_document(instruction: str) -> None:
    """Prompts of all documents are kept, with the query and the instruction in each."""
    query = "x" * (TEXT_BYTES // 1_000 - 1 - len(instruction))
    request = pb.RerankRequest(query=query, documents=["x"] * 1_000, instruction=instruction)
    assert len(read_documents(request)) == 1_000
    request.query += "x"
    with pytest.raises(InvalidField, match="each with its query and the instruction, have") as refused:
        read_documents(request)
    assert refused.value.field == "documents[999]"


FAMILIES = Path(__file__).parents[1] / "text/families"
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n"
    "<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DOCUMENT = Document("a query", " a document ", "documents[0]", "query")


@pytest_asyncio.fixture
async def tokenizer() -> AsyncIterator[PromptTokenizer]:
    made = PromptTokenizer()
    yield made
    made.close()


def prompts(tokenizer: PromptTokenizer, source: str, context: int, instruction: str = "") -> Prompts:
    """The prompts of a model with this template, whose tokens are bytes."""
    model = served(HashTokenizer())
    model.template = ChatTemplate(source, system_prompt="")
    return Prompts(tokenizer, model, "acme", context, instruction)


@pytest.mark.parametrize("source", ["", (FAMILIES / "qwen3.jinja").read_text()])
async def test_qwen3_s_chat_template_and_none_make_the_prompt_of_its_rerankers(
    tokenizer: PromptTokenizer, source: str
) -> None:
    for instruction in ("", "Find it."):
        made = prompts(tokenizer, source, 4_096, instruction)
        ids = await made.ids(DOCUMENT, room=1, truncate=False)
        assert bytes(ids).decode() == QWEN3.format(instruction or INSTRUCTION, "a query", " a document ")
        assert not made.renders


async def test_a_document_is_cut_so_that_its_prompt_fills_the_context(tokenizer: PromptTokenizer) -> None:
    whole = len(QWEN3.format(INSTRUCTION, "a query", " a document ").encode())
    made = prompts(tokenizer, "", whole)
    with pytest.raises(InvalidField, match="maximum context length") as refused:
        await made.ids(DOCUMENT, room=1, truncate=False)
    assert refused.value.field == "documents[0]"
    cut = await made.ids(DOCUMENT, room=1, truncate=True)
    assert bytes(cut).decode() == QWEN3.format(INSTRUCTION, "a query", " a document")
    for truncate in (False, True):
        with pytest.raises(InvalidField, match="maximum context length") as refused:
            await prompts(tokenizer, "", whole - 30).ids(DOCUMENT, room=1, truncate=truncate)
        assert refused.value.field == "query"


async def test_a_template_that_refuses_is_the_model_s_fault(tokenizer: PromptTokenizer) -> None:
    made = prompts(tokenizer, "{{ raise_exception('no system here') }}", 4_096)
    with pytest.raises(InvalidField, match="tiny: the chat template refuses them: no system here") as refused:
        await made.ids(DOCUMENT, room=1, truncate=False)
    assert (refused.value.field, refused.value.reason) == ("model", "CHAT_TEMPLATE")
