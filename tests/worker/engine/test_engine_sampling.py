"""Seeded sampling in the torch engine: the same ids alone, in company, after a preemption, and after a crash."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine_api import NewSequence, Output

pytestmark = pytest.mark.model

ROOMY = {"rows": 12, "kv_blocks": 400, "block_size": 4, "adapter_slots": 3, "max_rank": 16}
CRAMPED = ROOMY | {"rows": 5, "kv_blocks": 22, "step_tokens": 9}
SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8, top_n_sigma=3.0),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.3, logit_bias=((77, 3.0), (5, -100.0))),
    SamplingParams(temperature=1.2, typical_p=0.9, frequency_penalty=0.6, presence_penalty=0.4),
]


BOTH_MODES = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode; BOTH_MODES marks what is shown in the other one too."""
    return True


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


@pytest.fixture
def tiny(tiny_llama: Any) -> Any:
    """Return one model: what is drawn depends on its logits, which test_engine.py compares for both."""
    return tiny_llama


@pytest.fixture
def requests(tiny: Any) -> list[NewSequence]:
    chance = random.Random(21)
    adapters = [None, *tiny.adapters]
    return [
        tiny.request(
            f"r{number}",
            [chance.randrange(3, 320) for _ in range(chance.choice([2, 9, 23]))],
            24,
            adapters[number % 4],
            sampling=replace(SAMPLINGS[number // 2], seed=chance.randrange(1 << 64)),
            choice=number % 3,
        )
        for number in range(2 * len(SAMPLINGS))
    ]


@pytest.fixture
def alone(
    tiny: Any,
    requests: list[NewSequence],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    answers_alone: dict[object, dict[str, tuple[int, ...]]],
) -> dict[str, tuple[int, ...]]:
    """The answers of an engine that does not step ahead."""
    if tiny.directory not in answers_alone:
        engine = make_engine(tiny.directory, ahead=False, **ROOMY)
        answers_alone[tiny.directory] = {
            request.sequence_id: ids(run_until_idle(engine, {0: [request]})[request.sequence_id])
            for request in requests
        }
    return answers_alone[tiny.directory]


@pytest.fixture(scope="module")
def answers_alone() -> dict[object, dict[str, tuple[int, ...]]]:
    """The answers of each model, made once."""
    return {}


@BOTH_MODES
def test_company_chunks_and_preemption_change_no_draw(
    tiny: Any,
    requests: list[NewSequence],
    alone: dict[str, tuple[int, ...]],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    assert len(set(alone.values())) == len(requests)
    for settings in (ROOMY, CRAMPED):
        engine = make_engine(tiny.directory, **settings)
        outputs = run_until_idle(engine, {0: requests[:4], 2: requests[4:9], 9: requests[9:]})
        assert {name: ids(some) for name, some in outputs.items()} == alone
        again = replace(requests[3], sequence_id="again")
        assert ids(run_until_idle(engine, {0: [again]})["again"]) == alone[requests[3].sequence_id]


def test_a_continuation_draws_what_the_whole_answer_drew(
    tiny: Any,
    requests: list[NewSequence],
    alone: dict[str, tuple[int, ...]],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    rest = [
        replace(request, emitted_ids=alone[request.sequence_id][: 1 + number])
        for number, request in enumerate(requests)
        if len(alone[request.sequence_id]) > 1 + number
    ]
    outputs = run_until_idle(make_engine(tiny.directory, **CRAMPED), {0: rest})
    for request in rest:
        assert request.emitted_ids + ids(outputs[request.sequence_id]) == alone[request.sequence_id]


def test_seed_and_choice_each_change_the_answer(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    variants = [
        tiny_llama.request(f"{seed}/{choice}", [5, 6, 7], 12, sampling=SamplingParams(1.0, seed=seed), choice=choice)
        for seed in (0, 1, 1 << 63)
        for choice in (0, 1, 2)
    ]
    outputs = run_until_idle(make_engine(tiny_llama.directory, **ROOMY), {0: variants})
    assert len({ids(some) for some in outputs.values()}) == len(variants)


@pytest.mark.parametrize("bias", [{}, {17: 2.5, 120: -4.0}])
def test_greedy_penalties_give_what_transformers_generates(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], bias: dict[int, float]
) -> None:
    """Once whole, and once as a continuation of what another worker began."""
    import torch

    prompts = [(5, 6, 7), tuple(range(40, 60)), (9, 9, 9, 9, 8)]
    penalized = SamplingParams(repetition_penalty=1.3, logit_bias=tuple(bias.items()))
    requests = [
        tiny_llama.request(str(number), prompt, 30, sampling=penalized, stopping=StoppingParams(30, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    truth = {}
    for request in requests:
        with tiny_llama.peft.disable_adapter(), torch.inference_mode():
            whole = tiny_llama.peft.generate(
                input_ids=torch.tensor([request.prompt_ids]),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
                repetition_penalty=1.3,
                sequence_bias={(token,): value for token, value in bias.items()} or None,
            )
        truth[request.sequence_id] = tuple(whole[0, len(request.prompt_ids) :].tolist())
        plain = replace(request, sampling=SamplingParams())
        assert truth[request.sequence_id] != tiny_llama.expected(plain), "the penalty was to matter"
    outputs = run_until_idle(make_engine(tiny_llama.directory, **CRAMPED), {0: requests})
    assert {name: ids(some) for name, some in outputs.items()} == truth
    rest = [replace(request, emitted_ids=truth[request.sequence_id][:13]) for request in requests]
    outputs = run_until_idle(make_engine(tiny_llama.directory, **CRAMPED), {0: rest})
    assert {name: ids(some) for name, some in outputs.items()} == {name: whole[13:] for name, whole in truth.items()}
