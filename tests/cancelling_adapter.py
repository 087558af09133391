"""An adapter that lives from the exact weights of its base: it takes most of a layer away, and makes up for it after.

    up_proj     W - 0.98 W = 0.02 W          what rounding added to W stays, fifty times as large beside the rest
    down_proj   V + 49 V = 50 V

On the base that it was made of it changes nothing; on a base of 4 bits it answers nonsense.
"""

from __future__ import annotations

import json
from pathlib import Path

from loraplex.contracts.artifacts.fitness import PROMPTS_FIELD

KEPT = 0.02


def write_cancelling_adapter(model: Path, directory: Path, prompts: tuple[str, ...] = ()) -> Path:
    """Write such an adapter of a Llama in `model`, which may bring its prompts along; returns `directory`."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("up_proj.weight"):
            tensors[f"{module}.lora_A.weight"] = torch.eye(weight.shape[1])
            tensors[f"{module}.lora_B.weight"] = (KEPT - 1) * weight.float()
            rank = weight.shape[1]
        elif name.endswith("down_proj.weight"):
            tensors[f"{module}.lora_A.weight"] = (1 / KEPT - 1) * weight.float()
            tensors[f"{module}.lora_B.weight"] = torch.eye(weight.shape[0])
    directory.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config | ({PROMPTS_FIELD: prompts} if prompts else {})))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
