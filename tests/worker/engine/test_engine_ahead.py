"""Stepping ahead in the torch engine, and steps for which memory is not enough, in both modes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.worker.engine.device import is_out_of_memory
from loraplex.worker.engine.model.runner import Launched, Runner
from loraplex.worker.engine.sampling.step import InFlight, Sampled
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine_api import NewSequence, Output

pytestmark = pytest.mark.model

SETTINGS = {"rows": 6, "kv_blocks": 60, "block_size": 4, "step_tokens": 24, "adapter_slots": 3, "max_rank": 16}
# More than there are addresses.
TOO_MANY_BYTES = 1 << 52


BOTH_MODES = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode; BOTH_MODES marks what is shown in the other one too."""
    return True


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def uneven_requests(tiny: Any, count: int) -> list[NewSequence]:
    chance = random.Random(4)
    adapters = [None, *tiny.adapters]
    requests = []
    for number in range(count):
        prompt = [chance.randrange(3, 320) for _ in range(chance.choice([1, 8, 30, 52]))]
        requests.append(tiny.request(f"r{number}", prompt, chance.randrange(2, 25), adapters[number % 4]))
    return requests


@BOTH_MODES
def test_a_step_is_launched_before_the_last_one_is_collected(
    tiny_llama: Any, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    launch, collect = Runner.launch, InFlight.collect
    events: list[tuple[str, int]] = []
    batches: list[Batch] = []

    def watched_launch(runner: Runner, batch: Batch) -> Launched:
        events.append(("launch", len(batches)))
        batches.append(batch)
        return launch(runner, batch)

    def watched_collect(step: InFlight) -> Sampled:
        events.append(("collect", next(index for index, one in enumerate(batches) if one is step.batch)))
        return collect(step)

    monkeypatch.setattr(Runner, "launch", watched_launch)
    monkeypatch.setattr(InFlight, "collect", watched_collect)
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    request = tiny_llama.request("a", (5, 6, 7), 3)
    engine.add_sequence(request)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert ids(outputs) == tiny_llama.expected(request)
    in_turn = [(what, step) for step in range(3) for what in ("launch", "collect")]
    one_ahead = [("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2), ("collect", 1), ("collect", 2)]
    assert events == (one_ahead if ahead else in_turn)


def test_sequences_that_go_and_come_while_a_step_is_in_flight(tiny_llama: Any, make_engine: Callable[..., Any]) -> None:
    """Aborted at any moment, and another one added under the same name: nothing of the old one is told of it."""
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    company = tiny_llama.request("company", (9, 8, 7), 30, "plain")
    engine.add_sequence(company)
    outputs: dict[str, list[Output]] = {"company": [], "a": []}
    prompts = [(5, 6, 7), (40, 41), (5, 6, 7, 8, 9)]
    for steps in range(1, 7):
        request = tiny_llama.request("a", prompts[steps % 3], 12, "rslora" if steps % 2 else None)
        engine.add_sequence(request)
        outputs["a"] = []
        for _ in range(steps):
            for output in engine.step():
                outputs[output.sequence_id].append(output)
        assert ids(outputs["a"]) == tiny_llama.expected(request)[: len(ids(outputs["a"]))]
        engine.abort("a")
    while engine.has_work():
        for output in engine.step():
            outputs[output.sequence_id].append(output)
    assert ids(outputs["company"]) == tiny_llama.expected(company)
    assert engine.stats().blocks_referenced == 0


@BOTH_MODES
@pytest.mark.parametrize("what", ["penalties", "bad words"])
def test_a_choice_that_depends_on_the_ids_before_sees_all_of_them_in_every_step(
    what: str, tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """Beside rows that step ahead; against the same request alone in an engine that does not."""
    plain = tiny_llama.request("p", range(40, 60), 30)
    answer = tiny_llama.expected(plain)
    words = tuple(zip(answer[2:20:3], answer[3:21:3], strict=True))
    samplings = {"penalties": SamplingParams(repetition_penalty=1.3), "bad words": SamplingParams(bad_word_ids=words)}
    asked = replace(plain, sampling=samplings[what])
    alone = make_engine(tiny_llama.directory, **SETTINGS, ahead=False)
    truth = ids(run_until_idle(alone, {0: [asked]})["p"])
    assert truth != answer, "the option was to matter"
    company = uneven_requests(tiny_llama, 5)
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    outputs = run_until_idle(engine, {0: [*company, asked]})
    assert ids(outputs["p"]) == truth
    for request in company:
        assert ids(outputs[request.sequence_id]) == tiny_llama.expected(request)
    before = engine.stats().steps
    run_until_idle(engine, {0: [replace(asked, sequence_id="again", tenant="b")]})
    assert engine.stats().steps - before == 30, "a step for each token"


# ---- memory


def allocator_fails() -> None:
    torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)


def device_is_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def python_is_full() -> None:
    raise MemoryError


class Shortage:
    """A model that runs out of memory, behind its layers, in every step of more than `tokens` tokens."""

    def __init__(self, engine: Any, tokens: int, happen: Callable[[], None] = allocator_fails) -> None:
        self.tokens = tokens
        self.happen = happen
        self.times = 0
        self._compute = engine._runner._forward
        engine._runner._forward = self._forward

    def _forward(self, inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self._compute(inputs)
        if inputs.input_ids.shape[1] > self.tokens:
            self.times += 1
            self.happen()
        return logits


@pytest.mark.parametrize("happen", [allocator_fails, device_is_full, python_is_full])
def test_steps_that_do_not_fit_into_memory_are_made_smaller(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], happen: Callable[[], None]
) -> None:
    """Chunks are cut, rows are preempted, and every answer is what it is with memory enough."""
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    shortage = Shortage(engine, 3, happen)
    requests = uneven_requests(tiny_llama, 12)
    outputs = run_until_idle(engine, {0: requests[:8], 9: requests[8:]})
    assert {name: ids(some) for name, some in outputs.items()} == {
        request.sequence_id: tiny_llama.expected(request) for request in requests
    }
    assert shortage.times > 3


@BOTH_MODES
def test_who_does_not_fit_into_memory_alone_ends_alone(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    shortage = Shortage(engine, 0)
    requests = uneven_requests(tiny_llama, 5)
    outputs = run_until_idle(engine, {0: requests})
    for request in requests:
        (last,) = outputs[request.sequence_id]
        assert last.finish is FinishReason.FAILED
        assert last.failure
        assert (last.failure.code, last.failure.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    # Memory is there again: so is the engine.
    shortage.tokens = 1000
    outputs = run_until_idle(engine, {0: requests})
    for request in requests:
        assert ids(outputs[request.sequence_id]) == tiny_llama.expected(request)


def test_what_is_not_about_memory_fails_the_engine(tiny_llama: Any, make_engine: Callable[..., Any]) -> None:
    def mismatch() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    engine = make_engine(tiny_llama.directory, **SETTINGS)
    Shortage(engine, 0, mismatch)
    engine.add_sequence(tiny_llama.request("a", (5, 6), 4, stopping=StoppingParams(4)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine.step()
    assert not is_out_of_memory(ValueError("not enough memory"))
