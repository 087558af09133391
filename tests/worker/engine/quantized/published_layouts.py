"""Writes quantized checkpoints in the layouts that other tools publish, by plain loops over columns and words.

The layouts are those of compressed-tensors (pack_to_int32), AutoAWQ (WQLinear_GEMM) and AutoGPTQ (QuantLinear).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Codes, scales and zero points of a weight [out, in], one for each group; codes are from 0 on.
Rounded = tuple[Tensor, Tensor, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool = False) -> Rounded:
    """Round a weight; scales are as exact as float16, which AWQ and GPTQ store."""
    groups = torch.stack(torch.split(weight, group or weight.shape[1], 1), 1)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1).int(), scales, zeros.int()


def numbers(of: Rounded, group: int) -> Tensor:
    """The float weight that the codes stand for."""
    codes, scales, zeros = of
    group = group or codes.shape[1]
    return torch.stack(
        [
            (codes[:, column] - zeros[:, column // group]) * scales[:, column // group]
            for column in range(codes.shape[1])
        ],
        1,
    )


def packed(fields: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack fields [rows, fields] in int32 words; field order[i] of a word is in its i-th lowest bits."""
    per_word = 32 // bits
    fields = torch.nn.functional.pad(fields, (0, -fields.shape[1] % per_word)).long()
    words = torch.zeros(len(fields), fields.shape[1] // per_word, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place in range(per_word):
            field = word * per_word + (order[place] if order else place)
            words[:, word] |= fields[:, field] << (bits * place)
    return (words - (words >> 31 << 32)).int()


def compressed(of: Rounded, bits: int, *, symmetric: bool) -> dict[str, Tensor]:
    codes, scales, zeros = of
    parts = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales.bfloat16() if symmetric else scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    return parts if symmetric else parts | {"weight_zero_point": packed(zeros.t(), bits).t().contiguous()}


def int_quantized(of: Rounded) -> dict[str, Tensor]:
    codes, scales, zeros = of
    return {
        "weight": (codes - 128).to(torch.int8),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 128).to(torch.int8),
    }


def awq(of: Rounded) -> dict[str, Tensor]:
    codes, scales, zeros = of
    return {
        "qweight": packed(codes.t(), 4, AWQ_ORDER),
        "qzeros": packed(zeros.t(), 4, AWQ_ORDER),
        "scales": scales.t().half().contiguous(),
    }


def gptq(of: Rounded, bits: int, group: int, less: int) -> dict[str, Tensor]:
    codes, scales, zeros = of
    columns = torch.arange(codes.shape[1], dtype=torch.int32)
    return {
        "qweight": packed(codes, bits).t().contiguous(),
        "qzeros": packed((zeros - less).t(), bits),
        "scales": scales.t().half().contiguous(),
        "g_idx": columns // (group or len(columns)),
    }


def config_group(bits: int, group: int, *, symmetric: bool, kind: str = "int") -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "dynamic": False, "actorder": None,
    }  # fmt: skip
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}


def convert(
    directory: Path, config: Mapping[str, Any], layer: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
) -> dict[str, Tensor]:
    """Replace every inner linear weight of a model in its directory; the float weights that are left, by name."""
    tensors = load_file(directory / "model.safetensors")
    floats: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, floats[name] = layer(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(config)}))
    return floats
