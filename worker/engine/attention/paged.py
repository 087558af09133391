"""Attention over the paged KV cache, registered with transformers under NAME.

transformers hands over the whole flat batch [1, heads, tokens, head_dim] of a layer and, because no mask function is
registered under the name, no mask. Which sequence a token belongs to, and what it may see, is in the AttentionStep
that the runner puts into the model's AttentionContext before the forward pass; every attention module holds that
context. (Keyword arguments of forward would not do: some models do not pass them on.)

    flat batch   │ decode rows, one token each │ chunk │ chunk │ ...

The step's AttentionPlan computes the attention: cpu/plan.py on the CPU, cuda/plan.py on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from worker.engine.attention.kv_cache import KvCache

NAME = "loraplex"


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
