"""Attention over the paged KV cache: of each layer the flat batch of a step goes to the step's AttentionPlan.

    flat batch   │ decode rows, one token each │ chunk │ chunk │ ...

The runner puts the AttentionStep, which says of each token to which sequence it belongs and what it may see, into the
model's AttentionContext before the forward pass. transformers hands over the whole flat batch [1, heads, tokens,
head_dim] of a layer to the attention that is registered under NAME and, because no mask function is registered under
the name, no mask. Every attention module holds the model's AttentionContext. (Keyword arguments of forward would not
do: some models do not pass them on.) The step's AttentionPlan computes the attention: cpu.py on the CPU, cuda.py on
CUDA.

The keys and values of all sequences are in blocks of block_size positions:

    keys, values [layers, blocks + 1, block_size, kv_heads, dim]      slot = block * block_size + position % block_size
    scales       [layers, blocks + 1, block_size, kv_heads]           of int8 alone: a number is code * scale
                              └── the last block is scratch: it pads block tables of uneven length, and takes the keys
                                  and values of rows that pad a batch; no query attends to it

In int8 each token's head has a scale of its own, the largest magnitude over 127. It depends on nothing but these
numbers: the same keys and values get the same codes in every batch, chunk and attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from loraplex.contracts.artifacts.families import KvShape
from loraplex.kernels.threads import Workspace
from loraplex.worker.engine.scheduling.batch import Row

# Share of the memory that is free when the cache is made. On CUDA the largest step has run by then and keeps its
# memory; the rest is for graphs and fragments. On the CPU it is for activations and the machine's other programs.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9
# Maximum number of tokens per row on the CPU, unless one context is longer: more blocks than rows can fill are useless.
_CPU_TOKENS_PER_ROW = 4096


class KvCache:
    """Keys and values by layer, as slots.

    The model computes in `dtype`; `int8` says that keys and values are kept as codes. With `batch_invariant` CUDA's
    kernels give a token the same bits in decode steps and in chunks of any size.
    """

    def __init__(
        self,
        shape: KvShape,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8: bool,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.blocks = blocks
        self.block_size = block_size
        self.scratch_block = blocks
        # Not zeroed: on the CPU the system then allocates a block's pages on its first write. Unwritten slots are never
        # read.
        sizes = shape.layers, blocks + 1, block_size, shape.kv_heads
        stored = torch.int8 if int8 else dtype
        pools = [torch.empty(*sizes, dim, dtype=stored, device=device) for dim in (shape.key_dim, shape.value_dim)]
        # For each layer keys and values [slots, kv_heads, dim].
        self.slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(*pools, strict=True)]
        # Of int8 for each layer the scales of keys and values [slots, kv_heads]; else empty.
        scales = [torch.empty(sizes, device=device) for _ in range(2 if int8 else 0)]
        self.scales = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(*scales, strict=True)]
        # Scratch memory and counters of the CPU's attention kernel.
        self.workspace, self.counters = Workspace(), np.zeros(2, np.int64)


def fitting_blocks(
    available_bytes: int, token_bytes: int, block_size: int, rows: int, context: int, device: torch.device
) -> int:
    """Return the default number of blocks: a share of the free memory, at most what `rows` sequences can fill.

    On the CPU the share is a quarter, and the maximum 4,096 tokens for each row (or one whole context, if that is
    more); on CUDA the share is nine tenths.
    """
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    fitting = int(available_bytes * share) // (token_bytes * block_size)
    row_tokens = context if device.type == "cuda" else min(context, _CPU_TOKENS_PER_ROW)
    useful_tokens = max(rows * row_tokens, context)
    return min(fitting, -(-useful_tokens // block_size))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The inputs of a layer's attention. query [tokens, heads, dim]; key, value [tokens, kv_heads, dim].

    A query at position p attends to positions up to p, with a window to the last `window` of them. Scores are
    multiplied by `scaling`; a softcap makes them softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118). `sinks`
    [heads] are scores of one more position, without a value (attention sinks of gpt-oss).
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """A row of a step, as attention sees it: `count` tokens from position `start` on, over the blocks of all before."""

    start: int
    count: int
    blocks: Sequence[int]


def row_blocks(rows: Iterable[Row], block_size: int) -> list[RowBlocks]:
    """Return a batch's rows as attention sees them."""
    return [
        RowBlocks(row.start, row.count, row.sequence.block_table[: -(-(row.start + row.count) // block_size)])
        for row in rows
    ]


class AttentionPlan(Protocol):
    """The attention of one step's tokens, laid out once for all layers."""

    def attend(self, call: LayerCall, cache: KvCache) -> Tensor:
        """Return all tokens' attention, [tokens, heads, dim of the values]; the cache has their keys and values."""

    def quantize(self, call: LayerCall, slots: Tensor, cache: KvCache) -> None:
        """Write all tokens' keys and values into slots [tokens] of a cache of int8."""


class StepAttention(Protocol):
    """The attention that a model's attention modules call in one forward pass."""

    def attend(self, call: LayerCall) -> Tensor:
        """Return the attention of every token of the step: [tokens, heads, dim of the values]."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A step's attention over the paged cache. `slot_mapping` [tokens] says where each token's key and value go."""

    cache: KvCache
    slot_mapping: Tensor
    plan: AttentionPlan

    def attend(self, call: LayerCall) -> Tensor:
        """Write the tokens' keys and values into the cache, then attend; see StepAttention."""
        if self.cache.scales:
            self.plan.quantize(call, self.slot_mapping, self.cache)
        else:
            keys, values = self.cache.slots[call.layer]
            keys.index_copy_(0, self.slot_mapping, call.key)
            values.index_copy_(0, self.slot_mapping, call.value)
        return self.plan.attend(call, self.cache)


class RandomAttention:
    """A step of random attention, in passes that find out what a model computes; keeps what it was asked and gave."""

    def __init__(self) -> None:
        self.calls: list[tuple[LayerCall, Tensor]] = []
        self._generator = torch.Generator().manual_seed(0)

    def attend(self, call: LayerCall) -> Tensor:
        """See StepAttention."""
        attended = torch.randn(*call.query.shape[:2], call.value.shape[-1], generator=self._generator).to(call.query)
        copied = replace(call, query=call.query.clone(), key=call.key.clone(), value=call.value.clone())
        self.calls.append((copied, attended))
        return attended


class AttentionContext:
    """The current step of a model's attention modules: they share it, and the runner sets it for a forward pass."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: StepAttention | None = None

    def attach(self, model: nn.Module) -> None:
        """Let all attention modules of a model, which know their layer's index, hold this context."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.attention_context = self  # type: ignore[assignment]

    @contextmanager
    def during(self, step: StepAttention) -> Iterator[None]:
        """Let the modules work on this step."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


NAME = "loraplex"


def paged_attention(  # noqa: PLR0913, PLR0917 - what transformers passes
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from query [1, heads, tokens, dim]; key and value [1, kv_heads, tokens, dim] join the cache first.

    Returns [1, tokens, heads, dim]. Raises ValueError outside a step, or with a mask.
    """
    context: AttentionContext = module.attention_context  # type: ignore[assignment]
    step = context.step
    if step is None or attention_mask is not None:
        raise ValueError("attention is called outside a step, or with a mask")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return step.attend(LayerCall(layer, q, k, v, scale, sliding_window, softcap, s_aux))[None], None


AttentionInterface.register(NAME, paged_attention)
