"""Log probabilities of the torch engine against one float64 forward pass of transformers over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams, TokenLogprobs
from loraplex.worker.engine_api import NewSequence, Output

pytestmark = pytest.mark.model

ROOMY = {"rows": 12, "kv_blocks": 400, "block_size": 4, "adapter_slots": 3, "max_rank": 16}
# Prompts come in chunks, and running sequences take each other's blocks.
CRAMPED = ROOMY | {"rows": 4, "kv_blocks": 30, "step_tokens": 11}
# Maximum error of a log probability, relative to the largest logit. A logit is a float32 sum of 64 products (the tiny
# models' hidden_size) in an order that differs between processors. Rounding such a sum costs at most 64 times eps / 2
# of the sum of the products' magnitudes, which is larger than the logit. Measured: 27 eps of the largest logit.
TOLERANCE = 64 * torch.finfo(torch.float32).eps
NOISY = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.3, logit_bias=((50, 4.0),), seed=5)


BOTH_MODES = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode; BOTH_MODES marks what is shown in the other one too."""
    return True


@pytest.fixture
def tiny(tiny_qwen2: Any) -> Any:
    """Return one model, whose output head shares the embeddings' weight."""
    return tiny_qwen2


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def true_logits(tiny: Any, sequence: Sequence[int], adapter: str | None) -> torch.Tensor:
    """[positions, vocab]: those of the token after each position."""
    if adapter is not None:
        tiny.peft.set_adapter(adapter)
    plain = tiny.peft.disable_adapter() if adapter is None else nullcontext()
    with plain, torch.inference_mode():
        logits: torch.Tensor = tiny.peft(input_ids=torch.tensor([sequence])).logits[0]
    return logits


def assert_true(
    told: Sequence[TokenLogprobs],
    tokens: Sequence[int],
    logits: torch.Tensor,
    alternatives: int,
    named: tuple[int, ...] = (),
) -> None:
    """`logits` [tokens, vocab] has the true logits of each token; `named` are the ids that were asked for."""
    assert len(told) == len(tokens) == len(logits)
    if not tokens:
        return
    atol, truth = TOLERANCE * float(logits.abs().max()), logits.log_softmax(-1)
    own = torch.tensor([one.logprob for one in told], dtype=torch.float64)
    torch.testing.assert_close(own, truth[range(len(tokens)), list(tokens)], rtol=0, atol=atol)
    for one, row in zip(told, truth, strict=True):
        values = torch.tensor([logprob for _, logprob in one.alternatives], dtype=torch.float64)
        assert not named or tuple(token for token, _ in one.alternatives) == named
        likeliest = row[list(named)] if named else row.topk(alternatives).values
        torch.testing.assert_close(values, likeliest, rtol=0, atol=atol)
        torch.testing.assert_close(values, row[[token for token, _ in one.alternatives]], rtol=0, atol=atol)


def requests_of(tiny: Any) -> list[NewSequence]:
    return [
        tiny.request("greedy", range(10, 41), 9, logprobs=3, prompt_logprobs=2),
        tiny.request("tuned", range(10, 41), 14, "plain", logprobs=0, prompt_logprobs=0, sampling=NOISY),
        tiny.request("cached", range(10, 41), 20, logprobs=20),
        tiny.request("named", range(30, 67), 15, "plain", logprobs=3, logprob_token_ids=(50, 0, 7), sampling=NOISY),
        tiny.request("noisy", range(30, 67), 12, logprobs=5, prompt_logprobs=20, sampling=NOISY),
        tiny.request("silent", range(30, 67), 18, sampling=NOISY),
        tiny.request("short", (7,), 16, logprobs=1, prompt_logprobs=1),
    ]


def check(tiny: Any, request: NewSequence, outputs: list[Output]) -> None:
    answer = request.emitted_ids + ids(outputs)
    adapter = Path(request.adapter.directory).name if request.adapter else None
    truth = true_logits(tiny, request.prompt_ids + answer[:-1], adapter)
    begin = len(request.prompt_ids)
    told = [one for output in outputs for one in output.logprobs]
    if request.logprobs is None:
        assert not told
    else:
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        new = begin - 1 + len(request.emitted_ids)
        assert_true(told, ids(outputs), truth[new:], request.logprobs, request.logprob_token_ids)
    of_prompt = [one for output in outputs for one in output.prompt_logprobs]
    if request.prompt_logprobs is None:
        assert not of_prompt
    else:
        assert_true(of_prompt, request.prompt_ids[1:], truth[: begin - 1], request.prompt_logprobs)
    first = next(index for index, output in enumerate(outputs) if output.token_ids)
    assert not any(output.prompt_logprobs for output in outputs[first + 1 :])


# Limits that keep at most 20 tokens, so that their alternatives are all that could come.
KEPT: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 0.7, "top_k": 12},
    "top_p": {"temperature": 0.05, "top_p": 0.8},
    "min_p": {"temperature": 0.3, "top_k": 20, "min_p": 0.1},
    "typical_p": {"temperature": 0.5, "top_k": 19, "typical_p": 0.7},
    "penalties": {
        **{"temperature": 1.3, "top_k": 15, "top_p": 0.95, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        **{"presence_penalty": -0.3, "logit_bias": ((50, 4.0), (51, -4.0))},
    },
    "allowed": {"temperature": 0.9, "allowed_token_ids": (3, 50, 51, 77)},
}


def drawn_from(logits: torch.Tensor, sampling: SamplingParams, answer: Sequence[int], prompt: Sequence[int]) -> Any:
    """The distribution that the token after an answer is drawn from: transformers' own steps, in float64."""
    scores = logits.double()[None].clone()
    for token, bias in sampling.logit_bias:
        scores[0, token] += bias
    seen: Any = torch.tensor([[*prompt, *answer]])
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores)
    for token in set(answer):
        scores[0, token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    if allowed := sampling.allowed_token_ids:
        scores[0, [token for token in range(scores.shape[-1]) if token not in allowed]] = -torch.inf
    if sampling.temperature:
        scores = TemperatureLogitsWarper(sampling.temperature)(seen, scores)
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
        ("typical_p", TypicalLogitsWarper),
    ):
        if (value := getattr(sampling, name)) != getattr(SamplingParams(), name):
            scores = warper(value)(seen, scores)
    return scores[0].log_softmax(-1)


@BOTH_MODES
def test_processed_logprobs_are_of_what_tokens_are_drawn_from(
    tiny: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    samplings = {name: SamplingParams(**options, seed=11) for name, options in KEPT.items()}
    samplings["greedy"] = SamplingParams(repetition_penalty=1.3)
    requests = [
        tiny.request(name, range(10, 41), 12, "plain", logprobs=20, sampling=replace(sampling, processed_logprobs=mode))
        for mode in (False, True)
        for name, sampling in ((f"{name} {mode}", sampling) for name, sampling in samplings.items())
    ]
    outputs = run_until_idle(make_engine(tiny.directory, **ROOMY), {0: requests})
    for request in requests:
        answer = ids(outputs[request.sequence_id])
        told = [one for output in outputs[request.sequence_id] for one in output.logprobs]
        truth = true_logits(tiny, request.prompt_ids + answer[:-1], "plain")[len(request.prompt_ids) - 1 :]
        if not request.sampling.processed_logprobs:  # the ids do not depend on what is told of them
            assert answer == ids(outputs[request.sequence_id.replace("False", "True")])
            assert_true(told, answer, truth, 20)
            continue
        for place, one in enumerate(told):
            row = drawn_from(truth[place], request.sampling, answer[:place], request.prompt_ids)
            kept = set(row.isfinite().nonzero()[:, 0].tolist())
            values = dict(one.alternatives)
            assert values[answer[place]] == one.logprob
            if request.sampling.temperature:
                assert values.keys() == kept
            atol = 2 * TOLERANCE * float(truth[place].abs().max()) / (request.sampling.temperature or 1.0)
            values_true = {token: float(row[token]) for token in values}
            assert values == pytest.approx(values_true, rel=0, abs=atol), (request.sequence_id, place)


@BOTH_MODES
@pytest.mark.parametrize("settings", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
def test_logprobs_are_the_models_own(
    tiny: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], settings: dict[str, int]
) -> None:
    """Sampled, penalized, chunked or preempted; later requests find the prompts in the cache."""
    requests = requests_of(tiny)
    later = [replace(request, sequence_id=f"later {request.sequence_id}") for request in requests]
    outputs = run_until_idle(make_engine(tiny.directory, **settings), {0: requests, 12: later})
    for request in requests + later:
        check(tiny, request, outputs[request.sequence_id])
    # Only where nobody asks for the prompt's logprobs.
    assert {output.cached_tokens for output in outputs["later greedy"]} == {None, 0}
    if settings is ROOMY:
        assert outputs["later cached"][0].cached_tokens == 28


@pytest.mark.parametrize("settings", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
def test_a_request_without_new_tokens_tells_of_the_end_of_its_prompt(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], settings: dict[str, int]
) -> None:
    """Score asks so: continuations of a prompt, which those after the first find in the cache."""
    prompt, none = tuple(range(10, 51)), StoppingParams(max_tokens=0)
    scored = [
        tiny_llama.request(f"{n}", (*prompt, *range(n, 3 * n)), 0, "plain", prompt_logprobs=1,
                           prompt_logprobs_start=len(prompt), stopping=none)
        for n in range(1, 8)
    ]  # fmt: skip
    whole = tiny_llama.request("whole", prompt, 0, prompt_logprobs=2, stopping=none)
    silent = tiny_llama.request("silent", prompt, 0, stopping=none)
    engine = make_engine(tiny_llama.directory, **settings)
    outputs = run_until_idle(engine, {0: [scored[0], silent]}) | run_until_idle(engine, {0: [*scored[1:], whole]})
    for request in [*scored, whole, silent]:
        of_prompt = [one for output in outputs[request.sequence_id] for one in output.prompt_logprobs]
        assert not ids(outputs[request.sequence_id])
        assert outputs[request.sequence_id][-1].finish is FinishReason.LENGTH
        start = max(1, request.prompt_logprobs_start)
        adapter = Path(request.adapter.directory).name if request.adapter else None
        truth = true_logits(tiny_llama, request.prompt_ids, adapter)[start - 1 : -1]
        if request.prompt_logprobs is None:
            assert not of_prompt
        else:
            assert_true(of_prompt, request.prompt_ids[start:], truth, request.prompt_logprobs)
    if settings is ROOMY:
        assert {outputs[one.sequence_id][0].cached_tokens for one in scored[1:]} == {40}
    engine.check()
    assert engine.stats().blocks_referenced == 0


def test_logprobs_change_no_token(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    asking = requests_of(tiny_llama)
    silent = [replace(request, logprobs=None, prompt_logprobs=None) for request in asking]
    answers = [
        {
            name: ids(some)
            for name, some in run_until_idle(make_engine(tiny_llama.directory, **CRAMPED), {0: some}).items()
        }
        for some in (asking, silent)
    ]
    assert answers[0] == answers[1]


def test_a_continuation_tells_of_its_new_tokens_and_of_the_prompt(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    request = tiny_llama.request("a", range(10, 31), 12, logprobs=2, prompt_logprobs=2, emitted_ids=(40, 41, 42, 43))
    outputs = run_until_idle(make_engine(tiny_llama.directory, **CRAMPED), {0: [request]})
    check(tiny_llama, request, outputs["a"])


def test_a_preempted_prompt_is_told_of_once(tiny_llama: Any, make_engine: Callable[..., Any]) -> None:
    """Preempted while its prompt was half computed: what was kept is not computed into the list again."""
    engine = make_engine(tiny_llama.directory, **ROOMY | {"kv_blocks": 24, "rows": 3, "step_tokens": 6})
    # These grow while the last one prefills in small chunks; the blocks do not hold all three.
    growing = [
        tiny_llama.request(f"g{n}", (5 + n, 6), 40, stopping=StoppingParams(40, ignore_eos=True)) for n in range(2)
    ]
    request = tiny_llama.request("p", [3 + n % 300 for n in range(70)], 4, prompt_logprobs=1, priority=-1)
    outputs: dict[str, list[Output]] = {one.sequence_id: [] for one in [*growing, request]}
    for one in [*growing, request]:
        engine.add_sequence(one)
    running = []
    while engine.has_work():
        for output in engine.step():
            outputs[output.sequence_id].append(output)
        running.append(0 if ids(outputs["p"]) else engine.stats().rows_running)
    assert (3, 2) in pairwise(running), "it was to be preempted before its first token"
    check(tiny_llama, request, outputs["p"])


def test_a_row_whose_logprobs_raise_ends_alone(
    tiny_llama: Any,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loraplex.worker.engine.sampling.step import PendingLogprobs, token_logprobs

    def raises_for_13(logits: torch.Tensor, tokens: torch.Tensor, alternatives: Sequence[int]) -> PendingLogprobs:
        if 13 in alternatives:
            raise ArithmeticError("unlucky")
        return token_logprobs(logits, tokens, alternatives)

    monkeypatch.setattr("loraplex.worker.engine.sampling.step.token_logprobs", raises_for_13)
    unlucky = [
        tiny_llama.request("answer", (5, 6), 5, logprobs=13),
        tiny_llama.request("prompt", (5, 6), 5, prompt_logprobs=13),
    ]
    lucky = tiny_llama.request("lucky", (5, 6, 7), 12, logprobs=2, prompt_logprobs=2)
    outputs = run_until_idle(make_engine(tiny_llama.directory, **ROOMY), {0: [*unlucky, lucky]})
    check(tiny_llama, lucky, outputs["lucky"])
    for name in ("answer", "prompt"):
        (last,) = outputs[name]
        assert last.finish is FinishReason.FAILED
        assert last.failure is not None
        assert last.failure.reason == "SAMPLING_FAILED"
