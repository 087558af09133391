"""Added tokens of adapters: the field, and which of them a base does not have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.added_tokens import (
    ADDED_FIELD,
    ENDS_FIELD,
    AddedToken,
    BaseTokens,
    as_field,
    check_new_tokens,
    parse_added_tokens,
    parse_end_tokens,
)

ADDED = [{"id": 0, "content": "<s>", "special": True}]
BPE = json.dumps({"model": {"type": "BPE", "vocab": {"a": 1, "<w>": 2}}, "added_tokens": ADDED}).encode()
UNIGRAM = json.dumps({"model": {"type": "Unigram", "vocab": [["<s>", 0.0], ["a", -1.0], ["<w>", -2.0]]},
                      "added_tokens": ADDED}).encode()  # fmt: skip


def token(number: int, content: str, **flags: bool) -> AddedToken:
    return AddedToken(number, content, **flags)


@pytest.mark.parametrize("tokenizer", [BPE, UNIGRAM])
def test_tokens_that_the_base_has_are_left_out(tokenizer: bytes) -> None:
    base = BaseTokens({"tokenizer.json": tokenizer})
    new = (token(3, "<call>", special=True), token(4, "<end>", normalized=True))
    assert base.new((token(0, "<s>", special=True), *new)) == new
    assert base.new((token(2, "<w>"),)) == (token(2, "<w>"),)  # a word that has become a token of its own
    assert base.new(()) == ()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            (token(5, "<call>"),),
            "'<call>' as number 5, which is 3 beside the base's: the adapter was trained with another",
        ),
        ((token(3, "<call>"), token(5, "<end>")), "'<end>' as number 5, which is 4 beside"),
        ((token(1, "<s>"),), "'<s>' as number 1, which is 0"),
    ],
)
def test_tokens_of_another_tokenizer_are_refused(tokens: tuple[AddedToken, ...], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        BaseTokens({"tokenizer.json": BPE}).new(tokens)


def test_new_tokens_need_rows_of_the_embeddings() -> None:
    check_new_tokens((token(49_151, "<call>"),), 49_152)
    message = (
        r"tokenizer.json: has the added token '<call>' as number 49,152, and the base has embeddings for 49,152 tokens"
    )
    with pytest.raises(MismatchError, match=message):
        check_new_tokens((token(49_152, "<call>"),), 49_152)
    with pytest.raises(MismatchError, match="has 1025 tokens that the base does not have"):
        check_new_tokens(tuple(token(at, f"<{at}>") for at in range(1025)), 49_152)


def test_a_token_reads_back_in_the_order_of_ids() -> None:
    tokens = (token(3, "<call>", special=True), token(7, " x ", lstrip=True, rstrip=True, single_word=True))
    assert parse_added_tokens([as_field(one) for one in reversed(tokens)]) == tokens
    assert parse_added_tokens(None) == ()


@pytest.mark.parametrize(
    "value",
    [
        {}, "x", ["x"], [{}], [{"id": 1}], [{"id": "1", "content": "x"}], [{"id": -1, "content": "x"}],
        [{"id": True, "content": "x"}], [{"id": 1, "content": ""}], [{"id": 1, "content": "x" * 1025}],
        [{"id": 1, "content": "\ud800"}], [{"id": 1, "content": "x", "special": 1}],
        [{"id": 1, "content": "x", "unknown": True}],
    ],
)  # fmt: skip
def test_what_is_no_list_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(ArtifactError, match=ADDED_FIELD):
        parse_added_tokens(value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"model": {"vocab": 3}}', b'{"model": {"vocab": [1]}}'])
def test_a_broken_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        BaseTokens({"tokenizer.json": content})


EOS = {"content": "<s>", "special": True}


@pytest.mark.parametrize(
    ("config", "ends", "own"),
    [
        ({"eos_token": "<s>"}, ("<s>", 0, 5), []),
        ({"eos_token": EOS}, ("<call>", 5, 0, 2), ["<call>", 2]),
        # Its id ends the base's answers, and templates that show the eos_token write it.
        ({"eos_token": "<call>"}, ("<s>",), ["<s>"]),
        ({}, ("<s>", "<gone>", 5, 1), ["<s>", 1]),
    ],
)
def test_end_tokens_are_kept_where_they_differ_from_the_bases(config: Any, ends: Any, own: list[Any]) -> None:
    added = [*ADDED, {"id": 3, "content": "<call>", "special": True}]
    tokenizer = json.dumps({**json.loads(BPE), "added_tokens": added}).encode()
    base = BaseTokens({"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(config).encode()})
    fields = {ENDS_FIELD: list(ends), "r": 1}
    assert base.keep_own(fields, (5,)) == ((), own)
    assert fields == ({ENDS_FIELD: own} if own else {}) | {"r": 1}
    with_new = {ENDS_FIELD: ["<end>"], ADDED_FIELD: [{"id": 4, "content": "<end>"}]}
    assert base.keep_own(dict(with_new), ()) == ((token(4, "<end>"),), ["<end>"])
    assert BaseTokens({}).keep_own({ENDS_FIELD: ["<s>", 5, 6]}, (5,)) == ((), [6])


@pytest.mark.parametrize("value", [{}, "x", 5, [-1], [True], [""], [None], [1.0], [0] * 65])
def test_what_is_no_list_of_end_tokens_is_refused(value: Any) -> None:
    with pytest.raises(ArtifactError, match=ENDS_FIELD):
        parse_end_tokens(value)
    assert parse_end_tokens(None) == ()
