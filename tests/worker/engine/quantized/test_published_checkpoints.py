"""Checkpoints that come quantized: read as their tools mean them, or refused by the field or the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.quantization import EIGHTHS
from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine.quantized.layers import QuantizedLinear
from loraplex.worker.engine_api import ModelUnusableError
from tests.worker.engine.quantized import published_layouts as layouts

pytestmark = pytest.mark.usefixtures("one_thread")

Layer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def compressed_config(name: str, **group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": layouts.config_group(**group)}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def packed(bits: int, group: int, *, symmetric: bool) -> tuple[dict[str, Any], Layer]:
    def layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = layouts.rounded(weight, bits, group, symmetric=symmetric)
        # llm-compressor stores scales in the model's dtype.
        scales = scales.bfloat16().float() if symmetric else scales
        of = codes, scales, zeros
        return layouts.compressed(of, bits, symmetric=symmetric), layouts.numbers(of, group)

    return compressed_config("pack-quantized", bits=bits, group=group, symmetric=symmetric), layer


def eighths_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The layout of this project's copies of 4 bits, with any zero points."""
    codes, scales, zeros = layouts.rounded(weight, 4, 32)
    eighths = (8 * zeros + torch.arange(zeros.numel()).view_as(zeros) % 8).clamp(max=120)
    parts = layouts.compressed((codes, scales, zeros), 4, symmetric=False)
    floats = layouts.numbers((codes, scales, eighths / 8), 32)
    return parts | {"weight_zero_point": eighths.to(torch.uint8)}, floats


def int8_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    of = layouts.rounded(weight, 8, 0)
    return layouts.int_quantized(of), layouts.numbers(of, 0)


def fp8_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def whole_tensor_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax().reshape(1) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def awq_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    of = layouts.rounded(weight, 4, 32)
    return layouts.awq(of), layouts.numbers(of, 32)


def gptq(bits: int, group: int, version: str) -> tuple[dict[str, Any], Layer]:
    def layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = layouts.rounded(weight, bits, group)
        # The first version can't store a zero point of 0: one is taken off.
        of = codes, scales, zeros.clamp(min=1)
        return layouts.gptq(of, bits, group, less=1 if version == "gptq" else 0), layouts.numbers(of, group)

    fields = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": False}
    return fields | {"checkpoint_format": version}, layer


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT8 = compressed_config("int-quantized", bits=8, group=0, symmetric=False)
WHOLE = compressed_config("naive-quantized", bits=8, group=0, symmetric=True)
WHOLE["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
CASES: dict[str, tuple[dict[str, Any], Layer]] = {
    "int4": packed(4, 32, symmetric=False),
    "int4-symmetric": packed(4, 32, symmetric=True),
    "int4 in eighths": (compressed_config(EIGHTHS, bits=4, group=32, symmetric=False), eighths_layer),
    "int8": packed(8, 0, symmetric=True),
    "int8-zero-point-32": packed(8, 32, symmetric=False),
    "int8-zero-point": (INT8, int8_layer),
    "int8 of a tensor": (WHOLE, whole_tensor_layer),
    "awq": (AWQ, awq_layer),
    "gptq": gptq(4, 32, "gptq"),
    "gptq_v2": gptq(4, 0, "gptq_v2"),
    "gptq of 8 bits": gptq(8, 32, "gptq"),
}


@pytest.fixture
def copied(tiny_llama: Any, tmp_path: Path) -> Path:
    """A model directory that a test may change."""
    directory = tmp_path / "copied"
    shutil.copytree(tiny_llama.directory, directory)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_the_dequantized_model(copied: Path, tiny_llama: Any, case: str) -> None:
    config, layer = CASES[case]
    original = read_base_model(str(copied))
    floats = layouts.convert(copied, config, layer)
    base = read_base_model(str(copied))
    assert base.modules == original.modules
    assert base.digest != original.digest
    assert base.original_digest == ""
    loaded, plain = load_model(str(copied)), load_model(str(tiny_llama.directory)).module
    quantized = {f"{name}.weight": one for name, one in loaded.module.named_modules() if type(one) is QuantizedLinear}
    assert set(quantized) == set(floats)
    for name, values in floats.items():
        torch.testing.assert_close(quantized[name].weight.dequantize(), values, rtol=1e-6, atol=1e-7)
        plain.get_submodule(name.removesuffix(".weight")).weight.copy_(values)
    assert loaded.linears == load_model(str(tiny_llama.directory)).linears


def test_fp8_checkpoints_are_read_and_need_cuda(copied: Path) -> None:
    config = compressed_config("float-quantized", bits=8, group=0, symmetric=True, kind="float")
    layouts.convert(copied, config, fp8_layer)
    assert read_base_model(str(copied)).quantization == "fp8"
    with pytest.raises(ModelUnusableError, match="fp8 needs a CUDA device"):
        load_model(str(copied))


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(fields)


def change_weights(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


def change_group(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"].update(fields)


@pytest.mark.parametrize(
    ("case", "spoil", "message"),
    [
        ("awq", change(quant_method="bitsandbytes"), "quant_method: 'bitsandbytes' is not read, only compressed-"),
        ("awq", change(quant_method="torchao"), "quant_method: 'torchao' is not read"),
        ("awq", change(version="gemv"), "version: 'gemv' is not read, only gemm"),
        ("awq", change(bits=3), "bits: 3 is not read"),
        ("awq", change(group_size=0), "group_size: 0 is not"),
        ("gptq", change(desc_act=True), "desc_act: is not served"),
        ("gptq", change(bits=2), "bits: 2 is not read"),
        ("gptq", change(checkpoint_format="marlin"), "checkpoint_format: 'marlin' is not read"),
        ("gptq", change(dynamic={"-:.*": {}}), "dynamic: is not served"),
        ("int4", change(format="marlin-24"), "format: 'marlin-24' is not read"),
        ("int4", change(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme: is not served"),
        ("int4", change(sparsity_config={"format": "dense"}), "sparsity_config: is not served"),
        ("int4", change(config_groups=[]), "config_groups: is not an object"),
        ("int4", change_weights(num_bits=3), "num_bits: int of 3 bits is not served"),
        ("int4", change_weights(strategy="block"), "strategy: 'block' is not served"),
        ("int4", change_weights(actorder="group"), "actorder: 'group' is not served"),
        ("int4", change_group(weights=None), "config_groups: a scheme without weights"),
        ("int8", change_group(input_activations={"dynamic": False}), "config_groups: activations that are"),
        ("int8", change(loraplex={"original": "x"}), "loraplex: does not name the original's digest"),
        (
            "int8",
            change(loraplex={"original": "sha256:" + "1" * 64, "quantization": "int4"}),
            "loraplex.quantization: int4 is not the scheme of config_groups",
        ),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_the_field(
    copied: Path, case: str, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    config, layer = CASES[case]
    layouts.convert(copied, config, layer)
    file = copied / "config.json"
    whole = json.loads(file.read_text())
    spoil(whole["quantization_config"])
    file.write_text(json.dumps(whole))
    with pytest.raises(ArtifactError, match=rf"^config\.json: quantization_config\.{message}") as refused:
        read_base_model(str(copied))
    with pytest.raises(ModelUnusableError, match=message):
        load_model(str(copied))
    assert "\n" not in str(refused.value)


Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "part", "values", "message"),
    [
        ("awq", "scales", torch.ones(3, 64).half(), r"scales is F16 \[3, 64\], not F32 or BF16 or F16 \[2, 64\]"),
        ("awq", "qzeros", torch.ones(2, 64).int(), r"qzeros is I32 \[2, 64\], not I32 \[2, 8\]"),
        ("awq", "scales", torch.ones(2, 64).int(), r"scales is I32"),
        ("awq", "qzeros", None, "qzeros is missing"),
        ("awq", "qweight", torch.ones(64).int(), r"qweight is I32 \[64\], not I32 with two sizes"),
        ("gptq", "g_idx", torch.zeros(64).int(), "g_idx reorders columns"),
        ("gptq", "qzeros", torch.ones(1, 8).int(), r"qzeros is I32 \[1, 8\], not I32 \[2, 8\]"),
        ("int4", "weight_scale", torch.ones(64, 1), r"weight_scale is F32 \[64, 1\], not .* \[64, 2\]"),
        ("int4", "weight_zero_point", torch.ones(64, 2).int(), r"weight_zero_point is .* not I32 \[8, 2\]"),
        ("int4", "weight_zero_point", None, "weight_zero_point is missing"),
        ("int4", "weight_shape", torch.tensor([64, 128]), r"weight_shape says \[64, 128\], which"),
        ("int4", "weight_shape", None, "weight_shape is missing"),
        ("int4 in eighths", "weight_zero_point", torch.ones(8, 2).int(), r"weight_zero_point is .* not U8 \[64, 2\]"),
        ("int8-zero-point", "weight_zero_point", torch.ones(64, 1), "weight_zero_point is F32"),
        ("int8-zero-point", "weight", torch.ones(64, 64), r"weight is F32 \[64, 64\], not I8"),
        ("int8", "input_scale", torch.ones(1), "input_scale would change the model, and is not read"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(
    copied: Path, case: str, part: str, values: Tensor | None, message: str
) -> None:
    config, layer = CASES[case]
    layouts.convert(copied, config, layer)
    tensors = load_file(copied / "model.safetensors")
    tensors.pop(f"{Q_PROJ}.{part}", None)
    if values is not None:
        tensors[f"{Q_PROJ}.{part}"] = values
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=f"^model: tensor {Q_PROJ}.{message}"):
        read_base_model(str(copied))


def test_quantized_experts_and_a_second_quantization_are_refused(copied: Path, tmp_path: Path) -> None:
    layouts.convert(copied, *CASES["int8"])
    with pytest.raises(ArtifactError, match=r"^--quantize: int4: the model is quantized already, in int8"):
        read_base_model(str(copied), quantize="int4")
    assert read_base_model(str(copied), quantize="int8") == read_base_model(str(copied))
    tensors = load_file(copied / "model.safetensors")
    expert = "model.layers.0.mlp.experts.0.up_proj"
    moved = {name.replace(f"{Q_PROJ}.", f"{expert}."): one for name, one in tensors.items()}
    save_file(moved, copied / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_moe"}))
    with pytest.raises(ArtifactError, match=rf"{expert} is quantized, which is served for linear layers alone"):
        read_base_model(str(copied))
