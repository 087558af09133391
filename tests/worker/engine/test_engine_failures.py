"""Test that failures in the torch engine fail alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.worker.engine.sampling import step
from loraplex.worker.engine_api import AdapterSource, Failure, NewSequence, Output

pytestmark = pytest.mark.model

SETTINGS = {"rows": 8, "kv_blocks": 40, "block_size": 8, "adapter_slots": 4, "max_rank": 16}
PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture
def ahead() -> bool:
    """Step ahead, the harder mode."""
    return True


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


def failure(outputs: list[Output]) -> Failure:
    assert outputs[-1].finish is FinishReason.FAILED
    assert outputs[-1].failure is not None
    return outputs[-1].failure


def company(tiny: Any) -> list[NewSequence]:
    return [tiny.request(f"with {adapter}", PROMPT, 20, adapter) for adapter in (None, *tiny.adapters)]


def assert_undisturbed(tiny: Any, outputs: dict[str, list[Output]]) -> None:
    for request in company(tiny):
        assert ids(outputs[request.sequence_id]) == tiny.expected(request)


@pytest.fixture
def huge_adapter(tiny_llama: Any, save_adapter: Callable[..., None], tmp_path: Path) -> AdapterSource:
    """Finite weights whose products are not."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama.directory)
    save_adapter(model, tmp_path / "huge", seed=1, scale=1e19, r=8, target_modules=["q_proj", "v_proj", "up_proj"])
    return AdapterSource("digest of huge", str(tmp_path / "huge"))


def test_an_adapter_that_overflows_ends_its_own_sequences(
    tiny_llama: Any, huge_adapter: AdapterSource, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """In the same steps, and in blocks and slots that are used again after it."""
    engine = make_engine(tiny_llama.directory, **SETTINGS | {"kv_blocks": 16})
    few = StoppingParams(max_tokens=4)
    huge = [NewSequence(f"huge{n}", (7 + n, 8, 9, 10), adapter=huge_adapter, stopping=few) for n in range(3)]
    outputs = run_until_idle(engine, {0: company(tiny_llama), 4: huge[:1], 5: huge[1:]})
    assert_undisturbed(tiny_llama, outputs)
    for request in huge:
        assert failure(outputs[request.sequence_id]).code == "INTERNAL"
        assert failure(outputs[request.sequence_id]).reason == "NAN_LOGITS"
    assert_undisturbed(tiny_llama, run_until_idle(engine, {0: company(tiny_llama)}))


def test_infinite_weights_are_refused(
    tiny_llama: Any, save_adapter: Callable[..., None], make_engine: Callable[..., Any], tmp_path: Path,
    run_until_idle: Callable[..., Any],
) -> None:  # fmt: skip
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama.directory)
    save_adapter(model, tmp_path / "infinite", seed=1, scale=float("inf"), r=8, target_modules=["v_proj"])
    request = NewSequence("a", PROMPT, adapter=AdapterSource("infinite", str(tmp_path / "infinite")))
    outputs = run_until_idle(make_engine(tiny_llama.directory, **SETTINGS), {0: [request]})
    assert failure(outputs["a"]).code == "INVALID_ARGUMENT"
    assert "v_proj has values that are not finite" in failure(outputs["a"]).message


@pytest.fixture
def broken_adapters(tiny_llama: Any, tiny_qwen2: Any, make_tiny: Callable[..., Any], tmp_path: Path) -> dict[str, Path]:
    """By what is wrong with them."""
    deeper = make_tiny("llama", num_hidden_layers=4)
    wider = make_tiny("llama", intermediate_size=128)
    missing_file, biased, cut = (shutil.copytree(tiny_llama.adapters["plain"], tmp_path / name) for name in "abc")
    (missing_file / "adapter_model.safetensors").unlink()
    config = json.loads((biased / "adapter_config.json").read_text())
    (biased / "adapter_config.json").write_text(json.dumps(config | {"lora_bias": True}))
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[:-100])
    return {
        "layers.3": deeper.adapters["plain"],
        "the base has 64 and 96": wider.adapters["plain"],
        "has rank 16; this engine takes 8": tiny_llama.adapters["rslora"],
        "adapter_model.safetensors": missing_file,
        "lora_bias": biased,
        "cut short": cut,
    }


def test_adapters_that_can_not_be_loaded_say_why(
    tiny_llama: Any,
    broken_adapters: dict[str, Path],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    engine = make_engine(tiny_llama.directory, **SETTINGS | {"max_rank": 8})
    good = tiny_llama.request("good", PROMPT, 20, "plain")
    bad = [
        NewSequence(why, PROMPT, adapter=AdapterSource(why, str(directory)))
        for why, directory in broken_adapters.items()
    ]
    outputs = run_until_idle(engine, {0: [good], 3: bad})
    assert ids(outputs["good"]) == tiny_llama.expected(good)
    for why in broken_adapters:
        assert failure(outputs[why]).reason == "ADAPTER_UNLOADABLE"
        assert why in failure(outputs[why]).message
    codes = [failure(outputs[why]).code for why in broken_adapters]
    assert codes == ["FAILED_PRECONDITION"] * 3 + ["INVALID_ARGUMENT", "FAILED_PRECONDITION", "INVALID_ARGUMENT"]


def test_a_row_whose_sampling_raises_ends_alone(
    tiny_llama: Any,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request that is known does so; one that a later change lets through must not cost the others theirs."""
    from loraplex.worker.engine.sampling.sampler import row_key

    def raises_for_seed_13(seed: int, choice: int, position: int) -> tuple[int, int]:
        if seed == 13:
            raise ArithmeticError("unlucky")
        return row_key(seed, choice, position)

    monkeypatch.setattr("loraplex.worker.engine.sampling.sampler.row_key", raises_for_seed_13)
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    unlucky = NewSequence("unlucky", PROMPT, sampling=SamplingParams(temperature=1.0, seed=13))
    lucky = NewSequence(
        "lucky", PROMPT, sampling=SamplingParams(temperature=1.0, seed=14), stopping=StoppingParams(max_tokens=8)
    )
    outputs = run_until_idle(engine, {0: [*company(tiny_llama), unlucky, lucky]})
    assert_undisturbed(tiny_llama, outputs)
    assert outputs["lucky"][-1].finish is not FinishReason.FAILED
    assert failure(outputs["unlucky"]).reason == "SAMPLING_FAILED"


def test_sampling_that_runs_out_of_memory_makes_the_step_smaller_and_ends_nobody(
    tiny_llama: Any,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, sample = 0, step.sample

    def sample_few(logits: torch.Tensor, draws: Any) -> torch.Tensor:
        nonlocal times
        if len(logits) > 2:
            times += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(logits, draws)

    monkeypatch.setattr(step, "sample", sample_few)
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    assert_undisturbed(tiny_llama, run_until_idle(engine, {0: company(tiny_llama)}))
    assert times > 0
