"""Drafts change no bit of an answer: ids, log probabilities and ends are those of an engine without drafts.

Most drafts come from a drafter that knows the answers, so that many of its ids are accepted; the others are any ids at
all: ones that a format forbids, bad words, end tokens.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.contracts.grammars.build import choices_grammar, json_grammar, regex_grammar
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams, TokenLogprobs
from loraplex.worker.engine.scheduling.admission import RunningSequences
from loraplex.worker.engine_api import Failure, NewSequence, Output, Removal, Speculation
from tests.drawn_schemas import byte_tokenizer
from tests.tiny_models import VOCAB, TinyModel
from tests.worker.engine.model.tiny_families import adaptable_modules, make_model, wide_config
from tests.worker.engine.ranks.forked import fork_ranks
from tests.worker.engine.scheduling.paged_model import Prophet

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("SEED", "1"))
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "KV cache in int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "two ranks": {"dtype": "bfloat16", "tensor_parallel": 2},
}
OFTEN = ("bfloat16",)
ROOMY: dict[str, Any] = {"rows": 40, "kv_blocks": 440, "block_size": 4, "step_tokens": 256, "max_rank": 16}
# Rows for few drafts, chunks of prompts, and blocks so few that sequences are preempted.
TIGHT: dict[str, Any] = ROOMY | {"rows": 7, "kv_blocks": 44, "step_tokens": 24}
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40),
    SamplingParams(temperature=1.2, typical_p=0.9, frequency_penalty=0.6, presence_penalty=0.4),
    SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.3, logit_bias=((77, 3.0), (5, -100.0))),
    SamplingParams(repetition_penalty=1.5, processed_logprobs=True),
    SamplingParams(temperature=0.7, top_n_sigma=2.0, allowed_token_ids=tuple(range(10, 60)), processed_logprobs=True),
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
GRAMMARS = (
    json_grammar(json.dumps(SCHEMA)),
    regex_grammar("[a-f]{3}-[0-9]{2,20}x"),
    choices_grammar(["alpha", "alphabet", "beta"]),
)
# What a client sees of an answer.
Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...], FinishReason | None, Failure | None]


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode."""
    return True


@pytest.fixture(scope="module")
def model(make_tiny: Callable[..., TinyModel]) -> TinyModel:
    model = make_tiny("qwen2", intermediate_size=128)
    (model.directory / "tokenizer.json").write_text(byte_tokenizer(VOCAB))
    return model


def drawn_requests(model: TinyModel, chance: random.Random, count: int) -> list[NewSequence]:
    """Every option that looks at earlier tokens, with and without adapters and formats; choices of one prompt."""
    requests = []
    for number in range(count):
        prompt = [chance.randrange(3, VOCAB) for _ in range(chance.choice((1, 6, 30, 70)))]
        sampling = replace(SAMPLINGS[number % len(SAMPLINGS)], seed=chance.randrange(1 << 64))
        if chance.random() < 0.3:
            words = tuple((one, two) for one in range(10, 20) for two in range(30, 36))
            sampling = replace(sampling, bad_word_ids=((12,), *words))
        most = chance.choice((1, 2, 9, 30, 60))
        stopping = StoppingParams(
            most,
            min_tokens=chance.choice((0, most // 2)),
            stop_token_ids=chance.choice(((), tuple(range(3, VOCAB, 9)))),
            ignore_eos=chance.random() < 0.5,
        )
        grammar = chance.choice(GRAMMARS) if number % 3 == 0 and not sampling.allowed_token_ids else ""
        adapter = chance.choice((None, *model.adapters))
        requests += [
            model.request(
                f"{number} {choice}", prompt, most, adapter, sampling=sampling, stopping=stopping, choice=choice,
                grammar=grammar, logprobs=chance.choice((None, 0, 4)), tenant=f"t{number % 2}",
            )
            for choice in range(chance.choice((1, 1, 3)))
        ]  # fmt: skip
    return requests


def answers_of(outputs: dict[str, list[Output]]) -> dict[str, Answer]:
    return {
        name: (
            tuple(token for output in some for token in output.token_ids),
            tuple(one for output in some for one in output.logprobs),
            some[-1].finish,
            some[-1].failure,
        )
        for name, some in outputs.items()
    }


def check(
    directory: Path, requests: list[NewSequence], settings: dict[str, Any], make_engine: Any, run_until_idle: Any
) -> None:
    """Compare engines with drafts with one without: roomy and tight, with good and bad guesses, begun elsewhere."""
    print("seed", SEED)
    engine = make_engine(directory, **ROOMY | settings)
    truth = answers_of(run_until_idle(engine, {0: requests}))
    engine.close()  # a process is in one group of ranks at a time
    ends = {finish for *_, finish, _ in truth.values()}
    assert ends >= {FinishReason.LENGTH, FinishReason.STOP, FinishReason.COMPLETE}
    for number, (limits, probability) in enumerate(((ROOMY, 0.9), (TIGHT, 0.95), (ROOMY, 0.3))):
        chance = random.Random(SEED + number)
        begun = {
            name: ids[: chance.randrange(len(ids))] if ids and chance.random() < 0.3 else ()
            for name, (ids, *_) in truth.items()
        }
        arrivals: dict[int, list[NewSequence]] = {}
        for request in chance.sample(requests, len(requests)):
            some = arrivals.setdefault(chance.choice((0, 0, 2, 5, 9)), [])
            some.append(replace(request, emitted_ids=begun[request.sequence_id]))
        engine = make_engine(directory, **limits | settings)
        engine._scheduler.drafter = prophet = Prophet(
            lambda sequence: truth[sequence.sequence_id][0], VOCAB, probability, chance
        )
        running = engine._scheduler._running

        def preempt(step: int, running: RunningSequences = running, often: bool = limits is TIGHT) -> None:
            """Besides those that lack blocks: how many these are depends on the answers."""
            if often and step % 9 == 8 and len(running) > 1:
                running.preempt(running.in_rank[-1])

        outputs = run_until_idle(engine, arrivals, preempt)
        stats = engine.stats()
        engine.close()
        for name, answer in answers_of(outputs).items():
            ids, logprobs, *end = truth[name]
            after = len(begun[name])
            assert answer == (ids[after:], logprobs[after:], *end), (name, number)
        print(f"{prophet.steps} steps of {stats.steps} had drafts: {stats.accepted} of {stats.drafted} ids accepted")
        told = [output for some in outputs.values() for output in some]
        assert sum(output.drafted for output in told) == stats.drafted
        assert sum(output.accepted for output in told) == stats.accepted
        assert stats.accepted > stats.drafted * probability / 8
        assert stats.preemptions or limits is not TIGHT


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_no_bit_of_an_answer_depends_on_drafts(
    kind: str, model: TinyModel, make_engine: Any, run_until_idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    check(model.directory, drawn_requests(model, random.Random(SEED), 24), KINDS[kind], make_engine, run_until_idle)


@pytest.mark.parametrize("ahead", [False])
def test_nor_in_an_engine_that_does_not_step_ahead(
    ahead: bool, model: TinyModel, make_engine: Any, run_until_idle: Any
) -> None:
    check(model.directory, drawn_requests(model, random.Random(SEED + 9), 12), {}, make_engine, run_until_idle)


def test_drafts_of_what_came_before_are_accepted(model: TinyModel, make_engine: Any, run_until_idle: Any) -> None:
    """With the drafter that is served: answers that were given before, of the same tenant and adapter."""
    requests = [
        model.request(f"{number}", (*range(20, 60), number), 40, adapter, stopping=StoppingParams(40, ignore_eos=True))
        for number in range(3)
        for adapter in (None, "plain")[: 1 + (number == 0)]
    ]
    requests = [replace(one, sequence_id=f"{index}", logprobs=0) for index, one in enumerate(requests)]
    truth = answers_of(run_until_idle(make_engine(model.directory, **ROOMY), {0: requests}))
    engine = make_engine(model.directory, **ROOMY, speculation=Speculation())
    for _ in range(2):
        assert answers_of(run_until_idle(engine, {0: requests})) == truth
    stats = engine.stats()
    print(stats.accepted, "of", stats.drafted, "accepted in", stats.steps, "steps")
    assert stats.accepted
    assert engine.forget_tenant("", ())["drafts"] == Removal(2 * len(requests))


def test_what_a_format_forces_is_a_draft(model: TinyModel, make_engine: Any, run_until_idle: Any) -> None:
    """Of a first answer, whose prompt has nothing of it. One byte a token: nothing splits otherwise."""
    schema = {"type": "object", "properties": {"a_long_name": {"type": "integer"}}, "required": ["a_long_name"]}
    request = model.request("a", (200, 210), 60, grammar=json_grammar(json.dumps(schema)), logprobs=2)
    truth = answers_of(run_until_idle(make_engine(model.directory, **ROOMY), {0: [request]}))
    engine = make_engine(model.directory, **ROOMY, speculation=Speculation())
    assert answers_of(run_until_idle(engine, {0: [request]})) == truth
    stats = engine.stats()
    print(stats.accepted, "of", stats.drafted, "accepted in", stats.steps, "steps")
    assert stats.accepted > 6


# Forms of attention, normalizations, MLPs and positions of their own: what the rows of a draft are computed by.
FORMS = (
    "cohere", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "llama", "minicpm3", "mixtral", "nemotron", "olmo2", "opt", "phi3", "qwen3", "qwen3_moe", "starcoder2",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FORMS)
def test_nor_in_another_family(
    family: str, kind: str, tmp_path: Path, save_adapter: Any, make_engine: Any, run_until_idle: Any
) -> None:
    config = wide_config(family)
    config.vocab_size, config.eos_token_id = VOCAB, 2  # as the other model has them: ids for all bytes, and an end
    model = make_model(config, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(byte_tokenizer(VOCAB))
    modules = adaptable_modules(tmp_path / "model", family)
    adapters = {f"rank {rank}": tmp_path / f"rank {rank}" for rank in (2, 4)}
    for rank, directory in zip((2, 4), adapters.values(), strict=True):
        input_first = FAMILIES[family].input_first
        save_adapter(model, directory, rank, r=rank, target_modules=modules, fan_in_fan_out=input_first)
    tiny = TinyModel(tmp_path / "model", adapters, None)
    check(tiny.directory, drawn_requests(tiny, random.Random(SEED), 24), KINDS[kind], make_engine, run_until_idle)
