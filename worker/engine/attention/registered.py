"""Attention of transformers' models, registered under NAME: hands each layer's call to the step that runs.

transformers hands over the whole flat batch [1, heads, tokens, head_dim] of a layer and, because no mask function is
registered under the name, no mask. Every attention module holds the model's AttentionContext, which has the step.
(Keyword arguments of forward would not do: some models do not pass them on.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from worker.engine.attention.paged import AttentionContext, LayerCall

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
