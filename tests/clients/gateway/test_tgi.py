"""Requests in LoRAX's and TGI's words as options of the SDK, and the tokens of their answers."""

from __future__ import annotations

from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2

from loraplex.gateway.errors import HttpError
from loraplex.gateway.tgi_api import Token, TokenAnswer, options_of
from loraplex_client import Choice, FinishReason, Generation, Piece, Timings, TokenLogprobs, Usage
from loraplex_client.generation import Fold


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, {"max_tokens": 20, "temperature": 0.0, "stop": [], "logprobs": 0}),
        ({"temperature": 1.0, "seed": 7}, {"temperature": 0.0, "seed": 7}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"top_k": 3}, {"temperature": 1.0, "top_k": 3}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_new_tokens": 9, "stop": ["."], "ignore_eos_token": True}, {"max_tokens": 9, "stop": ["."]}),
        ({"return_k_alternatives": 2}, {"logprobs": 2}),
        ({"top_n_tokens": 3, "truncate": 9}, {"logprobs": 3, "truncate_prompt_tokens": 9}),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"regex": "a+", "response_format": None}),
        (
            {"grammar": {"type": "json", "value": {"type": "object"}}},
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        ),
        # LoRAX's own client sends a density always; a sum has none.
        (
            {"merged_adapters": {"ids": ["a", "b"], "weights": [0.5, -0.5], "merge_strategy": "linear", "density": 1}},
            {"adapters": [("a", 0.5), ("b", -0.5)], "adapter_id": None},
        ),
    ],
)
def test_parameters_as_options(parameters: dict[str, Any], options: dict[str, Any]) -> None:
    assert options_of(parameters).items() >= options.items()


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"watermark": True}, "watermark"),
        ({"decoder_input_details": True}, "decoder_input_details"),
        ({"apply_chat_template": True}, "apply_chat_template"),
        ({"truncate": 0}, "truncate"),
        ({"adapter_source": "moon"}, "adapter_source"),
        ({"merged_adapters": {"ids": ["a"], "weights": []}}, "merged_adapters"),
        ({"merged_adapters": {"ids": ["a"], "weights": [1]}, "adapter_id": "b"}, "merged_adapters"),
        (
            {"merged_adapters": {"ids": ["a"], "weights": [1], "merge_strategy": "ties"}},
            "merged_adapters.merge_strategy",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(HttpError) as caught:
        options_of(parameters)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (1, 3), (4,)])
def test_tokens_have_their_own_texts_however_they_come(sizes: tuple[int, ...]) -> None:
    fold, answer, tokens = Fold(), TokenAnswer({"inputs": "x", "parameters": {"max_new_tokens": 9}}), list[Token]()
    texts, begin = [" STRINGS", " OF", "", " é"], 0
    for size in sizes:
        part = texts[begin : begin + size]
        delta = inference_pb2.Delta(
            offset=begin,
            token_ids=range(begin, begin + size),
            text="".join(part),
            logprobs=[inference_pb2.TokenLogprobs(logprob=-1)] * size,
            text_lengths=map(len, part),
        )
        piece = fold.take(inference_pb2.GenerateEvent(delta=delta))
        assert piece is not None
        tokens += answer.take(piece)
        begin += size
    assert [(token.id, token.text) for token in tokens] == [*enumerate(texts)]


END = TokenLogprobs(-1.0, ((2, -1.0), (9, -2.0)))


@pytest.mark.parametrize(
    ("reason", "stop", "text", "last"),
    [
        (FinishReason.END, None, "Hi", [Token(2, "", -1.0, special=True, alternatives=END.alternatives)]),
        (FinishReason.LENGTH, None, "Hi", [Token(2, "", -1.0, alternatives=END.alternatives)]),
        (FinishReason.STOP, "!", "Hi!", [Token(2, "", -1.0, alternatives=END.alternatives), Token(-1, "!")]),
    ],
)
def test_the_last_token_waits_for_the_end(reason: FinishReason, stop: str | None, text: str, last: list[Token]) -> None:
    answer = TokenAnswer({"inputs": "x", "parameters": {"seed": 7}})
    assert answer.take(Piece("Hi", (1,), 0)) == [Token(1, "Hi")]
    assert answer.take(Piece("", (2,), 1, logprobs=(END,))) == []
    choice = Choice("Hi", (1, 2), reason, stop)
    whole = Generation((choice,), Usage(3, 0, 2), Timings(0.0, 0.0, 0.0, 0.0), "", 0, "r")
    ended = Piece("", (), 2, finished=whole)
    assert answer.take(ended) == last
    assert answer.text == text
    assert answer.figures is not None
    assert (answer.figures["prompt_tokens"], answer.figures["generated_tokens"], answer.figures["seed"]) == (3, 2, 7)
    full = TokenAnswer({"inputs": "x", "parameters": {"return_full_text": True}})
    full.take(ended)
    assert full.text == f"x{text}"
