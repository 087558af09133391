"""The short form of `make fuzz`: some hundred changed texts for each reader, by a seed."""

from __future__ import annotations

import random
import time

import pytest

from tests.trials.fuzz.plain import fuzz
from tests.trials.fuzz.target import Target
from tests.trials.fuzz.targets import TARGETS

SEED = 16
RUNS = 300
# Time at which the targets' seeds were made: those that end within minutes are valid then, whenever a test begins.
MADE_AT = time.time()


@pytest.fixture(autouse=True)
def _time_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: MADE_AT)


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_answers_changed_texts_with_its_refusals_alone(name: str) -> None:
    runs, findings = fuzz(TARGETS[name], random.Random(SEED), runs=RUNS)
    assert runs == RUNS
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("name", TARGETS)
def test_what_others_are_made_of_is_not_all_refused(name: str) -> None:
    target = TARGETS[name]
    accepted = 0
    for seed in target.seeds:
        try:
            target.read(seed)
            accepted += 1
        except target.refusals:
            continue
    assert accepted


def test_an_error_that_is_no_refusal_is_found() -> None:
    def read(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("a byte")
        raise ValueError("refused")

    _, findings = fuzz(Target(read, (ValueError,), (b"abc",)), random.Random(SEED), runs=RUNS)
    assert len(findings) == 1
    assert "KeyError" in findings[0]
