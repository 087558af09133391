"""The fit of a temperature, and the file of labelled questions."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from loraplex.cli.calibration import (
    Example,
    calibration_error,
    fit_temperature,
    negative_log_likelihood,
    read_labelled,
)
from loraplex.cli.terminal import CommandError
from loraplex_client import Question


def drawn(temperature: float, count: int = 4000) -> list[Example]:
    """Draw right labels from the softmax of log probabilities at a temperature: that one is the best, but for noise."""
    source, examples = random.Random(1), []
    for _ in range(count):
        logits = [source.gauss(0, 3) for _ in range(source.choice([2, 3, 8]))]
        total = math.log(sum(map(math.exp, logits)))
        logprobs = tuple(one - total for one in logits)
        shares = Example(logprobs, 0).probabilities(temperature)
        examples.append(Example(logprobs, source.choices(range(len(shares)), shares)[0]))
    return examples


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_that_labels_were_drawn_at_is_found(temperature: float) -> None:
    examples = drawn(temperature)
    fitted = fit_temperature(examples)
    assert fitted == pytest.approx(temperature, rel=0.05)
    least = negative_log_likelihood(examples, fitted)
    for other in (fitted * 0.999, fitted * 1.001, 1.0 if temperature != 1.0 else 2.0):
        assert least < negative_log_likelihood(examples, other)
    assert calibration_error(examples, fitted) < 0.02
    if temperature != 1.0:
        assert calibration_error(examples, 1.0) > 0.05


def test_the_calibration_error_is_the_gap_of_each_bin_by_its_examples() -> None:
    sure, unsure = (math.log(0.9), math.log(0.1)), (math.log(0.6), math.log(0.4))
    examples = [Example(sure, 0), Example(sure, 1), Example(unsure, 0), Example(unsure, 0)]
    assert calibration_error(examples, 1.0) == pytest.approx((2 * 0.4 + 2 * 0.4) / 4)
    assert negative_log_likelihood(examples[:2], 1.0) == pytest.approx(-(math.log(0.9) + math.log(0.1)) / 2)


@pytest.mark.parametrize(
    ("examples", "fault"),
    [
        ([Example((-0.1, -2.0), 1)], "1 labelled questions; give at least 10"),
        ([Example((-0.1, -2.0), 0)] * 20, "20 of 20 right and no temperature above 0.05 is best: the fit goes to 0"),
        ([Example((-0.1, -2.0), 1)] * 20, "the right labels are no likelier than the others"),
        ([Example((-0.7, -0.7), 1)] * 20, "20 of 20 right and no temperature above 0.05"),
        ([Example((-1e4, -2.0), 1)] * 20, "20 of 20 right and no temperature above 0.05"),
    ],
)
def test_a_fit_without_an_end_is_refused(examples: list[Example], fault: str) -> None:
    with pytest.raises(CommandError, match=fault):
        fit_temperature(examples)


QUESTION = {"instructions": "Which?", "choices": {"a": "first", "b": ""}}


def test_the_file_may_have_prompts_messages_and_every_kind_of_question(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": "x", "question": QUESTION, "label": "b"},
        {"messages": chat, "question": "It is so.", "label": True},
        {"prompt": "x", "question": {"instructions": "How?", "levels": ["1", "2"]}, "label": "2"},
    ]
    path = tmp_path / "labelled.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    read = read_labelled(path)
    assert [one.right for one in read] == ["b", "yes", "2"]
    assert [json.loads(one.input) for one in read] == [{"prompt": "x"}, {"messages": chat}, {"prompt": "x"}]
    assert read[0].question == Question("Which?", choices={"a": "first", "b": ""})
    assert read[2].question == Question("How?", levels=["1", "2"])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1: is not JSON; write one object a line"),
        ("[]", "line 1: is not a JSON object"),
        ({"question": QUESTION, "label": "a"}, "line 1: give a prompt or messages"),
        ({"prompt": "x", "messages": [], "question": "x", "label": "yes"}, "line 1: give a prompt or messages"),
        ({"prompt": 1, "question": "x", "label": "yes"}, "line 1.prompt: is not a text"),
        ({"messages": "x", "question": "x", "label": "yes"}, "line 1.messages: is not a list"),
        ({"prompt": "x", "question": "x", "label": "a"}, "line 1.label: 'a' is not one of yes, no"),
        ({"prompt": "x", "question": QUESTION}, "line 1.label: None is not one of a, b"),
        ({"prompt": "x", "label": "a"}, "line 1.question: give a statement, or an object with instructions"),
        ({"prompt": "x", "question": {"instructions": 1}, "label": "a"}, "line 1.question.instructions: is not a text"),
        (
            {"prompt": "x", "question": {**QUESTION, "choices": "ab"}, "label": "a"},
            "line 1.question.choices: is neither",
        ),
        ({"prompt": "x", "question": {**QUESTION, "choises": []}, "label": "a"}, "question.choises: is not one of"),
        ({"prompt": "x", "question": "x", "label": "yes", "weight": 1}, "line 1.weight: is not one of prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, fault: str) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(CommandError, match=r"labelled\.jsonl") as refused:
        read_labelled(path)
    assert fault in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--questions: .*none\.jsonl: No such file"):
        read_labelled(tmp_path / "none.jsonl")
