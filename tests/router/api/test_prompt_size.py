"""Prompts that can't fit the context: refused by their field before anything of their size is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from router.api.convert import check_prompt_size, read_request
from router.text.text import HashText
from rpc.errors import InvalidField

MODEL: Any = SimpleNamespace(manifest=SimpleNamespace(context_length=100), text=HashText())
CASES = {
    "prompt": lambda size: pb.GenerateSpec(prompt="x" * size),
    "token_ids": lambda size: pb.GenerateSpec(token_ids=pb.TokenIds(ids=[1] * size)),
    "chat.messages": lambda size: pb.GenerateSpec(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * size)),
}


@pytest.mark.parametrize("field", CASES)
def test_what_is_larger_than_the_context_is_refused_by_its_field(field: str) -> None:
    check_prompt_size(CASES[field](100), MODEL)
    with pytest.raises(InvalidField, match="do not fit the context of 100") as refused:
        check_prompt_size(CASES[field](101), MODEL)
    assert (refused.value.field, refused.value.reason) == (field, "CONTEXT_EXCEEDED")


def test_too_many_biases_are_refused_before_they_are_sorted() -> None:
    spec = pb.GenerateSpec(prompt="x", sampling=pb.Sampling(logit_bias=dict.fromkeys(range(301), 1.0)))
    with pytest.raises(InvalidField, match=r"sampling\.logit_bias: 301 entries; at most 300"):
        read_request(spec, "acme")
