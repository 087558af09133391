"""The tasks of examples/: their check asks nothing that was trained on, and reads answers as a person would."""

from __future__ import annotations

import dataclasses

import pytest

from examples.tasks import CHECK, TASKS, TRAINING, Question

# Lists that training and check have in common.
SHARED = ("first", "cities")


def test_nothing_that_the_check_draws_from_was_trained_on() -> None:
    for field in dataclasses.fields(CHECK):
        ours, theirs = getattr(CHECK, field.name), getattr(TRAINING, field.name)
        if isinstance(ours, dict):
            assert ours.keys() == theirs.keys()
            ours, theirs = [{text for texts in lists.values() for text in texts} for lists in (ours, theirs)]
        if not isinstance(ours, float):
            assert len(ours) >= 8
            assert field.name in SHARED or not set(ours) & set(theirs), field.name


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_drawn_once_and_again(name: str) -> None:
    drawn = TASKS[name].questions(40, 1, CHECK)
    assert len({question.text for question in drawn}) == 40
    assert drawn == TASKS[name].questions(40, 1, CHECK)
    assert all(TASKS[name].is_right(question, question.answer) for question in drawn)


def test_no_more_questions_are_drawn_than_there_are() -> None:
    assert len(TASKS["sentiment"].questions(1000, 1, CHECK)) == 120


@pytest.mark.parametrize(
    ("name", "right", "answers"),
    [
        ("extract", '{"name": "Ada Byron", "age": 36, "city": "Oslo"}', {
            '```json\n{"city": "Oslo", "age": "36", "name": "Ada Byron"}\n```': True,
            '{"name": "Ada Byron", "age": 63, "city": "Oslo"}': False,
            '{"name": "Ada Byron", "age": 36': False,
            "Ada Byron": False,
        }),
        ("triage", "team: billing, priority: high", {
            "The billing team, with high priority.": True,
            "team: billing, priority: low": False,
            "Thank you for your message.": False,
        }),
        ("sentiment", "negative", {"Negative.": True, "The review is negative": True, "positive": False, "": False}),
    ],
)  # fmt: skip
def test_words_around_an_answer_do_not_count(name: str, right: str, answers: dict[str, bool]) -> None:
    for answer, expected in answers.items():
        assert TASKS[name].is_right(Question("", right), answer) is expected, answer
