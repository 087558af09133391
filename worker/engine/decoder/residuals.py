"""The additions of a decoder layer on CUDA, each in one launch with the normalization that follows it.

    x ─▶ norm ─▶ attention ─▶ + x, norm ─▶ MLP ─▶ +, norm of the next layer ─▶

A layer is replaced where a copy of it, with simple functions in place of its modules, adds in this way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_MODULES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class AddingNorm(Protocol):
    """A normalization that adds first."""

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """Return x + added; the module's next call with it finds it normalized."""


def use_layers(model: Any, norms: Mapping[nn.Module, AddingNorm]) -> None:
    """Replace the layers that add in this way, between normalizations that are in `norms`."""
    layers: list[Any] = [module for module in model.modules() if set(module._modules) == _MODULES]
    ends = [layer.input_layernorm for layer in layers] + [getattr(model.base_model, "norm", None)]
    for layer, (_, following) in zip(layers, pairwise(ends), strict=True):
        if layer.post_attention_layernorm in norms and following in norms and adds_residuals(layer):
            layer.forward = _layer_forward(layer, norms[layer.post_attention_layernorm], norms[following])


class _Simple(nn.Module):
    """A function in place of a module, which keeps the named arguments."""

    def __init__(self, factor: float, *, pair: bool = False) -> None:
        super().__init__()
        self.named: dict[str, Any] = {}
        self._factor, self._pair = factor, pair

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        """Return the numbers' sines by a factor; an attention returns a pair."""
        self.named = named
        result = (hidden_states * self._factor).sin()
        return (result, None) if self._pair else result


@torch.inference_mode()
def adds_residuals(layer: nn.Module) -> bool:
    """Tell whether a layer adds its attention and its MLP to its input, and passes its arguments on as they are."""
    probe, before, between, mlp = copy.copy(layer), _Simple(2.0), _Simple(3.0), _Simple(5.0)
    attention = _Simple(7.0, pair=True)
    probe._modules = {
        "input_layernorm": before, "self_attn": attention, "post_attention_layernorm": between, "mlp": mlp
    }  # fmt: skip
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    named = {"position_embeddings": (x, x), "attention_mask": None, "position_ids": torch.zeros(1, 5)}
    try:
        computed = probe(x, **named)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it takes something else
        return False
    same = all(attention.named.get(name) is value for name, value in named.items())
    others = [value for name, value in attention.named.items() if name not in named]
    sums = x + attention(before(x))[0]
    expected = sums + mlp(between(sums))
    return same and not any(others) and isinstance(computed, Tensor) and torch.equal(computed, expected)


def _layer_forward(layer: Any, between: AddingNorm, following: AddingNorm) -> Callable[..., Tensor]:
    before, attention, normalize, mlp = (
        layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp
    )  # fmt: skip

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        attended, _ = attention(before(hidden_states), *arguments, **named)
        sums = between.add(hidden_states, attended)
        return following.add(sums, mlp(normalize(sums)))

    return forward
