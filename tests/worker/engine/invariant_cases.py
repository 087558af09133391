"""A row's logits alone and beside others, with the kernels of batch invariance: python invariant_cases.py cpu|cuda.

Prints {dtype: {case: how many of a row's numbers differ}} as JSON; "decode kernel" is with attention as it is without,
for comparison. See triton_runs.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from loraplex.worker.engine.attention import kernels
from loraplex.worker.engine.attention.cuda import TritonPlan, triton_plan
from loraplex.worker.engine.attention.paged import KvCache
from loraplex.worker.engine.decoder.cuda import use_kernels
from loraplex.worker.engine.decoder.invariant import use_invariant_products
from loraplex.worker.engine.lora.cuda import CudaLora, adapt_linears
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair
from loraplex.worker.engine.model import runner
from loraplex.worker.engine.model.layouts import StepLayout, step_layout
from loraplex.worker.engine.model.loader import LoadedModel, load_model
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.interpreted import interpret_quickly
from tests.worker.engine.model.tiny_families import make_config, make_model

# Interpreting takes its time.
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
# Positions of a block, of a tile and of a split, so few that prompts have several splits.
BLOCK, BLOCKS, POSITIONS = 8, 18, 16
LENGTH = 20
# The lengths of the rows' names choose their adapters: slot 0, and none.
NAMES = {"cpu": ("a",), "cuda": ("a", "aaa")}


class Steps:
    """Computes steps of sequences of random ids, each over blocks of its own."""

    def __init__(self, loaded: LoadedModel, lora: CudaLora, *, batch_invariant: bool) -> None:
        self.loaded, self.lora = loaded, lora
        self.cache = KvCache(
            loaded.kv, BLOCKS, BLOCK, loaded.dtype, loaded.device, int8=False, batch_invariant=batch_invariant
        )
        self.sequences: dict[str, Sequence] = {}

    def run(self, spans: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Compute some positions of sequences, [start, stop) by name; return the logits of each one's last."""
        rows = []
        for name, (start, stop) in spans.items():
            if name not in self.sequences:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                ids = torch.randint(3, 100, (LENGTH + 2,), generator=generator).tolist()
                sequence = Sequence(NewSequence(name, tuple(ids)), 0, frozenset())
                first = len(self.sequences) * 6
                sequence.block_table = list(range(first, first + 6))
                sequence.adapter_slot = len(name) % 3 - 1
                self.sequences[name] = sequence
            rows.append(Row(self.sequences[name], start, stop - start, samples=True))
        rows.sort(key=lambda row: (row.count > 1, row.sequence.adapter_slot))
        batch = Batch(tuple(rows), sum(row.count == 1 for row in rows), sum(row.count for row in rows))
        self.lora.begin_step([(row.sequence.adapter_slot, row.count) for row in rows])
        inputs = runner.step_inputs(step_layout(batch, self.cache.block_size), self.cache, self.loaded.device)
        with torch.inference_mode(), self.loaded.attention.during(inputs.attention):
            logits = self.loaded.module(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logit_places,
            ).logits[0]
        return {row.sequence.sequence_id: row_logits for row, row_logits in zip(rows, logits, strict=True)}


def differing(loaded: LoadedModel, lora: CudaLora, name: str, *, batch_invariant: bool = True) -> int:
    """Compute a sequence at once and alone, then in chunks and a row beside others, and the next token; compare."""
    steps = Steps(loaded, lora, batch_invariant=batch_invariant)
    alone = [steps.run({name: (0, LENGTH)})[name], steps.run({name: (LENGTH, LENGTH + 1)})[name]]
    steps = Steps(loaded, lora, batch_invariant=batch_invariant)
    steps.run({name: (0, 5), "b": (0, 4)})
    steps.run({name: (5, 19), "b": (4, 5), "cc": (0, 3)})
    beside = [
        steps.run({name: (19, LENGTH), "b": (5, 6), "cc": (3, 6)})[name],
        steps.run({name: (LENGTH, LENGTH + 1), "b": (6, 7), "cc": (6, 7)})[name],
    ]
    return sum(int((one != other).sum()) for one, other in zip(alone, beside, strict=True))


def cases(dtype: torch.dtype, device: str) -> dict[str, int]:
    """Return the differing numbers of a row with an adapter, and on CUDA of one without."""
    with tempfile.TemporaryDirectory() as directory:
        config = make_config("qwen3")
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        make_model(config, Path(directory))
        loaded = load_model(directory, device, "float32")
    module: Any = loaded.module.to(dtype)
    loaded = replace(loaded, dtype=dtype)
    lora = adapt_linears(module, loaded.linears, 2, 8, 4, loaded.device, dtype)
    for slot in range(2):
        generator = torch.Generator().manual_seed(slot)
        pairs = {}
        for linear, sizes in loaded.linears.items():
            a, b = (torch.randn(8, size, generator=generator).to(loaded.device, dtype) / 4 for size in sizes)
            pairs[linear] = LoraPair(a, b)
        lora.install(AdapterWeights(pairs, 8), slot)
    use_kernels(module, dtype, loaded.context_length)
    use_invariant_products(module)
    lora.keep_low_tiles()
    found = {name: differing(loaded, lora, name) for name in NAMES[device]}
    return found | {"decode kernel": differing(loaded, lora, NAMES[device][0], batch_invariant=False)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = sys.argv[1]
    if place == "cpu":
        interpret_quickly()
    sizes: dict[str, Any] = {"CHUNK_SPLIT": POSITIONS, "position_tile": lambda *_: POSITIONS}

    def plan(layout: StepLayout, cache: KvCache, device: torch.device) -> TritonPlan:
        return triton_plan(layout.rows, layout.decodes, cache, device)

    # On the CPU too.
    with patch.multiple(kernels, **sizes), patch.object(runner, "_plan", plan):
        print(json.dumps({str(dtype).removeprefix("torch."): cases(dtype, place) for dtype in DTYPES[place]}))
