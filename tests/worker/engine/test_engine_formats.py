"""Answers with formats of the torch engine: valid, and the same in full batches, after preemption and a crash."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from loraplex.contracts.grammars.build import choices_grammar, json_grammar, lark_grammar, regex_grammar
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.worker.engine_api import NewSequence, Output
from tests.drawn_schemas import Schema, byte_tokenizer, draw_schema

pytestmark = pytest.mark.model

VOCAB = 320
ROOMY = {"rows": 8, "kv_blocks": 400, "block_size": 4, "step_tokens": 64, "adapter_slots": 3, "max_rank": 16}
# Rows and blocks are too few: sequences wait, and are preempted.
TIGHT = ROOMY | {"rows": 5, "kv_blocks": 64, "step_tokens": 24}
Run = Callable[[Any, dict[int, list[NewSequence]]], dict[str, list[Output]]]


BOTH_MODES = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode; BOTH_MODES marks what is shown in the other one too."""
    return True


@pytest.fixture(scope="module")
def directory(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer."""
    directory = tmp_path_factory.mktemp("formats")
    for file in tiny_llama.directory.iterdir():
        os.link(file, directory / file.name)
    (directory / "tokenizer.json").write_text(byte_tokenizer(VOCAB))
    return directory


@pytest.fixture
def answers(make_engine: Callable[..., Any], run_until_idle: Run, directory: Path) -> Callable[..., dict[str, Any]]:
    """Call with (settings, sequences): the last output and all ids of each."""

    def run(settings: dict[str, Any], sequences: list[NewSequence]) -> dict[str, tuple[Output, tuple[int, ...]]]:
        return answered(run_until_idle(make_engine(directory, **settings), {0: sequences}))

    return run


def answered(outputs: dict[str, list[Output]]) -> dict[str, tuple[Output, tuple[int, ...]]]:
    """The last output and all ids of each."""
    return {
        name: (some[-1], tuple(token for output in some for token in output.token_ids))
        for name, some in outputs.items()
    }


def text_of(ids: tuple[int, ...]) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_str(byte_tokenizer(VOCAB)).decode(list(ids)))


def drawn(tiny: Any, count: int) -> tuple[list[NewSequence], dict[str, Schema]]:
    """Draw sequences of all kinds, each with its schema; two choices of each."""
    chance = random.Random(5)
    sequences, schemas = [], {}
    for number in range(count):
        schema = draw_schema(chance)
        sampling = SamplingParams(
            temperature=1.0,
            seed=number,
            top_p=chance.choice([1.0, 0.9]),
            top_k=chance.choice([0, 0, 40]),
            repetition_penalty=chance.choice([1.0, 1.2]),
            presence_penalty=chance.choice([0.0, 0.5]),
            logit_bias=chance.choice([(), ((10, 3.0),)]),
        )
        prompt = [chance.randrange(3, VOCAB) for _ in range(chance.choice([1, 8, 20]))]
        stopping = StoppingParams(200, min_tokens=chance.choice([0, 0, 30]), ignore_eos=chance.random() < 0.3)
        adapter = [None, *tiny.adapters][number % 4]
        for choice in range(2):
            name = f"r{number}.{choice}"
            more = {"sampling": sampling, "stopping": stopping, "choice": choice}
            sequences.append(tiny.request(name, prompt, 0, adapter, grammar=json_grammar(json.dumps(schema)), **more))
            schemas[name] = schema
    return sequences, schemas


@BOTH_MODES
def test_every_answer_is_valid_and_the_same_in_every_batch(
    tiny_llama: Any, answers: Callable[..., dict[str, tuple[Output, tuple[int, ...]]]]
) -> None:
    sequences, schemas = drawn(tiny_llama, 10)
    roomy = answers(ROOMY, sequences)
    for name, (last, ids) in roomy.items():
        assert last.finish in (FinishReason.COMPLETE, FinishReason.END), (name, last, text_of(ids))
        jsonschema.validate(json.loads(text_of(ids)), schemas[name])
    assert len({ids for _, ids in roomy.values()}) > len(sequences) / 2, "the answers are to be diverse"
    # The answers go on from the middle, as after an engine's death, in another engine, whose rows and blocks are few.
    chance = random.Random(6)
    emitted = {name: ids[: chance.randrange(len(ids) + 1)] for name, (_, ids) in roomy.items()}
    begun = [replace(sequence, emitted_ids=emitted[sequence.sequence_id]) for sequence in sequences]
    for name, (last, ids) in answers(TIGHT, begun).items():
        assert emitted[name] + ids == roomy[name][1]
        assert last.finish is roomy[name][0].finish


@BOTH_MODES
def test_a_step_decodes_one_of_the_sequences_whose_grammars_are_slow(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Run, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In turn, so that they delay the others once a step; no id depends on it."""
    sequences = [
        tiny_llama.request(f"{number}", (*range(20, 40), number), 20, grammar=regex_grammar("[a-f]{3}-[0-9]{20,30}x"))
        for number in range(4)
    ] + [tiny_llama.request("free", range(20, 40), 12)]
    truth = answered(run_until_idle(make_engine(directory, **ROOMY), {0: sequences}))
    monkeypatch.setattr("loraplex.worker.engine.scheduling.scheduler.SLOW_S", 0.0)
    engine, slow = make_engine(directory, **ROOMY), list[str]()
    schedule = engine._scheduler.schedule

    def scheduled() -> Any:
        if batch := schedule():
            some = [row.sequence for row in batch.rows if row.count == 1]
            slow.append(" ".join(one.sequence_id for one in some if one.answered and one.grammar is not None))
        return batch

    monkeypatch.setattr(engine._scheduler, "schedule", scheduled)
    made = answered(run_until_idle(engine, {0: sequences}))
    assert {name: ids for name, (_, ids) in made.items()} == {name: ids for name, (_, ids) in truth.items()}
    assert {"0", "1", "2", "3"} <= {*slow} <= {"", "0", "1", "2", "3"}


def test_formats_of_every_kind_and_requests_without_share_a_batch(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Run, directory: Path
) -> None:
    engine = make_engine(directory, **TIGHT)
    plain = [tiny_llama.request(f"plain{number}", range(10 + number, 30), 12) for number in range(3)]
    ends = {"stopping": StoppingParams(40), "grammar": choices_grammar(["yes, it is", "no", "yes"])}
    regex = tiny_llama.request("regex", range(30, 40), 8, grammar=regex_grammar("[a-c]+"))
    sequences = [
        *plain,
        tiny_llama.request("choice", range(20, 30), 0, **ends),
        tiny_llama.request("logprobs", range(20, 30), 0, logprobs=2, prompt_logprobs=1, **ends),
        regex,
        tiny_llama.request("huge", range(30, 40), 8, grammar="x" * 1000),
        tiny_llama.request("tagged", range(30, 40), 8, grammar=lark_grammar('start: <s> "ab"')),
    ]
    made = answered(run_until_idle(engine, {0: sequences}))
    for request in plain:
        assert made[request.sequence_id][1] == tiny_llama.expected(request)
    assert text_of(made["choice"][1]) in {"yes, it is", "no", "yes"}
    last, ids = made["logprobs"]
    assert ids == made["choice"][1]
    # They are the model's own: most of it lies on ids that the format forbids.
    assert all(own.logprob < own.alternatives[0][1] for own in last.logprobs)
    assert len(made["regex"][1]) == 8
    assert made["regex"][0].finish is FinishReason.LENGTH
    assert set(text_of(made["regex"][1])) <= set("abc")
    assert made["huge"][0].finish is FinishReason.FAILED
    assert made["huge"][0].failure is not None
    assert made["huge"][0].failure.reason == "GRAMMAR_FAILED"
    assert made["tagged"][1][:1] == (1,), made["tagged"]
    assert made["tagged"][0].finish is FinishReason.COMPLETE
    # Stepping ahead or not, the next step is launched before the ids of this one are known, and masked after.
    before = engine.stats().steps
    again = replace(regex, sequence_id="again")
    assert answered(run_until_idle(engine, {0: [again]}))["again"][1] == made["regex"][1]
    # A grammar that is late on a busy machine takes one more.
    assert engine.stats().steps - before in {8, 9}


def test_a_model_without_tokenizer_serves_no_formats(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Run
) -> None:
    request = tiny_llama.request("a", range(5), 4, grammar=regex_grammar("a"))
    (output,) = run_until_idle(make_engine(tiny_llama.directory, **ROOMY), {0: [request]})["a"]
    assert output.failure is not None
    assert "tokenizer.json" in output.failure.message
