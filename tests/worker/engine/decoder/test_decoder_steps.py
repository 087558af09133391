"""Decoder layers kernel by kernel, and as programs, against the model's own modules."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from loraplex.contracts.options import StoppingParams
from loraplex.kernels import logits, threads
from loraplex.kernels.lora import compile_lora
from loraplex.kernels.program import Program
from loraplex.kernels.threads import recorded_calls, run_on_all_threads, run_on_this_thread
from loraplex.kernels.weight_vectors import FLOATS
from loraplex.worker.engine.decoder import steps
from loraplex.worker.engine.decoder.layer import RowOperators
from loraplex.worker.engine.decoder.steps import Rotations, _SharedMemory
from loraplex.worker.engine.linear.layer import PanelLinear, scratch_memory
from loraplex.worker.engine.lora.cpu import CpuGroup, CpuStep
from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine.torch_engine import adapter_layers
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence, Output
from tests.worker.engine.model.tiny_families import CRAMPED, LAST_ARRIVAL, PROMPTS, make_config, make_model

pytestmark = pytest.mark.model

LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj"]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that have run, each time."""
    ran: list[Program] = []
    run = Program.run

    def watched(program: Program) -> None:
        ran.append(program)
        run(program)

    monkeypatch.setattr(Program, "run", watched)
    return ran


@pytest.mark.parametrize(
    ("model_type", "threads", "kv_cache_dtype", "compiled"),
    [
        ("smollm3", 1, "", compile_lora),
        ("qwen3", 2, "int8", compile_lora),
        # A kernel for each product, as where tiles do not take some width.
        ("qwen3", 1, "", compile_lora.__wrapped__),
    ],
)
def test_programs_give_the_bits_of_the_kernels_one_by_one(
    model_type: str,
    threads: int,
    kv_cache_dtype: str,
    compiled: Callable[..., Any],
    tmp_path: Path,
    save_adapter: Callable[..., None],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    programs: list[Program],
) -> None:
    """With and without an adapter, chunked and preempted; that the answers are right, the families' oracles show."""
    model, sources = make_model(make_config(model_type), tmp_path / "model"), list[AdapterSource | None]([None])
    for name in ("one", "other"):
        save_adapter(model, tmp_path / name, len(name), r=4, target_modules=LINEARS)
        sources.append(AdapterSource(name, str(tmp_path / name)))
    requests = [
        NewSequence(f"{index}", prompt, adapter=sources[index % 3], stopping=StoppingParams(10), logprobs=2)
        for index, prompt in enumerate(PROMPTS)
    ]
    torch.set_num_threads(threads)
    monkeypatch.setattr("loraplex.worker.engine.lora.cpu.compile_lora", compiled)

    def answers() -> dict[str, list[Output]]:
        chosen = {"quantize": "int8", "kv_cache_dtype": kv_cache_dtype, "threads": threads}
        engine = make_engine(tmp_path / "model", **chosen, **CRAMPED)
        # Until the adapters are there, steps pass that depend on the clock.
        for first in requests[1:3]:
            run_until_idle(engine, {0: [replace(first, sequence_id="first", stopping=StoppingParams(1))]})
        outputs: dict[str, list[Output]] = run_until_idle(engine, {0: requests[:3], LAST_ARRIVAL: requests[3:]})
        # Steps of two rows with one adapter, then with two.
        for pair in (requests[:2], requests[1:3]):
            more = run_until_idle(engine, {0: pair})
            outputs |= {f"{pair[0].sequence_id}, {name}": again for name, again in more.items()}
        return outputs

    by_programs = answers()
    assert len(programs) >= 15
    assert len({id(program) for program in programs}) >= 5
    ran = len(programs)
    monkeypatch.setattr(steps, "_MOST_TOKENS", 0)
    assert answers() == by_programs
    assert len(programs) == ran


def test_no_answer_waits_for_kernels_over_its_logits(
    tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take seconds to compile, where no other process has."""
    logits.compile_best.cache_clear()
    make_model(make_config("qwen3"), tmp_path)
    engine = make_engine(tmp_path, **CRAMPED)
    monkeypatch.setattr(logits, "compile_kernel", None)
    outputs = run_until_idle(engine, {0: [NewSequence("a", PROMPTS[0], stopping=StoppingParams(2))]})["a"]
    assert [output.failure for output in outputs] == [None, None]


def test_products_in_bfloat16_are_recorded_with_the_rounding_of_their_inputs() -> None:
    linear = nn.Linear(64, 40, dtype=torch.bfloat16)
    layer = PanelLinear(linear, torch.bfloat16, FLOATS)
    group = CpuGroup(layer, 64, [40], 1, 4, torch.bfloat16, CpuStep())
    memory, x = _SharedMemory(torch.bfloat16), torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        with recorded_calls() as calls:
            y = memory.multiply("a name", group, x)
        assert len(calls) == 2
        Program(calls, [memory.operators.counter, scratch_memory()[1]]).run()
        assert torch.equal(y, group.compute(x))


@pytest.mark.parametrize(("model_type", "steps"), [("qwen3", True), ("gemma2", False), ("gpt2", False)])
def test_models_of_another_form_stay(
    model_type: str, steps: bool, tmp_path: Path, make_engine: Callable[..., Any]
) -> None:
    make_model(make_config(model_type), tmp_path)
    model = make_engine(tmp_path, **CRAMPED)._runner._module
    assert ("forward" in vars(model)) == ("forward" in vars(model.base_model)) == steps
    own = {type(module).__name__ for module in model.modules() if "forward" not in vars(module)}
    assert not any("RMSNorm" in name for name in own)


def test_layers_that_differ_at_late_positions_stay(tmp_path: Path, make_engine: Callable[..., Any]) -> None:
    """Ministral 3 multiplies queries beyond the context that it was first trained with."""
    config = make_config("ministral3")
    config.rope_parameters |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
    make_model(config, tmp_path)
    model = make_engine(tmp_path, **CRAMPED)._runner._module
    assert "forward" not in vars(model)


def test_rotations_are_those_of_the_module_whenever_they_are_computed(tmp_path: Path) -> None:
    make_model(make_config("llama"), tmp_path)
    rotary = load_model(str(tmp_path)).module.model.rotary_emb
    positions = torch.tensor([700, 0, 127, 128, 255, 3])
    early, late = Rotations(rotary, torch.float32), Rotations(rotary, torch.float32)
    early.rows(positions[1:3], 128)
    expected = torch.cat(rotary(torch.empty(0), positions[None]), -1)[0]
    for rotations in (early, late):
        assert torch.equal(rotations.rows(positions, 701), expected)


def test_a_model_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """Without the garbage collector, which does not see how large weights are."""
    make_model(make_config("qwen3"), tmp_path)
    gc.collect()
    gc.disable()
    try:
        loaded = load_model(str(tmp_path))
        adapter_layers(loaded, EngineConfig(str(tmp_path)))
        modules = [ref(module) for module in loaded.module.modules()]
        del loaded
        assert [type(module()).__name__ for module in modules if module() is not None] == []
    finally:
        gc.enable()


def test_a_thread_that_comes_late_makes_no_call_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do calls that have ended wait for it: here one thread makes all of them before the other comes."""

    def one_by_one(function: int, argument: bytes) -> None:
        run_on_this_thread(function, argument)
        run_on_this_thread(function, argument)

    monkeypatch.setattr(threads, "run_on_all_threads", one_by_one)
    operators, x, ones = RowOperators(torch.float32, shared=0), torch.ones(3, 40), torch.ones(3, 40)
    with recorded_calls() as calls:
        operators.add(x, ones, x)
        operators.add(x, ones, x)
    Program([calls[0], replace(calls[1], alone=True)], [operators.counter]).run()
    assert torch.equal(x, torch.full((3, 40), 3.0))


def test_calls_are_recorded_by_the_thread_that_asks_for_it_alone() -> None:
    with recorded_calls() as calls:
        run_on_all_threads(0, b"a")
        run_on_this_thread(0, b"b")
    assert [(call.argument, call.alone) for call in calls] == [(b"a", False), (b"b", True)]
