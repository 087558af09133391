"""Attention over the paged KV cache, registered with transformers under NAME.

transformers hands over the whole flat batch [1, heads, tokens, head_dim] of a layer and, because no mask function is
registered under the name, no mask. Which sequence a token belongs to, and what it may see, is in the AttentionStep
that the runner sets before the forward pass. (Not in forward's keyword arguments: some models do not pass them on.)

    flat batch   │ decode rows, one token each │ chunk │ chunk │ ...

How the step's tokens attend is its plan's: cpu_attention.py on the CPU, triton_attention.py on CUDA.
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
    """One layer's attention. query [tokens, heads, dim]; key, value [tokens, kv_heads, dim], in the cache already.

    A query at position p sees the positions up to p, with a window the last `window` of them. Scores are scaled, then,
    with a softcap, softcap * tanh(score / softcap). `sinks` [heads] are scores of one more position without a value.
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
    """How the tokens of one step attend, laid out once for all layers."""

    def attend(self, call: LayerCall, cache: KvCache) -> Tensor:
        """The attention of every token of the step: [tokens, heads, dim of the values]."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention needs to know of a step. `slot_mapping` [tokens] says where each token's key and value go."""

    cache: KvCache
    slot_mapping: Tensor
    plan: AttentionPlan


_current: AttentionStep | None = None


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Make it the step that the registered function works on."""
    global _current  # noqa: PLW0603 - transformers calls a plain function
    _current = step
    try:
        yield
    finally:
        _current = None


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
    step = _current
    if step is None or attention_mask is not None:
        raise ValueError("attention is called outside a step, or with a mask")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys, values = step.cache.slots[layer]
    keys.index_copy_(0, step.slot_mapping, k)
    values.index_copy_(0, step.slot_mapping, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = step.plan.attend(LayerCall(layer, q, k, v, scale, sliding_window, softcap, s_aux), step.cache)
    return out[None], None


AttentionInterface.register(NAME, paged_attention)
