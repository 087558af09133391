"""Converts a LoRA adapter of mlx-lm, on its way to the store, to peft's two files.

    adapters.safetensors    model.layers.0.self_attn.q_proj.lora_a [in, rank], lora_b [rank, out], of DoRA m [out]
    adapter_config.json     fine_tune_type; lora_parameters: rank, scale

The layer adds scale * (x a) b: peft's A and B are a and b transposed, and lora_alpha is scale * rank. No tensor is
rounded. This stands apart from gguf_models because it needs numpy, which commands start without.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.checkpoint import ADAPTER_HEADER_BYTES, ITEM_BYTES, TensorInfo, read_header
from loraplex.contracts.artifacts.families import is_embedding
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE, lora_fields
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, tensor_names

MLX_FILE = "adapters.safetensors"
_PARTS = {".lora_a": "A", ".lora_b": "B", ".m": "magnitude"}


def is_mlx(directory: Path) -> bool:
    """Tell whether a directory has an adapter of mlx-lm, and none of peft."""
    return (directory / MLX_FILE).is_file() and not (directory / WEIGHTS_FILE).exists()


def write_peft_files(directory: Path, out: Path) -> None:
    """Write the peft files of an MLX adapter to a directory. Raises ArtifactError, OSError."""
    config = parse_object((directory / CONFIG_FILE).read_bytes(), CONFIG_FILE)
    kind, parameters = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise ArtifactError("fine_tune_type", f"is {kind!r}: only lora and dora are adapters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ArtifactError("lora_parameters.scale", f"is {scale!r}, not a number")
    source = directory / MLX_FILE
    header = read_header(source, ADAPTER_HEADER_BYTES)
    ranks: dict[str, int] = {}
    placed: dict[str, TensorInfo] = {}
    for name, tensor in header.items():
        module, end = name.rpartition(".")[0], f".{name.rpartition('.')[2]}"
        if end not in _PARTS or (end == ".m") != (len(tensor.shape) == 1) or len(tensor.shape) > 2:
            raise ArtifactError(MLX_FILE, f"tensor {name} {list(tensor.shape)} is not one of a LoRA of a linear layer")
        if is_embedding(module):
            raise ArtifactError(
                MLX_FILE, f"adapts {module}: MLX adapts a head that shares its weight too, and peft does not"
            )
        if end == ".lora_a":
            ranks[module] = tensor.shape[1]
        placed[tensor_names(module)[_PARTS[end]]] = tensor
    if not ranks:
        raise ArtifactError(MLX_FILE, "has no LoRA tensors")
    alphas = {module: scale * rank for module, rank in ranks.items()}
    (out / CONFIG_FILE).write_text(json.dumps(lora_fields(ranks, alphas, use_dora=kind == "dora"), indent=2), "utf-8")
    _write_transposed(source, placed, out / WEIGHTS_FILE)


def _write_transposed(source: Path, placed: dict[str, TensorInfo], target: Path) -> None:
    """Write tensors of a safetensors file to another one, matrices transposed; numbers of any dtype count as bits."""
    entries, position = {}, 0
    for name, tensor in placed.items():
        end = position + tensor.end - tensor.start
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape[::-1], "data_offsets": (position, end)}
        position = end
    text = json.dumps(entries | {"__metadata__": {"format": "pt"}}).encode()
    with open(target, "wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for tensor in placed.values():
            bits, count = np.dtype(f"u{ITEM_BYTES[tensor.dtype]}"), math.prod(tensor.shape)
            numbers = np.fromfile(source, bits, count, offset=tensor.start).reshape(tensor.shape)
            written.write(numbers.T.tobytes())
