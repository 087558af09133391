"""bench.speculation without engines: its chats, what rows and ratios say, and the guesses of another tenant."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.rounds import Timed
from bench.speculation import AIMS, CASES, Case, Measured, area, ratios_of, rows_of
from bench.speculation_engine import NO_DRAFTS, ONE_FOR_ALL, OWN, Asked, Drafts, speculating
from bench.speculation_texts import WORKLOADS, conversations
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import NewSequence
from tests.drawn_schemas import byte_tokenizer


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_turn_follows_the_answers_before_it(workload: str) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(320))
    chats = conversations(workload, 6, 4)
    assert len({chat.turns[0] for chat in chats}) == 4, "texts follow each other, round and round"
    chat, before = chats[0], tuple[int, ...]()
    for turn in range(len(chat.turns)):
        prompt = chat.ask(tokenizer, turn)
        assert prompt[: len(before)] == before
        chat.answered(tokenizer, [7, 8])
        before = tuple(chat.ids)
    assert bool(chat.grammar) == (workload == "extract")
    if chat.schema:
        assert json.loads(chat.schema)["items"]["required"]


def test_every_aim_is_a_case_or_a_guess() -> None:
    run = {side: [Timed(10, seconds)] for side, seconds in (("without", 2.0), ("with", 1.0), ("vLLM, n-gram", 4.0))}
    measured = {case: Measured(run, Drafts(number=2, drafted=8, accepted=6)) for case in CASES}
    ratios = ratios_of(measured)
    assert {*ratios, "guess_from_chance"} == set(AIMS)
    assert (ratios["edit_1"], ratios["edit_1_over_ngram"]) == (2, 4)
    row = rows_of({Case("edit", 1): measured[Case("edit", 1)]})[0]
    assert (row["with"], row["drafted ids accepted"], row["tokens of a step with a draft"]) == (10, 0.75, 4)
    ours = {side: run[side] for side in ("without", "with")}
    assert not any("ngram" in key for key in ratios_of({case: Measured(ours) for case in CASES}))


def test_the_area_is_the_share_of_pairs_that_are_in_order() -> None:
    assert area([1, 2], [3, 4]) == 1
    assert area([3, 4], [1, 2]) == 0
    assert area([1, 2], [1, 2]) == 0.5


@pytest.mark.model
def test_answers_are_the_same_whosever_answers_drafts_come_from(tiny_llama: Any) -> None:
    asked = [
        NewSequence(tenant, tuple(range(9, 30)), tenant=tenant, stopping=StoppingParams(30, ignore_eos=True))
        for tenant in ("one", "another")
    ]
    answered = []
    for corpus in (NO_DRAFTS, OWN, ONE_FOR_ALL):
        with speculating(tiny_llama.directory, 8, corpus) as engine:
            run = engine.run(Asked(asked, 1))
        assert run.tokens == 60
        assert not run.drafts["one"].drafted or corpus != NO_DRAFTS
        answered.append(run.ids)
    assert answered[0] == answered[1] == answered[2]
