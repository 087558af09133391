"""The names of tensors: transformers' for each of GGUF's, by the table of the package gguf."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map


def tensor_names(model: Any, processor: TensorProcessor, architecture: str) -> dict[str, str]:
    """Return transformers' names by GGUF's, of a model's tensors; those of experts lack the last part, `.weight`."""
    # Without children: transformers looks at each module's names as well, 10 s that find nothing more.
    flat: Any = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    names: dict[str, str] = get_gguf_hf_weights_map(flat, processor, model_type=architecture)
    return names
