"""Attention over the paged KV cache: of each layer registered.py hands over the flat batch of a step.

    flat batch   │ decode rows, one token each │ chunk │ chunk │ ...

The runner puts the AttentionStep, which says of each token to which sequence it belongs and what it may see, into the
model's AttentionContext before the forward pass. The step's AttentionPlan computes the attention: cpu/plan.py on the
CPU, cuda/plan.py on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from worker.engine.attention.kv_cache import KvCache


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
