"""`loraplex plan` on the shipped model, against the formulas written out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.contracts.artifacts import ArtifactError
from loraplex.worker import sizing
from loraplex.worker.engine import device
from loraplex.worker.plan import PlanSettings, as_lines, plan
from tests.worker.plan_command import run

MODEL = "examples/model"


def test_the_sizes_are_those_of_the_formulas() -> None:
    flags = ("--model", MODEL, "--context", "1024", "--batch", "8", "--adapters", "4", "--rank", "16")
    planned = json.loads(run(*flags, "--memory", "1GiB", "--json").stdout)
    assert planned["weight_bytes"] == planned["parameters"] * 2
    # 2 x 6 layers x 2 KV heads x 64 x 2 bytes
    assert planned["kv_bytes_per_token"] == 2 * 6 * 2 * 64 * 2
    assert planned["kv_bytes"] == 8 * 1024 * planned["kv_bytes_per_token"]
    # q and o are 256 x 256, k and v 256 x 128, gate, up and down 256 x 704; six layers, bfloat16
    assert planned["adapter_bytes"] == 16 * 6 * (2 * 512 + 2 * 384 + 3 * 960) * 2
    assert planned["adapter_slots_bytes"] == 4 * planned["adapter_bytes"]
    usable = int((2**30 - planned["weight_bytes"]) * 0.9) - planned["adapter_slots_bytes"]
    assert planned["sequences_fit"] == usable // (1024 * planned["kv_bytes_per_token"])
    double = json.loads(run(*flags, "--memory", "1GiB", "--dtype", "float32", "--json").stdout)
    assert double["kv_bytes_per_token"] == 2 * planned["kv_bytes_per_token"]


@pytest.mark.parametrize("memory", ["5MiB", "20MiB", "100MiB", "140MiB", "180MiB", "1GiB"])
@pytest.mark.parametrize("flags", [{}, {"adapters": 0, "rank": 0}, {"batch": 2, "adapters": 4, "quantize": "int8"}])
def test_a_plan_does_not_contradict_itself(memory: str, flags: dict[str, Any]) -> None:
    planned = plan(PlanSettings(MODEL, memory=memory, **flags))
    fits = planned.needed_bytes <= planned.memory_bytes
    assert fits == (planned.sequences_fit >= planned.batch)
    assert fits == (planned.adapters_fit >= planned.adapters) or not planned.adapters
    assert planned.context == 1024, "the model's own: it takes no longer ones"
    assert planned.needed_bytes == (
        planned.weight_bytes + planned.kv_bytes + planned.adapter_slots_bytes + planned.spare_bytes
    )
    assert planned.needed_bytes <= planned.device_at_least_bytes < planned.device_recommended_bytes
    assert planned.needed_bytes <= planned.host_recommended_bytes


def test_quantized_weights_leave_room() -> None:
    given, int8 = plan(PlanSettings(MODEL)), plan(PlanSettings(MODEL, quantize="int8"))
    # Six layers: q and o are 256 x 256, k and v 256 x 128, gate, up and down 256 x 704; a scale for each output.
    inner, outputs = 6 * 256 * (2 * 256 + 2 * 128 + 3 * 704), 6 * (2 * 256 + 2 * 128 + 2 * 704 + 256)
    assert given.weight_bytes - int8.weight_bytes == inner - 4 * outputs
    assert (int8.parameters, int8.kv_bytes, int8.quantization) == (given.parameters, given.kv_bytes, "int8")
    assert given.needed_bytes - int8.needed_bytes == given.weight_bytes - int8.weight_bytes


def test_a_kv_cache_of_8_bits_holds_more_sequences() -> None:
    given, int8 = (plan(PlanSettings(MODEL, memory="1GiB", kv_cache_dtype=name)) for name in ("", "int8"))
    # Codes, and four bytes of a scale for each of six layers, two KV heads, keys and values.
    assert int8.kv_bytes_per_token == 2 * 6 * 2 * (64 + 4)
    assert given.weight_bytes == int8.weight_bytes
    assert int8.sequences_fit > 1.8 * given.sequences_fit
    assert "KV per token        3 KiB\n" in as_lines(given)
    assert "KV per token        1.59 KiB in int8" in as_lines(int8)


def test_an_encoder_keeps_nothing_of_a_text(tmp_path: Path) -> None:
    config = {"model_type": "bert", "max_position_embeddings": 16, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"embeddings.word_embeddings.weight": (32, 8), "encoder.layer.0.intermediate.dense.weight": (24, 8)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    planned = plan(PlanSettings(str(tmp_path), adapters=2, rank=4, batch=5, quantize="int8"))
    assert (planned.kv_bytes, planned.sequences_fit, planned.adapter_bytes) == (0, 5, 4 * 32 * 4)
    assert planned.weight_bytes == 32 * 8 * 4 + 24 * 8 + 24 * 4


def test_slots_for_experts_have_room_for_each(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "vocab_size": 32,
        "num_local_experts": 4, "intermediate_size": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    shapes = {"model.embed_tokens": (32, 8), "lm_head": (32, 8), f"{layer}.block_sparse_moe.gate": (4, 8)}
    shapes |= {f"{layer}.self_attn.{name}_proj": (8, 8) for name in "qo"}
    shapes |= {f"{layer}.self_attn.{name}_proj": (4, 8) for name in "kv"}
    for number in range(4):
        expert = f"{layer}.block_sparse_moe.experts.{number}"
        shapes |= {f"{expert}.w1": (16, 8), f"{expert}.w3": (16, 8), f"{expert}.w2": (8, 16)}
    save_file(
        {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    linears = 2 * (8 + 8) + 2 * (8 + 4)
    for rank in (0, 2):
        planned = plan(PlanSettings(str(tmp_path), rank=4, max_expert_rank=rank))
        # Gate and up are one tensor of each expert.
        assert planned.adapter_bytes == 4 * (4 * linears + rank * 4 * ((8 + 32) + (16 + 8)))


def test_the_memory_of_this_machine_is_what_its_control_group_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n")
    monkeypatch.setattr(sizing, "CONTROL_GROUP", tmp_path)
    assert plan(PlanSettings(MODEL)).memory_bytes == 200 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert plan(PlanSettings(MODEL)).memory_bytes > 200 << 20


@pytest.mark.parametrize(
    ("limit", "threads"), [("12000 100000", 1), ("150000 100000", 2), ("800000 100000", 4), ("max 100000", 4), ("", 4)]
)
def test_an_engine_has_as_many_threads_as_its_control_group_lets_it_keep_busy(
    limit: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(sizing, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(device, "_CORES", 4)
    assert device.step_threads(100_000_000, 0) == threads
    assert device.step_threads(100_000_000, 3) == 3


@pytest.mark.parametrize(
    ("own", "memory", "planned"),
    [
        ("float16", "", "bfloat16"),  # as an engine on this machine's CPU
        ("float16", "80GiB", "float16"),
        ("float32", "", "float32"),
        (None, "", "bfloat16"),  # as the files have it
    ],
)
def test_the_numbers_are_those_that_an_engine_computes_in(
    own: str | None, memory: str, planned: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": own}))
    assert plan(PlanSettings(str(directory), memory=memory)).dtype == planned


def test_a_dtype_that_no_engine_computes_in_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float8"}))
    with pytest.raises(ArtifactError, match="dtype 'float8' is not supported"):
        plan(PlanSettings(str(directory)))


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    done = run("--model", MODEL, "--memory", "20MiB")
    assert done.returncode == 0
    assert "does not fit" in done.stdout
    assert "missing" in done.stdout


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--model", "nowhere"), "error: --model: 'nowhere' is not a directory; a model is"),
        (("--model", MODEL, "--memory", "much"), "error: --memory much: not a size such as 80GiB or 24GB"),
        (("--model", MODEL, "--batch", "0"), "error: --batch 0: at least 1"),
        (("--model", MODEL, "--dtype", "int3"), "error: --dtype int3: not one of"),
        (("--model", MODEL, "--quantize", "int3"), "error: --quantize: 'int3' is not one of int8, "),
        (("--model", MODEL, "--kv-cache-dtype", "int4"), "error: --kv-cache-dtype: 'int4' is not int8; "),
        ((), "error: missing setting: give --model"),
    ],
)
def test_a_mistake_is_one_line(flags: tuple[str, ...], line: str) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
