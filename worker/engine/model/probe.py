"""The shape of the KV cache, from the keys and values that a loaded model's attention modules really make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts.families import KvShape
from worker.engine.attention.paged import AttentionContext, LayerCall
from worker.engine_api import ModelUnusableError


class _ShapeProbe:
    """Records each layer's (KV heads, key size, value size) in place of attending."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Return zeros; see StepAttention."""
        tokens, kv_heads, key_dim = call.key.shape
        value_dim = call.value.shape[-1]
        self.shapes[call.layer] = kv_heads, key_dim, value_dim
        return call.query.new_zeros(tokens, call.query.shape[1], value_dim)


@torch.inference_mode()
def probe_kv_shape(module: Any, attention: AttentionContext, device: torch.device) -> KvShape:
    """Compute one token to see which keys and values the layers make. Raises ModelUnusableError where they
    differ, or the model computes nothing.
    """
    probe = _ShapeProbe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with attention.during(probe):
        try:
            module(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=zero[0])
        except RuntimeError as error:  # sizes of its config contradict each other
            raise ModelUnusableError(f"this model can't compute a token: {' '.join(str(error).split())}") from error
    shapes = set(probe.shapes.values())
    if sorted(probe.shapes) != list(range(len(probe.shapes))) or len(shapes) != 1:
        raise ModelUnusableError("the layers of this model differ in the shape of their keys and values")
    return KvShape(len(probe.shapes), *shapes.pop())
