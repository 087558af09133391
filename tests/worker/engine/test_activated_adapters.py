"""Activated LoRA: the logits and the greedy tokens are peft's own, whatever else is in the batch and the prefix cache.

The base computes a prompt up to the last occurrence of the adapter's invocation, and the adapter what follows. What is
generated is not looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.options import Encode, StoppingParams
from loraplex.worker.engine.scheduling.sequence import check_sequence
from loraplex.worker.engine_api import AdapterSource, EngineLimits, NewSequence, Output, SequenceRefusedError
from tests.worker.engine.peft_oracle import VOCAB, PeftOracle

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

INVOCATIONS = {"checks": [3, 4], "rates": [3, 4, 5], "sums": [7]}
FAMILIES = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "qwen2": ["q_proj", "k_proj", "gate_proj", "lm_head"],
    "gpt2": ["c_attn", "c_fc"],
    "phi3": ["qkv_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "gemma3_text": ["q_proj", "o_proj", "up_proj"],
}
# Prompts in chunks of a few tokens; and blocks so few that sequences are preempted.
CHUNKED = {"rows": 8, "kv_blocks": 200, "block_size": 4, "adapter_slots": 3, "max_rank": 8, "step_tokens": 14}
LIMITS = EngineLimits(rows=4, max_tokens=64, max_rank=8, vocab_size=VOCAB, block_size=4, blocks=24, adapter_slots=2)
PREEMPTED = CHUNKED | {"kv_blocks": 17, "rows": 4, "step_tokens": 48}


def oracle_of(model_type: str, directory: Path) -> PeftOracle:
    targets, more = FAMILIES[model_type], {"fan_in_fan_out": True} if model_type == "gpt2" else {}
    kinds: dict[str, dict[str, Any]] = {
        name: {"r": 3 + number, "lora_alpha": 9, "target_modules": targets, "alora_invocation_tokens": tokens} | more
        for number, (name, tokens) in enumerate(INVOCATIONS.items())
    }
    kinds["plain"] = {"r": 5, "lora_alpha": 9, "target_modules": targets} | more
    kinds["DoRA"] = {"r": 4, "lora_alpha": 6, "target_modules": targets, "use_dora": True} | more
    return PeftOracle(model_type, directory, kinds, shape={"head_dim": 16})


def drawn(oracle: PeftOracle, chance: random.Random) -> dict[str, tuple[str | None, NewSequence]]:
    """Return requests by their name, with their adapter: conversations that meet, each with an invocation or two."""
    conversations = [chance.choices(range(8, VOCAB), k=count) for count in (5, 18, 33)]
    requests = {}
    for number, name in enumerate([*INVOCATIONS, "plain", "DoRA", None] * 2):
        prompt = [*chance.choice(conversations)]
        if tokens := INVOCATIONS.get(name or ""):
            if chance.random() < 0.5:
                prompt += [*tokens, *chance.choices(range(8, VOCAB), k=chance.randint(0, 6))]
            prompt += tokens
        prompt += chance.choices(range(8, VOCAB), k=chance.choice([0, 1, 6]))
        request = oracle.request(f"{number}: {name}", prompt, chance.randint(5, 9), name)
        # Rows whose log probabilities are asked for find nothing in the prefix cache.
        requests[request.sequence_id] = name, replace(request, prompt_logprobs=chance.choice([None, VOCAB]))
    return requests


def ids_of(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def check(
    oracle: PeftOracle, requests: Mapping[str, tuple[str | None, NewSequence]], outputs: Mapping[str, list[Output]]
) -> None:
    answers = {oracle.check(request, outputs[key], name) for key, (name, request) in requests.items()}
    assert len(answers) > len(requests) / 2, f"answers are to be diverse: {answers}"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_tokens_are_pefts_in_chunks_from_the_cache_and_after_preemptions(
    model_type: str, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """In one batch with ordinary adapters, DoRA and the base; fewer slots than adapters."""
    oracle, chance = oracle_of(model_type, tmp_path), random.Random(8)
    for settings in (CHUNKED, PREEMPTED):
        engine = make_engine(oracle.directory, **settings)
        for _ in range(2):
            requests = drawn(oracle, chance)
            outputs = run_until_idle(engine, {0: [request for _, request in requests.values()]})
            check(oracle, requests, outputs)
        stats = engine.stats()
        assert stats.prefix_hits > 0, "of the second batch"
        assert settings is CHUNKED or stats.preemptions > 0


def test_an_answer_goes_on_from_any_of_its_tokens(
    tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """A worker goes on with emitted ids, and finds no invocation in them, though they are one."""
    oracle = oracle_of("llama", tmp_path)
    engine, other = (make_engine(oracle.directory, **CHUNKED) for _ in range(2))
    request = oracle.request("whole", [9, 11, 3, 4, 8, 15, 16, 17, 18], 10, "checks")
    whole = oracle.check(request, run_until_idle(engine, {0: [request]})["whole"], "checks")
    for emitted in ((), whole[:1], whole[:4], whole[:9]):
        continued = replace(request, sequence_id="on", emitted_ids=emitted, prompt_logprobs=None)
        assert emitted + ids_of(run_until_idle(other, {0: [continued]})["on"]) == whole
    said = replace(request, sequence_id="said", emitted_ids=(3, 4), prompt_logprobs=None)
    answer = ids_of(run_until_idle(engine, {0: [said]})["said"])
    assert answer == oracle.greedy(said, "checks")


def test_five_checkers_after_one_conversation_share_the_bases_prefill(
    tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        f"number {number}": {"r": 2, "target_modules": ["q_proj", "up_proj"], "alora_invocation_tokens": [number, 6]}
        for number in range(5)
    }
    oracle = PeftOracle("qwen2", tmp_path, kinds)
    engine = make_engine(oracle.directory, rows=6, kv_blocks=100, block_size=16, adapter_slots=5, max_rank=2)
    conversation = random.Random(2).choices(range(8, VOCAB), k=97)
    answer = replace(oracle.request("answer", conversation, 6), prompt_logprobs=None)
    conversation += ids_of(run_until_idle(engine, {0: [answer]})["answer"])
    checkers = {
        name: replace(oracle.request(name, [*conversation, number, 6], 4, name), prompt_logprobs=None)
        for number, name in enumerate(kinds)
    }
    before = engine.stats().computed_tokens
    outputs = run_until_idle(engine, {0: list(checkers.values())})
    for name, request in checkers.items():
        oracle.check(request, outputs[name], name)
        assert outputs[name][0].cached_tokens == 96
    # Of each: the tokens behind the last whole block, and those of the answer but the last.
    assert engine.stats().computed_tokens - before == 5 * (len(conversation) + 2 - 96 + 3)


def test_a_place_that_has_no_invocation_is_refused_by_the_engine_too() -> None:
    """A router of an older version knows no activated adapters, and sends such a job."""
    source = AdapterSource("digest", "/adapters/checks", invocation=(3, 4))
    checks = NewSequence("checks", (1, 2, 3, 4, 5), adapter=source, stopping=StoppingParams(0), invoked_at=2)
    check_sequence(checks, LIMITS)
    wrong: list[dict[str, Any]] = [{"invoked_at": at} for at in (0, 3, -3, 9)]
    for change in (*wrong, {"adapter": None}, {"prompt_ids": (1, 2, 3)}):
        with pytest.raises(SequenceRefusedError, match="invoked_at: the adapter is not invoked at"):
            check_sequence(replace(checks, **change), LIMITS)
    with pytest.raises(SequenceRefusedError, match="encode: cannot use an activated adapter"):
        check_sequence(replace(checks, encode=Encode("embed", "last")), LIMITS)
