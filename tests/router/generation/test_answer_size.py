"""Answers at the boundary of a message: what is admitted fits, what does not fit is refused by its field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from router.api.convert import write_message
from router.dispatch.routed_job import READ_TOKENS
from router.generation.admission import check_answer_size
from router.request import Delta, Message, PromptLogprobs, Request, TokenLogprobs
from rpc.errors import InvalidField
from rpc.server import MESSAGE_BYTES

REQUEST = Request("acme", "x", "prompt")
# The largest id of a real vocabulary, in a varint of five bytes; a token that 128 bytes of text belong to.
ID, TEXT = (1 << 32) - 1, "x" * 128
# Maximum length of a resume token in characters.
RESUME_TOKEN = "t" * 16_384


def logprobs(tokens: int, alternatives: int) -> tuple[TokenLogprobs, ...]:
    return (TokenLogprobs(-1.5, ((ID, -1.5),) * alternatives),) * tokens


def delta(tokens: int, alternatives: int | None = None) -> Delta:
    return Delta(0, (ID,) * tokens, TEXT * tokens, 0, () if alternatives is None else logprobs(tokens, alternatives))


def fits(event_of: Callable[[int], Delta | PromptLogprobs], tokens: int) -> bool:
    """Tell whether a message of so many tokens fits, from the sizes of two smaller ones: every token takes the same."""
    small, larger = (write_message(Message(event_of(count), RESUME_TOKEN)).ByteSize() for count in (200, 300))
    # Lengths of lengths differ by some bytes.
    return small + (larger - small) / 100 * (tokens - 200) + 64 <= MESSAGE_BYTES


def most(request: Request, *, prompt: int = 1, max_tokens: int = 1) -> int | None:
    """Return the number in the refusal: how many would fit."""
    with pytest.raises(InvalidField) as refused:
        check_answer_size(request, prompt, max_tokens)
    assert refused.value.reason == "ANSWER_TOO_LARGE"
    words = refused.value.message.split()
    return int(words[words.index("most") + 1]) if "most" in words else None


def test_the_log_probabilities_of_a_prompt_fit_or_are_refused() -> None:
    asked = replace(REQUEST, prompt_logprobs=20)
    allowed = most(asked, prompt=20_000)
    assert allowed is not None
    assert 10 < allowed < 20
    check_answer_size(replace(REQUEST, prompt_logprobs=allowed), 20_000, 1)
    assert fits(lambda tokens: PromptLogprobs(logprobs(tokens, allowed)), 20_000)
    assert not fits(lambda tokens: PromptLogprobs(logprobs(tokens, 20)), 20_000)
    assert most(asked, prompt=1_000_000) is None


def test_the_best_of_several_candidates_fits_or_is_refused() -> None:
    ranked = replace(REQUEST, best_of=2)
    longest = most(ranked, max_tokens=10**6)
    assert longest is not None
    check_answer_size(ranked, 1, longest)
    assert fits(delta, longest)
    allowed = most(replace(ranked, logprobs=20), max_tokens=12_000)
    assert allowed is not None
    assert fits(lambda tokens: delta(tokens, allowed), 12_000)


def test_an_answer_in_several_messages_is_not_bounded() -> None:
    check_answer_size(replace(REQUEST, logprobs=20, n=2, best_of=2), 1, 10**6)
    held_back = 1_000 + 64  # a stream interval, and tokens that may begin a stop string
    assert fits(lambda tokens: delta(tokens, 20), READ_TOKENS + held_back)
