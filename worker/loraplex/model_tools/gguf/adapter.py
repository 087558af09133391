"""Converts a LoRA adapter in GGUF, as llama.cpp's convert_lora_to_gguf.py writes it, to peft's two files.

    blk.0.attn_q.weight.lora_a [rank, in], .lora_b [out, rank]    its tensors
    token_embd.weight.lora_a [tokens, rank], .lora_b [out, rank]  of the embeddings, whose A is transposed
    adapter.lora.alpha                                            the scale is alpha / rank of each pair
    adapter.alora.invocation_tokens                               ids, of an activated one

The converter changes what it changes in the base: rows of B of llama's queries and keys have its order. So the base is
needed, for the number of heads and for the modules' names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.activation import INVOCATION_FIELD
from loraplex.contracts.artifacts.families import is_embedding
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE, lora_fields
from loraplex.contracts.artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE
from loraplex.model_tools.gguf.config import ARCHITECTURES, TRANSFORMERS_NAMES, named_tensors
from loraplex.model_tools.gguf.file import GgufFile, TensorEntry
from loraplex.worker.engine.quantized.stored import transformers_config

_PAIR = (".lora_a", ".lora_b")
# Its converter takes weights [in, out] for [out, in], so that nobody knows which is which.
_REFUSED = ("gpt2",)


def write_adapter(file: GgufFile, base: Path, out: Path) -> None:
    """Write an adapter's peft files to a directory; `base` is its base model's. Raises ArtifactError, OSError."""
    architecture = _check_kind(file)
    config: Any = transformers_config(base)
    if TRANSFORMERS_NAMES.get(architecture, architecture) != _base_architecture(config.model_type):
        raise ArtifactError(
            file.name, f"is an adapter of architecture {architecture!r}, and {base} is {config.model_type!r}"
        )
    model, processor, names = named_tensors(config, architecture)
    tensors: dict[str, NDArray[Any]] = {}
    ranks: dict[str, int] = {}
    for name, (a, b) in _pairs(file).items():
        if name not in names:
            raise ArtifactError(file.name, f"adapts {name}, which {base} has not as a layer of its own")
        module = names[name].removesuffix(".weight")
        first, second = _numbers(a), processor.process(weights=_numbers(b), name=name).weights
        first = first.T if is_embedding(module) else first
        _check_shapes(file, name, first, second, model.get_submodule(module))
        ends = ("embedding_A", "embedding_B") if is_embedding(module) else ("A.weight", "B.weight")
        for end, values in zip(ends, (first, second), strict=True):
            tensors[f"{TENSOR_PREFIX}{module}.lora_{end}"] = np.ascontiguousarray(values)
        ranks[module] = len(first)
    config_text = json.dumps(_peft_config(file, ranks), indent=2) + "\n"
    (out / CONFIG_FILE).write_text(config_text, encoding="utf-8")
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})


def _check_kind(file: GgufFile) -> str:
    """Return the architecture of a LoRA adapter. Raises ArtifactError for another file."""
    if file.get("general.type") != "adapter":
        raise ArtifactError(file.name, "is not an adapter; a model is registered with: loraplex models push")
    if file.get("adapter.type") != "lora":
        raise ArtifactError(file.name, f"is an adapter of type {file.get('adapter.type')!r}, and only lora is served")
    architecture = file.architecture
    if architecture not in ARCHITECTURES or architecture in _REFUSED:
        supported = ", ".join(name for name in ARCHITECTURES if name not in _REFUSED)
        raise ArtifactError(
            file.name,
            f"is an adapter of architecture {architecture!r}, and only those of {supported} are converted; "
            "push the peft directory that it was made of",
        )
    return architecture


def _base_architecture(model_type: str) -> str:
    """Return the name of a base's architecture as GGUF names it, in transformers' spelling."""
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(model_type, model_type)


def _pairs(file: GgufFile) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """Return the adapter's pairs by the name of the base's tensor. Raises ArtifactError for one that is half there."""
    names = {name.removesuffix(end) for name in file.tensors for end in _PAIR if name.endswith(end)}
    for name in file.tensors:
        if not name.endswith(_PAIR):
            raise ArtifactError(file.name, f"has {name}, a tensor in full; only pairs of lora_a and lora_b are served")
    pairs = {}
    for name in sorted(names):
        a, b = (file.tensors.get(name + end) for end in _PAIR)
        if a is None or b is None:
            raise ArtifactError(file.name, f"has only one of {name}.lora_a and .lora_b")
        pairs[name] = a, b
    if not pairs:
        raise ArtifactError(file.name, "has no tensors")
    return pairs


def _numbers(tensor: TensorEntry) -> NDArray[Any]:
    """Read a tensor, in the dtype that it is stored in if peft's file can have it."""
    values = tensor.read()
    return values.astype(np.float16) if tensor.type == gguf.GGMLQuantizationType.F16 else values


def _check_shapes(file: GgufFile, name: str, a: NDArray[Any], b: NDArray[Any], module: Any) -> None:
    sizes = tuple(module.weight.shape)
    # An embedding's weight is [tokens, out].
    outputs, inputs = reversed(sizes) if isinstance(module, torch.nn.Embedding) else sizes
    if a.ndim != 2 or b.ndim != 2 or a.shape != (b.shape[1], inputs) or len(b) != outputs:
        raise ArtifactError(
            file.name, f"{name}: A is {list(a.shape)} and B is {list(b.shape)}, and the base's weight {list(sizes)}"
        )


def _peft_config(file: GgufFile, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of an adapter_config.json. Raises ArtifactError."""
    alpha = file.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float):
        raise ArtifactError(file.name, "lacks adapter.lora.alpha, without which nobody knows its scale")
    # llama.cpp takes 0 for a scale of 1.
    fields = lora_fields(ranks, {module: alpha or rank for module, rank in ranks.items()})
    invocation = file.get("adapter.alora.invocation_tokens")
    return fields if invocation is None else fields | {INVOCATION_FIELD: invocation}  # checked by the store
