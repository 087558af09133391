"""A scheduler's batch as the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import AttentionPlan, AttentionStep
from worker.engine.device.transfer import upload
from worker.engine.scheduling.sequence import Batch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`input_ids` and `position_ids` are [1, tokens]; `wanted` indexes the tokens whose logits are needed.

    These are, row after row, its prompt_positions and, where it samples, its last token.
    """

    input_ids: Tensor
    position_ids: Tensor
    wanted: Tensor
    attention: AttentionStep


def step_inputs(batch: Batch, cache: KvCache, device: torch.device) -> StepInputs:
    """Lay out a batch. Ids that are placeholders are left 0."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    size = cache.block_size
    for row in batch.rows:
        table, end = row.sequence.block_table, row.start + row.count
        ids += row.sequence.ids[row.start : end]
        if row.last_is_placeholder:
            ids.append(0)
        wanted += [len(positions) + position - row.start for position in row.prompt_positions]
        positions += range(row.start, end)
        slots += [table[position // size] * size + position % size for position in range(row.start, end)]
        if row.samples:
            wanted.append(len(ids) - 1)
    flat = upload([ids, positions, slots], device)
    attention = AttentionStep(cache, flat[2], attention_plan(batch, cache, device))
    return StepInputs(flat[None, 0], flat[None, 1], upload(wanted, device, torch.int64), attention)


def attention_plan(batch: Batch, cache: KvCache, device: torch.device) -> AttentionPlan:
    """Plan a batch's attention as the device computes it."""
    if device.type == "cuda":
        from worker.engine.attention.cuda.plan import triton_plan  # Triton is there only with CUDA

        return triton_plan(batch, cache, device)
    from worker.engine.attention.cpu.plan import cpu_plan  # numba is there only where the CPU computes

    return cpu_plan(batch, cache)
