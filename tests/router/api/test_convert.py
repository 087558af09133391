"""Checks of a request that need only its message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.contracts.grammars.build import json_grammar
from loraplex.contracts.grammars.json_schema import JsonStyle, Whitespace
from loraplex.contracts.options import FinishReason, TokenLogprobs
from loraplex.router.api import convert
from loraplex.router.api.convert import (
    check_prompt_size,
    count_numbers,
    count_received,
    forget_formats,
    read_format,
    read_received,
    read_request,
)
from loraplex.router.request import Delta, Event, Finished, PromptLogprobs, Received, Request
from loraplex.router.text.tokenizer import HashTokenizer, PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField


@pytest.mark.parametrize("request_id", ["a b", "a\nb", "\x1b[2J", "é", '"', "{", "x" * 129, "\u202e"])
def test_a_request_id_has_its_characters(request_id: str) -> None:
    with pytest.raises(InvalidField, match="request_id: not 128 characters at most of A-Z"):
        read_request(pb.GenerateSpec(prompt="x", request_id=request_id), "acme")
    good = "AZaz09._:/@+=~-" + "x" * 113
    assert read_request(pb.GenerateSpec(prompt="x", request_id=good), "acme").request_id == good


def test_a_session_is_bounded() -> None:
    assert read_request(pb.GenerateSpec(prompt="Hi", session_id="é" * 256), "acme").session_id == "é" * 256
    with pytest.raises(InvalidField, match="session_id: 257 characters; at most 256"):
        read_request(pb.GenerateSpec(prompt="Hi", session_id="a" * 257), "acme")


def test_priority_has_its_range() -> None:
    assert read_request(pb.GenerateSpec(prompt="x", priority=-100), "acme").priority == -100
    with pytest.raises(InvalidField, match="priority: 101 is not between -100 and 100"):
        read_request(pb.GenerateSpec(prompt="x", priority=101), "acme")


def test_speculation_is_a_word_that_is_known() -> None:
    words = {pb.SPECULATION_UNSPECIFIED: True, pb.SPECULATION_AUTO: True, pb.SPECULATION_OFF: False}
    for word, speculate in words.items():
        assert read_request(pb.GenerateSpec(prompt="x", speculation=word), "acme").speculate is speculate
    with pytest.raises(InvalidField, match="speculation: 7 is not known"):
        read_request(pb.GenerateSpec(prompt="x", speculation=7), "acme")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "refusal"),
    [
        (pb.Sampling(top_p=7), "sampling.top_p: 7 is not greater than 0 and at most 1"),
        (pb.Sampling(repetition_penalty=0), "sampling.repetition_penalty: 0 is not greater than 0 and at most 100"),
        (pb.Sampling(default_temperature=-1), "sampling.default_temperature: -1 is not between 0 and 100"),
        (pb.Sampling(temperature=-1), "sampling.temperature: -1 is not between 0 and 100"),
        (pb.Sampling(frequency_penalty=2.5), "sampling.frequency_penalty: 2.5 is not between -2 and 2"),
        (pb.Sampling(bad_words=["x"] * 65), "sampling.bad_words: 65 strings; at most 64"),
        (pb.Sampling(bad_words=["x" * 65]), "sampling.bad_words: each string has 1 to 64 characters"),
        (pb.Sampling(bad_words=[""]), "sampling.bad_words: each string has 1 to 64 characters"),
        (
            pb.Sampling(bad_words=["x"], allowed_token_ids=[1]),
            "sampling.bad_words: cannot be combined with allowed_token_ids",
        ),
        (pb.Sampling(allowed_token_ids=range(4097)), "sampling.allowed_token_ids: 4097 ids; at most 4096"),
        (pb.Sampling(logit_bias={3: 101}), "sampling.logit_bias: 101 for id 3 is not between -100 and 100"),
    ],
)
def test_a_sampling_field_out_of_its_range_is_told_the_range(sampling: pb.Sampling, refusal: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read_request(pb.GenerateSpec(prompt="x", sampling=sampling), "acme")
    assert str(refused.value) == refusal


def test_a_format_becomes_the_grammar_of_the_request() -> None:
    schema = '{"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}'
    plain = read_request(pb.GenerateSpec(prompt="x", json_schema=schema), "acme")
    assert (plain.format_field, plain.grammar) == ("json_schema", json_grammar(schema))
    style = pb.JsonStyle(whitespace=pb.JSON_WHITESPACE_FLEXIBLE, property_order=pb.PROPERTY_ORDER_SORTED)
    styled = read_request(pb.GenerateSpec(prompt="x", json_schema=schema, json_style=style), "acme")
    assert styled.grammar == json_grammar(schema, JsonStyle(Whitespace.FLEXIBLE, sorted_properties=True))
    chosen = read_request(pb.GenerateSpec(prompt="x", choices=pb.Choices(values=["a", "b"])), "acme")
    assert chosen.format_field == "choices.values"
    assert read_request(pb.GenerateSpec(prompt="x"), "acme").grammar == ""


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        (pb.GenerateSpec(prompt="x", json_schema='{"not": {}}'), "json_schema.not: is not enforced here"),
        (pb.GenerateSpec(prompt="x", regex="a" * 70_000), "regex: 70000 bytes; at most 65536"),
        (pb.GenerateSpec(prompt="x", choices=pb.Choices()), "choices.values: 0 choices"),
        (pb.GenerateSpec(prompt="x", regex="a", json_style=pb.JsonStyle()), "json_style: is for a json_schema alone"),
    ],
)
def test_a_bad_format_is_refused_by_its_field(spec: pb.GenerateSpec, refusal: str) -> None:
    with pytest.raises(InvalidField, match=refusal):
        read_request(spec, "acme")


class UnreadIds(Sequence[int]):
    """Ids of a message that nobody may read yet."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("read before the bound")


@pytest.mark.parametrize(
    ("received", "refusal"),
    [
        ([(0, UnreadIds())], r"received\[0\].token_ids: more than max_tokens \(9\)"),
        ([(0, ()), (2, UnreadIds())], r"received\[1\].choice: 2; the request has 2"),
        ([(1, ())] * 10_000, r"received\[1\].choice: 1 is there twice"),
    ],
)
def test_received_ids_are_bounded_by_the_token_before_one_is_read(
    received: list[tuple[int, Sequence[int]]], refusal: str
) -> None:
    parts: Any = [SimpleNamespace(choice=choice, token_ids=ids) for choice, ids in received]
    with pytest.raises(InvalidField, match=refusal):
        count_received(parts, n=2, max_tokens=9)
    assert count_received(parts[:1], n=2, max_tokens=10) == len(received[0][1])


def test_received_ids_are_read_as_they_are() -> None:
    ids = tuple(range(10_000))
    sent = [pb.ReceivedTokens(choice=1, token_ids=ids), pb.ReceivedTokens(finished=True, text_bytes=3)]
    assert read_received(sent) == {1: Received(ids), 0: Received((), finished=True, text_bytes=3)}


@pytest.mark.parametrize(
    ("event", "numbers"),
    [
        (Delta(0, (5, 6), "ab"), 2),
        (Delta(0, (5, 6), "ab", 0, (TokenLogprobs(-1.0, ((5, -1.0), (7, -2.0))),) * 2), 6),
        (PromptLogprobs((TokenLogprobs(-1.0, ((5, -1.0),)),) * 3), 6),
        (PromptLogprobs(()), 0),
        (Finished(FinishReason.END), 0),
    ],
)
def test_a_message_is_as_long_to_write_as_it_has_numbers(event: Event, numbers: int) -> None:
    assert count_numbers(event) == numbers


MODEL: Any = SimpleNamespace(manifest=SimpleNamespace(context_length=100), tokenizer=HashTokenizer())
CASES = {
    "prompt": lambda size: pb.GenerateSpec(prompt="x" * size),
    "token_ids": lambda size: pb.GenerateSpec(token_ids=pb.TokenIds(ids=[1] * size)),
    "chat.messages": lambda size: pb.GenerateSpec(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * size)),
}


@pytest.mark.parametrize("field", CASES)
def test_what_is_larger_than_the_context_is_refused_by_its_field(field: str) -> None:
    check_prompt_size(CASES[field](100), MODEL)
    with pytest.raises(InvalidField, match=r"is 100 tokens; .+ do not fit") as refused:
        check_prompt_size(CASES[field](101), MODEL)
    assert (refused.value.field, refused.value.reason) == (field, "CONTEXT_EXCEEDED")


def test_too_many_biases_are_refused_before_they_are_sorted() -> None:
    spec = pb.GenerateSpec(prompt="x", sampling=pb.Sampling(logit_bias=dict.fromkeys(range(301), 1.0)))
    with pytest.raises(InvalidField, match=r"sampling\.logit_bias: 301 entries; at most 300"):
        read_request(spec, "acme")


MODELS: Any = SimpleNamespace(
    get=lambda name: SimpleNamespace(manifest=SimpleNamespace(context_length=64), tokenizer=HashTokenizer())
)


async def test_large_formats_of_one_tenant_delay_another_s_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    may_read = threading.Event()

    def read(spec: pb.GenerateSpec, tenant: str) -> tuple[str, str]:
        if threading.current_thread() is not threading.main_thread():  # which reads what a thread has read
            assert may_read.wait(60)
            order.append(tenant)
        return read_format(spec, tenant)

    monkeypatch.setattr(convert, "read_format", read)
    encoder = PromptTokenizer(1)

    async def ask(tenant: str, number: int) -> None:
        spec = pb.GenerateSpec(prompt="x", regex="[a-z]" * 1_000 + str(number))
        assert (await convert.read_spec(spec, tenant, MODELS, encoder)).grammar

    asked = [asyncio.create_task(ask("loud", number)) for number in range(4)]
    asked.append(asyncio.create_task(ask("quiet", 0)))
    await asyncio.sleep(0)
    may_read.set()
    await asyncio.gather(*asked)
    assert order.index("quiet") <= 2


async def test_many_ids_of_a_prompt_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()

    def read(spec: pb.GenerateSpec, tenant: str) -> Request:
        threads.append(threading.get_ident())
        return read_request(spec, tenant)

    monkeypatch.setattr(convert, "read_request", read)
    for count in (10, 10_000):
        spec = pb.GenerateSpec(token_ids=pb.TokenIds(ids=range(count)))
        spec.prompt_options.truncate_to = 5
        assert (await convert.read_spec(spec, "acme", MODELS, PromptTokenizer(1))).prompt == tuple(range(count))
    assert [ident == threading.get_ident() for ident in threads] == [True, False]


def test_a_format_that_one_tenant_has_asked_with_is_read_anew_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_formats()
    read: list[str] = []

    def counted(schema: str, *style: Any) -> str:
        read.append(schema)
        return json_grammar(schema, *style)

    monkeypatch.setattr("loraplex.router.api.convert.json_grammar", counted)
    spec = pb.GenerateSpec(json_schema='{"const": "a secret"}')
    for tenant in ("acme", "globex", "acme"):
        read_format(spec, tenant)
    assert len(read) == 2


def test_a_default_temperature_is_that_of_a_request_without_one() -> None:
    def read(**sampling: Any) -> tuple[float, bool]:
        request = read_request(pb.GenerateSpec(prompt="x", sampling=pb.Sampling(**sampling)), "acme")
        return request.sampling.temperature, "temperature" in request.sampling_set

    assert read() == (0.0, False)
    assert read(default_temperature=1.0) == (1.0, False)
    assert read(default_temperature=1.0, temperature=0.0) == (0.0, True)
