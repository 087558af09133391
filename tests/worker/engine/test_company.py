"""An answer does not depend on its company: its ids and log probabilities are the same bits, in every dtype.

Each request alone, then in random batches of others: cut into chunks, over cached prefixes, preempted, continued from a
random token as after the death of a worker, and its ids scored as a prompt's. And each position of a text alone, then 1
to 16 of them in one step, as a chunk or as rows of one id. `make company` is the long form.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence, Output
from tests.tiny_models import VOCAB, TinyModel
from tests.worker.engine.model.tiny_families import make_model, wide_config
from tests.worker.engine.position_steps import Numbers, PositionSteps, Text
from tests.worker.engine.ranks.forked import fork_ranks

pytestmark = [pytest.mark.model, pytest.mark.timeout(7200)]

PROMPTS, COMPOSITIONS = (int(os.environ.get(name, few)) for name, few in (("PROMPTS", 4), ("COMPOSITIONS", 3)))
SEED = int(os.environ.get("SEED", "1"))
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int8-dynamic": {"dtype": "bfloat16", "quantize": "int8-dynamic"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "int4-dynamic": {"dtype": "bfloat16", "quantize": "int4-dynamic"},
    "KV cache in int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "two ranks": {"dtype": "bfloat16", "tensor_parallel": 2},
}
# Kinds of `make test`.
OFTEN = ("bfloat16", "int8-dynamic", "int4")
# Blocks for all, and blocks so few that sequences are preempted; a step takes all of a prompt, or parts of it.
ALONE: dict[str, Any] = {"rows": 1, "kv_blocks": 60, "block_size": 16, "step_tokens": 512}
BATCHES: Sequence[dict[str, Any]] = (
    {"rows": 24, "kv_blocks": 600, "block_size": 16, "step_tokens": 512},
    {"rows": 6, "kv_blocks": 100, "block_size": 8, "step_tokens": 48},
    {"rows": 12, "kv_blocks": 150, "block_size": 4, "step_tokens": 150},
)
Answer = list[tuple[int, float]]


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode."""
    return True


@pytest.fixture(scope="module")
def model(make_tiny: Callable[..., TinyModel]) -> TinyModel:
    """A model for prompts that are long enough for every way in which attention computes."""
    return make_tiny("qwen2", intermediate_size=128, max_position_embeddings=512)


def requests_of(chance: random.Random, vocab: int, adapters: Sequence[Any]) -> list[NewSequence]:
    """Half of the prompts have a prefix in common; in some of them an activated adapter counts from behind it."""
    prefix = [chance.randrange(3, vocab) for _ in range(70)]
    requests = []
    for number in range(PROMPTS):
        own = [chance.randrange(3, vocab) for _ in range(chance.choice((1, 9, 40, 120, 260)))]
        prompt, stopping = tuple(prefix * (number % 2) + own), StoppingParams(chance.randint(4, 12), ignore_eos=True)
        at = len(prefix) if number % 4 == 3 else 0
        for index, adapter in enumerate(adapters):
            request = NewSequence(f"{number} {index}", prompt, adapter=adapter, stopping=stopping, logprobs=0)
            if adapter is not None and at:
                activated = replace(adapter, invocation=prompt[at : at + 1])
                request = replace(request, adapter=activated, invoked_at=at)
            requests.append(request)
    return requests


def answers_of(
    outputs: dict[str, list[Output]], scored: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Answer]:
    """Each token with its log probability; the first ones of a `scored` answer were in its prompt."""
    answers: dict[str, Answer] = {}
    for name, some in outputs.items():
        assert some[-1].failure is None, some[-1].failure
        ids = [*(scored or {}).get(name, ()), *(token for output in some for token in output.token_ids)]
        logprobs = [one.logprob for output in some for one in (*output.prompt_logprobs, *output.logprobs)]
        answers[name] = list(zip(ids, logprobs, strict=True))
    return answers


def compositions(
    requests: Sequence[NewSequence], alone: dict[str, Answer]
) -> list[tuple[dict[str, Any], dict[int, list[NewSequence]]]]:
    """Draw settings of engines, and the steps before which requests arrive.

    Some were begun elsewhere. Of others the answer but its last token is in the prompt, to be scored.
    """
    drawn = []
    for number in range(COMPOSITIONS):
        chance = random.Random(SEED + number)
        arrivals: dict[int, list[NewSequence]] = {}
        for request in chance.sample(requests, len(requests)):
            emitted = tuple(token for token, _ in alone[request.sequence_id])
            kind, changes = chance.random(), dict[str, Any]()
            if kind < 0.4:
                changes = {"emitted_ids": emitted[: chance.randrange(1, len(emitted))]}
            elif kind < 0.6:
                changes = {"prompt_ids": (*request.prompt_ids, *emitted[:-1]), "prompt_logprobs": 0}
                changes |= {"prompt_logprobs_start": len(request.prompt_ids)}
                changes |= {"stopping": StoppingParams(1, ignore_eos=True)}
            at = chance.choice((0, 0, 1, 3, 9, 20))
            arrivals.setdefault(at, []).append(replace(request, **changes))
        drawn.append((BATCHES[number % len(BATCHES)], arrivals))
    return drawn


def check(
    directory: Any, settings: dict[str, Any], requests: Sequence[NewSequence], make_engine: Any, run_until_idle: Any
) -> None:
    print("seed", SEED)
    engine, alone = make_engine(directory, **ALONE, **settings), dict[str, Answer]()
    for request in requests:
        alone |= answers_of(run_until_idle(engine, {0: [request]}))
    engine.close()  # a process is in one group of ranks at a time
    for batch, arrivals in compositions(requests, alone):
        come = {one.sequence_id: one for some in arrivals.values() for one in some}
        begun = {name: len(one.emitted_ids) for name, one in come.items()}
        scored = {
            name: one.prompt_ids[one.prompt_logprobs_start :]
            for name, one in come.items()
            if one.prompt_logprobs is not None
        }
        engine = make_engine(directory, **batch, **settings)
        answers = answers_of(run_until_idle(engine, arrivals), scored)
        engine.close()
        assert answers == {name: alone[name][begun[name] :] for name in answers}


def check_positions(
    engine: Any, adapters: Sequence[AdapterSource | None], vocab: int, run_until_idle: Any, *, sampled: bool
) -> None:
    """Compute positions one by one, then up to 16 of a text in a step, by one thread and by two."""
    print("seed", SEED)
    chance = random.Random(SEED)
    # They come into slots, and stay there.
    brought = [
        NewSequence(str(number), (1,), adapter=adapter, stopping=StoppingParams(1, ignore_eos=True))
        for number, adapter in enumerate(adapters)
    ]
    run_until_idle(engine, {0: brought})
    slots = [-1 if adapter is None else engine.adapters.slots.slot_of(adapter.digest) for adapter in adapters]
    texts = [
        Text(f"{number} {slot}", tuple(chance.randrange(3, vocab) for _ in range(length)), slot)
        for number, length in enumerate([140, *(chance.choice((20, 60, 90)) for _ in range(min(PROMPTS // 2, 10)))])
        for slot in slots
    ]
    steps, threads = PositionSteps(engine._runner, vocab, sampled=sampled), torch.get_num_threads()
    alone: dict[str, list[Numbers]] = {text.name: steps.one_by_one(text) for text in texts}
    try:
        for number in range(COMPOSITIONS):
            torch.set_num_threads(1 + number % 2)
            seen: dict[str, set[int]] = {text.name: set() for text in texts}
            for text, at, numbers in steps.together(texts, random.Random(SEED + number)):
                assert numbers == alone[text.name][at], (text.name, at, number)
                seen[text.name].add(at)
            assert all(len(seen[text.name]) == len(text.ids) - 1 for text in texts)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_no_bit_of_a_position_depends_on_those_computed_with_it(
    kind: str, model: TinyModel, make_engine: Any, run_until_idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    adapters = [model.request("", [1], 1, adapter).adapter for adapter in (None, *model.adapters)]
    engine = make_engine(model.directory, rows=4, kv_blocks=700, block_size=8, step_tokens=64, **KINDS[kind])
    check_positions(engine, adapters, VOCAB, run_until_idle, sampled=True)


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_no_bit_of_an_answer_depends_on_its_company(
    kind: str, model: TinyModel, make_engine: Any, run_until_idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    sources = [model.request("", [1], 1, adapter).adapter for adapter in (None, *model.adapters)]
    requests = requests_of(random.Random(SEED), VOCAB, sources)
    check(model.directory, KINDS[kind], requests, make_engine, run_until_idle)


def save_family(family: str, directory: Any, save_adapter: Any) -> tuple[int, list[AdapterSource | None]]:
    """Save a family's model, and adapters of what it has; return the size of its vocabulary, and None and them."""
    config = wide_config(family)
    model = make_model(config, directory)
    adapters: list[AdapterSource | None] = [None]
    if family == "mixtral":
        # Two of experts; half of the prompts have theirs in common with another adapter's.
        for rank in (2, 3):
            directory = directory / f"rank {rank}"
            save_adapter(
                model,
                directory,
                rank,
                r=rank,
                target_modules=["q_proj"],
                target_parameters=["down_proj", "gate_up_proj"],
            )
            adapters.append(AdapterSource(directory.name, str(directory)))
    return config.vocab_size, adapters


# Forms that other kernels or torch compute: layer norms and plain MLPs, softcaps, experts with adapters, latent
# attention.
@pytest.mark.parametrize(
    "family",
    [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt2", "gemma2", "deepseek_v3")), "mixtral"],
)
@pytest.mark.parametrize("kind", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_nor_does_one_of_another_family(
    family: str, kind: str, tmp_path: Any, save_adapter: Any, make_engine: Any, run_until_idle: Any
) -> None:
    vocab, adapters = save_family(family, tmp_path, save_adapter)
    requests = requests_of(random.Random(SEED), vocab, adapters)
    check(tmp_path, KINDS[kind], requests, make_engine, run_until_idle)


# Latent attention, windows and softcaps, adapters of experts.
@pytest.mark.parametrize(
    "family",
    [name if name in ("deepseek_v3", "gemma2") else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
)
@pytest.mark.parametrize(
    "kind", ["bfloat16", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("float32", "KV cache in int8"))]
)
def test_nor_does_a_position_of_another_family(
    family: str, kind: str, tmp_path: Any, save_adapter: Any, make_engine: Any, run_until_idle: Any
) -> None:
    vocab, adapters = save_family(family, tmp_path, save_adapter)
    engine = make_engine(tmp_path, rows=4, kv_blocks=700, block_size=8, step_tokens=64, **KINDS[kind])
    # Compare logits alone: the test of kinds samples from them, which no family does in another way.
    check_positions(engine, adapters, vocab, run_until_idle, sampled=False)
