"""The torch engine against transformers and peft, each request alone: the same ids, whatever the batch does."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.options import FinishReason, StoppingParams
from loraplex.worker.engine_api import NewSequence, Output, SequenceRefusedError

pytestmark = pytest.mark.model

VOCAB = 320
# Small enough that prompts are cut into chunks and running sequences take each other's blocks.
CRAMPED = {"rows": 6, "kv_blocks": 26, "block_size": 4, "step_tokens": 16, "adapter_slots": 3, "max_rank": 16}
ROOMY = {"rows": 16, "kv_blocks": 400, "block_size": 8, "adapter_slots": 3, "max_rank": 16}


BOTH_MODES = pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode; BOTH_MODES marks what is shown in the other one too."""
    return True


def uneven_requests(tiny: Any, count: int, seed: int) -> list[NewSequence]:
    chance = random.Random(seed)
    adapters = [None, *tiny.adapters]
    requests = []
    for number in range(count):
        prompt = [chance.randrange(3, VOCAB) for _ in range(chance.choice([1, 3, 8, 17, 30, 52]))]
        requests.append(tiny.request(f"r{number}", prompt, chance.randrange(2, 36), adapters[number % 4]))
    return requests


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


@BOTH_MODES
def test_a_busy_batch_gives_what_each_request_gives_alone(
    tiny: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    requests = uneven_requests(tiny, count=16, seed=5)
    expected = {request.sequence_id: tiny.expected(request) for request in requests}
    engine = make_engine(tiny.directory, **CRAMPED)
    arrivals = {0: requests[:5], 3: requests[5:6], 4: requests[6:9], 11: requests[9:14], 30: requests[14:]}
    waiting, preempted = [0], []

    def watch(step: int) -> None:
        now = engine.stats().rows_waiting
        preempted.append(step > max(arrivals) and now > waiting[0])
        waiting[0] = now

    outputs = run_until_idle(engine, arrivals, watch)
    assert {name: ids(some) for name, some in outputs.items()} == expected
    assert any(preempted), "the blocks were to be so few that sequences are preempted"


def test_the_oracles_answers_are_worth_comparing(tiny_llama: Any) -> None:
    answers = [tiny_llama.answer((5, 6, 7, 8, 9), 30, adapter) for adapter in (None, *tiny_llama.adapters)]
    assert len(set(answers)) == 4, "every adapter was to change the answer"
    assert all(len(set(one)) >= 5 for one in answers), f"answers repeat themselves: {answers}"


def test_a_roomy_batch_decodes_every_adapter_side_by_side(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """Long enough for all of them to be in a step together."""
    requests = uneven_requests(tiny_llama, count=13, seed=9)
    engine = make_engine(tiny_llama.directory, **ROOMY)
    outputs = run_until_idle(engine, {0: requests})
    assert {name: ids(some) for name, some in outputs.items()} == {
        request.sequence_id: tiny_llama.expected(request) for request in requests
    }


def test_more_adapters_than_slots_take_turns(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """A slot that held a large rank is given to a small one, and so on."""
    requests = uneven_requests(tiny_llama, count=12, seed=7)
    engine = make_engine(tiny_llama.directory, **ROOMY | {"adapter_slots": 1, "rows": 3})
    outputs = run_until_idle(engine, {0: requests})
    assert {name: ids(some) for name, some in outputs.items()} == {
        request.sequence_id: tiny_llama.expected(request) for request in requests
    }


def test_cached_blocks_change_no_token(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    prefix = [17 + number for number in range(40)]
    requests = [
        tiny_llama.request(f"{name}{number}", [*prefix, 100 + number], 12, adapter)
        for number in range(3)
        for name, adapter in (("base", None), ("tuned", "plain"))
    ]
    engine = make_engine(tiny_llama.directory, **ROOMY)
    # Wait until the adapter is loaded and both prompts are cached: steps do not measure how long that takes.
    outputs = run_until_idle(engine, {0: requests[:2]}) | run_until_idle(engine, {0: requests[2:]})
    assert {name: ids(some) for name, some in outputs.items()} == {
        request.sequence_id: tiny_llama.expected(request) for request in requests
    }
    assert [outputs[request.sequence_id][0].cached_tokens for request in requests] == [0, 0, 40, 40, 40, 40]


def test_a_continuation_goes_on_where_the_answer_stopped(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    whole = tiny_llama.request("whole", [9, 8, 7, 6, 5], 24, "rslora")
    expected = tiny_llama.expected(whole)
    engine = make_engine(tiny_llama.directory, **ROOMY)
    rest = [replace(whole, sequence_id=f"after {count}", emitted_ids=expected[:count]) for count in (1, 7, 16)]
    outputs = run_until_idle(engine, {0: rest})
    for request in rest:
        emitted = len(request.emitted_ids)
        assert ids(outputs[request.sequence_id]) == expected[emitted:]
        assert outputs[request.sequence_id][0].offset == emitted


def test_stop_tokens_and_min_tokens(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    prompt = [5, 6, 7, 8, 9]
    free = tiny_llama.answer(tuple(prompt), 30, None)
    stop = free[11]
    first = free.index(stop)
    engine = make_engine(tiny_llama.directory, **ROOMY)
    stopped = tiny_llama.request("stopped", prompt, 30, stopping=StoppingParams(max_tokens=30, stop_token_ids=(stop,)))
    held = tiny_llama.request(
        "held", prompt, 30, stopping=StoppingParams(max_tokens=30, min_tokens=first + 1, stop_token_ids=(stop,))
    )
    outputs = run_until_idle(engine, {0: [stopped, held]})
    assert ids(outputs["stopped"]) == free[: first + 1]
    assert outputs["stopped"][-1].finish is FinishReason.STOP
    assert ids(outputs["held"])[:first] == free[:first]
    assert ids(outputs["held"])[first] != stop


def test_the_models_end_token_ends_an_answer(
    make_tiny: Callable[..., Any], make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    prompt = (5, 6, 7, 8, 9)
    endless = make_tiny("llama", seed=2, eos_token_id=None)
    end = endless.answer(prompt, 20, "plain")[9]
    tiny = make_tiny("llama", seed=2, eos_token_id=[319, end])
    request = tiny.request("a", prompt, 20, "plain")
    engine = make_engine(tiny.directory, **ROOMY)
    ignoring = replace(request, sequence_id="b", stopping=StoppingParams(max_tokens=20, ignore_eos=True))
    outputs = run_until_idle(engine, {0: [request, ignoring]})
    assert ids(outputs["a"]) == tiny.expected(request)
    assert ids(outputs["a"])[-1] == end
    assert outputs["a"][-1].finish is FinishReason.END
    assert ids(outputs["b"]) == endless.answer(prompt, 20, "plain")


def test_aborted_sequences_leave_nothing_behind(tiny_llama: Any, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_llama.directory, **CRAMPED)
    requests = uneven_requests(tiny_llama, count=8, seed=3)
    for request in requests:
        engine.add_sequence(request)
    for _ in range(6):
        engine.step()
    for request in requests:
        engine.abort(request.sequence_id)
    engine.abort("unknown")
    stats = engine.stats()
    # A step that is in flight and adapters that are still being read are work, of which nothing is told.
    while engine.has_work():
        assert engine.step() == []
    assert (stats.rows_running, stats.rows_waiting, stats.blocks_referenced, stats.slots_pinned) == (0, 0, 0, 0)


def test_what_does_not_fit_is_refused_by_its_field(tiny_llama: Any, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(tiny_llama.directory, **CRAMPED)
    assert engine.limits.max_tokens == CRAMPED["kv_blocks"] * CRAMPED["block_size"]
    with pytest.raises(SequenceRefusedError, match="320 is not a token id") as refused:
        engine.add_sequence(tiny_llama.request("a", [VOCAB], 4))
    assert refused.value.field == "prompt_ids"
    with pytest.raises(SequenceRefusedError, match="more than the") as refused:
        engine.add_sequence(tiny_llama.request("a", [5], 200))
    assert refused.value.field == "stopping.max_tokens"


def test_bfloat16_with_packed_weights_runs(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    requests = uneven_requests(tiny_llama, count=12, seed=11)
    engine = make_engine(tiny_llama.directory, dtype="bfloat16", **ROOMY | {"kv_blocks": 0})
    assert engine.limits.max_tokens == 256
    outputs = run_until_idle(engine, {0: requests})
    for request in requests:
        # Rounding changes choices, and an end token may come: but nothing fails, and not all is one token.
        assert outputs[request.sequence_id][-1].finish in (FinishReason.LENGTH, FinishReason.END)
    assert len({token for some in outputs.values() for token in ids(some)}) > 20


# A machine that is lent for an hour has torch and transformers, and no package of the cluster's.
WITHOUT_THE_CLUSTER = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("llguidance", "redis", "grpc", "prometheus_client", "opentelemetry", "google"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import loraplex.worker.engine.process
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.torch_engine import build_engine
from loraplex.worker.engine_api import EngineConfig, NewSequence

engine = build_engine(EngineConfig(sys.argv[1], rows=2, kv_blocks=8))
engine.add_sequence(NewSequence("plain", (1, 2, 3), stopping=StoppingParams(4)))
engine.add_sequence(NewSequence("format", (1, 2, 3), stopping=StoppingParams(4), grammar='start: "a"'))
ended = {}
while len(ended) < 2:
    ended |= {output.sequence_id: str(output.finish) for output in engine.step() if output.finish}
engine.close()
print(json.dumps(ended))
"""


def test_the_engine_runs_without_the_packages_of_grammars_and_of_the_cluster(tiny_llama: Any) -> None:
    root = Path(__file__).parents[3]
    program = [sys.executable, "-c", WITHOUT_THE_CLUSTER, str(tiny_llama.directory)]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"plain": "length", "format": "failed"}
