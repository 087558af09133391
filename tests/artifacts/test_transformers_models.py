"""The PEFT reader against what peft itself writes and computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts.checkpoint import read_header
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE, parse_peft_config
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, lora_tensors

pytestmark = pytest.mark.model
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def tiny(architecture: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    models: Any = AutoModelForCausalLM
    return models.from_config(AutoConfig.for_model(architecture, **SIZES))


def test_ranks_and_scalings_are_those_that_peft_computes(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        rank_pattern={"layers.1.self_attn.q_proj": 2, "k_proj": 8},
        alpha_pattern={r"layers\.0\..*proj": 3, "down_proj": 5},
        use_rslora=True,
        task_type="CAUSAL_LM",
    )
    get_peft_model(tiny("llama"), config).save_pretrained(str(tmp_path))
    # Saving sorts the patterns, and the first that matches counts: what peft reads again is the truth.
    model: Any = PeftModel.from_pretrained(tiny("llama"), str(tmp_path))
    shapes = lora_tensors(read_header(tmp_path / WEIGHTS_FILE))
    ours = parse_peft_config((tmp_path / CONFIG_FILE).read_bytes()).resolved(shapes)
    layers = {name: layer for name, layer in model.base_model.model.named_modules() if hasattr(layer, "lora_A")}
    assert set(shapes) == set(layers)
    for name, layer in layers.items():
        assert shapes[name] == (layer.r["default"], layer.in_features, layer.out_features)
        assert ours.rank_of(name) == layer.r["default"]
        assert ours.scaling_of(name, shapes[name].rank) == pytest.approx(layer.scaling["default"], rel=1e-12)
