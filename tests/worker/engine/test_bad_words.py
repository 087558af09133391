"""Token sequences that an answer cannot have: the torch engine against transformers, in company and after a crash."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.hash_engine import HashEngine
from loraplex.worker.engine.scheduling.sequence import BadWords
from loraplex.worker.engine_api import EngineConfig, NewSequence, Output
from tests.hash_oracle import expected_ids

PROMPT = (5, 6, 7, 8, 9)
SETTINGS = {"rows": 6, "kv_blocks": 60, "block_size": 4, "step_tokens": 24, "adapter_slots": 3, "max_rank": 16}


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def with_words(request: NewSequence, *words: tuple[int, ...], **sampling: Any) -> NewSequence:
    return replace(request, sampling=SamplingParams(bad_word_ids=words, **sampling))


def transformers_answer(tiny: Any, words: list[list[int]], tokens: int) -> tuple[int, ...]:
    """Return transformers' greedy answer without the words."""
    import torch

    with tiny.peft.disable_adapter(), torch.inference_mode():
        output = tiny.peft.generate(
            input_ids=torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            bad_words_ids=words,
        )
    return tuple(output[0, len(PROMPT) :].tolist())


@pytest.mark.model
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_answers_are_transformers_answers_and_go_on_after_a_crash(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], ahead: bool
) -> None:
    chance = random.Random(3)
    whole = tiny_llama.request("whole", PROMPT, 24)
    answer = tiny_llama.expected(whole)
    words: list[list[int]] = []
    requests, expected = [], []
    for number in range(6):  # each forbids a part of the answer before, too
        at = chance.randrange(1, 20)
        words.append(list(answer[at : at + (1, 2, 3, 2, 1, 3)[number]]))
        answer = transformers_answer(tiny_llama, words, 24)
        request = with_words(whole, *map(tuple, words))
        for count in (0, 9):
            requests.append(replace(request, sequence_id=f"{number}+{count}", emitted_ids=answer[:count]))
            expected.append(answer[count:])
    engine = make_engine(tiny_llama.directory, ahead=ahead, **SETTINGS)
    outputs = run_until_idle(engine, {0: requests})
    assert [ids(outputs[request.sequence_id]) for request in requests] == expected
    assert len(set(expected)) == len(expected), "every word was to change the answer"


@pytest.mark.model
def test_no_draw_completes_a_word(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    sampling = {"temperature": 1.5, "top_k": 6, "seed": 7}
    request = replace(tiny_llama.request("drawn", PROMPT, 40), stopping=StoppingParams(40, ignore_eos=True))
    words: list[tuple[int, ...]] = []
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    for number in range(8):
        one = replace(with_words(request, *words, **sampling), sequence_id=f"drawn {number}")
        answer = ids(run_until_idle(engine, {0: [one]})[one.sequence_id])
        assert not [word for word in words if any(answer[at : at + len(word)] == word for at in range(len(answer)))]
        words.append(answer[number * 3 : number * 3 + 1 + number % 3])


def test_the_hash_model_keeps_to_them_also_after_a_crash() -> None:
    model = "hash:?vocab=512&seed=4"
    words: list[tuple[int, ...]] = []
    stopping = StoppingParams(max_tokens=30, min_tokens=12, stop_token_ids=(8,))
    for number in range(9):
        sampling = SamplingParams(bad_word_ids=tuple(words))
        answer = expected_ids(model, PROMPT, sampling=sampling, stopping=stopping)
        engine = HashEngine(EngineConfig(model, rows=2, adapter_slots=1, step_tokens=16))
        for count in (0, 7):
            engine.add_sequence(NewSequence(f"{count}", PROMPT, answer[:count], sampling=sampling, stopping=stopping))
        made: dict[str, list[Output]] = {"0": [], "7": []}
        while engine.has_work():
            for output in engine.step():
                made[output.sequence_id].append(output)
        engine.close()
        assert [ids(made["0"]), ids(made["7"])] == [answer, answer[7:]]
        words.append(answer[number : number + 1 + number % 3])


def test_the_tree_finds_what_a_plain_look_at_every_word_finds() -> None:
    chance = random.Random(11)
    for _ in range(300):
        words = [tuple(chance.choices(range(3), k=chance.randint(1, 5))) for _ in range(chance.randint(0, 12))]
        prompt, answer = (chance.choices(range(3), k=chance.randint(1, 6)) for _ in range(2))
        answer = answer[chance.randint(0, len(answer)) :]
        plain = {
            word[-1]
            for word in words
            if len(word) <= len(answer) + 1 and answer[len(answer) - len(word) + 1 :] == list(word[:-1])
        }
        assert BadWords(words).after(prompt + answer, len(prompt)) == plain
