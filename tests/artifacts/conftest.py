"""Small files of the formats that this room reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 64,
    "vocab_size": 32,
    "eos_token_id": 2,
    "hidden_size": 8,
    "num_hidden_layers": 1,
}
TENSORS = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.k_proj.bias": (4,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
}


@pytest.fixture
def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint's tensors, the same in every test."""
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in TENSORS.items()}


@pytest.fixture
def model_directory(tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A transformers directory with one safetensors file."""
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def change_json() -> Callable[..., None]:
    """`change_json(path, key=value)` rewrites an object in a file."""

    def change(path: Path, **values: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change
