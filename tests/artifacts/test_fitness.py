"""Fitness certificates: prompts, right answers, intervals, and which limits figures break."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.fitness import (
    Breach,
    Figures,
    FitnessLimits,
    Prompt,
    is_right,
    parse_prompts,
    wilson_interval,
)

LIMITS = FitnessLimits(min_agreement=0.8, max_kl=0.2, max_drop=0.05)
USER = {"role": "user", "content": "Is 7 prime?"}


def test_prompts_are_texts_or_chats_with_answers_or_without() -> None:
    assert parse_prompts(None) == ()
    assert parse_prompts(["Dear", {"prompt": "a"}, {"messages": [USER]}]) == (
        Prompt("Dear"),
        Prompt("a"),
        Prompt(messages=(USER,)),
    )
    assert parse_prompts([{"prompt": "a", "answer": "b"}, {"messages": [USER], "answer": "yes"}]) == (
        Prompt("a", answer="b"),
        Prompt(messages=(USER,), answer="yes"),
    )


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ({}, r"\[0\]: is neither a text nor an object with prompt or messages"),
        ({"prompt": "a", "messages": [USER]}, r"\[0\]: is neither"),
        ({"prompt": 1}, r"\[0\]\.prompt: is not a text of 1 to 4096 characters"),
        ({"prompt": "a", "answer": ""}, r"\[0\]\.answer: is not a text of 1"),
        ({"messages": []}, r"\[0\]\.messages: is not a list of messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\]\.role: is not one of system, "),
        ({"messages": [{**USER, "name": "a"}]}, r"messages\[0\]: is not an object with role and content alone"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\]\.content: is not a text"),
        ({"messages": [{"role": "user", "content": "a" * 3000}] * 2}, r"messages: have more than 4096 characters"),
    ],
)
def test_the_fault_of_a_prompt_is_named(item: Any, fault: str) -> None:
    with pytest.raises(ArtifactError, match=fault):
        parse_prompts([item])


def test_all_prompts_have_answers_or_none() -> None:
    with pytest.raises(ArtifactError, match=r"prompts\[1\]: has no answer, but others do"):
        parse_prompts([{"prompt": "a", "answer": "b"}, "c"])


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        (" yes\n", "yes", True),
        ("yes.", "yes", False),
        ('{"b":1, "a": [2]}', '{"a": [2], "b": 1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1} ok', '{"a": 1}', False),
        ("[" * 100_000, "[" * 99_999, False),
    ],
)
def test_a_right_answer_is_the_same_text_or_json(answer: str, expected: str, right: bool) -> None:
    assert is_right(answer, expected) is right


@pytest.mark.parametrize(
    ("count", "total", "interval"),
    # of statsmodels.stats.proportion.proportion_confint(method="wilson")
    [(20, 24, (0.6415, 0.9332)), (24, 24, (0.8620, 1.0)), (0, 10, (0.0, 0.2775)), (48, 48, (0.9259, 1.0))],
)
def test_intervals_are_wilson_s(count: int, total: int, interval: tuple[float, float]) -> None:
    assert wilson_interval(count, total) == pytest.approx(interval, abs=1e-4)


def figures(same: int | None, right: tuple[int, int] | None = None, *, drawn: bool = False) -> Figures:
    """Return figures of 24 prompts, whose tokens alone are beyond every limit."""
    before, after = right or (0, 0)
    return Figures(24, drawn, 100, 0.5, 1.0, 9.0, same, 24 if right else 0, before, after)


@pytest.mark.parametrize(
    ("measured", "words", "certain"),
    [
        (figures(24), None, False),
        (figures(23), None, False),  # one of 24 is less than a share of 0.05
        (figures(22), "22 of 24 answers are the same (95% interval 0.74 to 0.98): a drop of 0.0833 is above", False),
        (figures(20), "20 of 24 answers are the same (95% interval 0.64 to 0.93): a drop of 0.167 is above", True),
        # Right answers count, not equal ones.
        (figures(12, (23, 23)), None, False),
        (figures(12, (20, 24)), None, False),
        (figures(24, (24, 22)), "22 of 24 answers are right, 24 on the original (95%", False),
        (figures(24, (24, 20)), "20 of 24 answers are right, 24 on the original (95%", True),
        (figures(24, (0, 0)), "0 of 24 answers are right, and none on the original", False),
        # Tokens count where whole answers were not counted, or prompts drawn.
        (figures(None), "greedy agreement 0.5 is below 0.8, mean divergence 1 nats is above 0.2", True),
        (figures(24, drawn=True), "greedy agreement 0.5 is below 0.8, mean divergence 1 nats is above 0.2", False),
    ],
)
def test_whole_answers_to_own_prompts_are_judged(measured: Figures, words: str | None, certain: bool) -> None:
    breach = LIMITS.breach(measured)
    if words is None:
        assert breach is None
    else:
        assert isinstance(breach, Breach)
        assert breach.text.startswith(words)
        assert breach.certain is certain


def test_a_drop_of_5_percent_allows_exactly_1_of_20() -> None:
    for right, fits in ((19, True), (18, False)):
        assert (LIMITS.breach(Figures(20, False, 9, 1, 0, 0, 20, 20, 20, right)) is None) is fits


@pytest.mark.parametrize("counts", [(25,), (24, 25), (24, 24, 25), (24, 24, 24, 25)])
def test_counts_beyond_the_prompts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="25 is more than 24"):
        Figures(24, False, 100, 1.0, 0.0, 0.0, *counts)
