"""Families' logits with the kernels of rows in place, beside those without: python family_cases.py cpu, interpreted.

Prints {family: [difference over the largest logit, modules replaced by kind]} as JSON. See triton_runs.py.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from loraplex.worker.engine.attention.paged import KvCache
from loraplex.worker.engine.decoder.cuda import use_kernels
from loraplex.worker.engine.device import KernelCall
from loraplex.worker.engine.lora.cuda import adapt_linears
from loraplex.worker.engine.model.layouts import step_layout
from loraplex.worker.engine.model.loader import LoadedModel, load_model
from loraplex.worker.engine.model.runner import step_inputs
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.interpreted import interpret_quickly
from tests.worker.engine.model.tiny_families import make_config, make_model

# Norms of all forms, of queries and keys too, layers that do not rotate, experts, heads of which half rotates, and no
# module of a form.
FAMILIES = ("llama", "gemma3_text", "olmo2", "smollm3", "mixtral", "glm4_moe", "nemotron", "gpt2")
IDS = tuple(range(3, 10))


def logits(loaded: LoadedModel) -> Tensor:
    """Return the last token's logits of a prompt."""
    cache = KvCache(loaded.kv, 2, 4, loaded.dtype, loaded.device, int8=False)
    sequence = Sequence(NewSequence("a", IDS), 0, frozenset())
    sequence.block_table = [0, 1]
    batch = Batch((Row(sequence, 0, len(IDS), True),), 0, len(IDS))
    inputs = step_inputs(step_layout(batch, cache.block_size), cache, loaded.device)
    with torch.inference_mode(), loaded.attention.during(inputs.attention):
        output = loaded.module(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.logit_places,
        )
    result: Tensor = output.logits
    return result


def compare(family: str) -> tuple[float, dict[str, int]]:
    """Compare a family's logits before and after its modules are replaced."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(make_config(family), Path(directory))
        loaded = load_model(directory, dtype="float32")
        with patch.object(KernelCall, "launch", lambda call: None):
            adapt_linears(loaded.module, loaded.linears, 1, 8, 4, loaded.device, loaded.dtype)
        before = logits(loaded)
        use_kernels(loaded.module, loaded.dtype, loaded.context_length)
        forwards: list[Any] = [vars(module).get("forward") for module in loaded.module.modules()]
        kinds = Counter(forward.__qualname__.split(".")[0] for forward in forwards if forward is not None)
        return float((logits(loaded) - before).abs().max() / before.abs().max()), kinds


if __name__ == "__main__":
    torch.set_num_threads(1)
    interpret_quickly()
    print(json.dumps({family: compare(family) for family in FAMILIES}))
