"""Fused linears: linear layers that a model calls one after the other with the same input, computed as one product.

x ──▶ FusedProduct.compute(x) ──▶ y [..., q | k | v] ──▶ q_proj, k_proj and v_proj each return a view of y
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from worker.engine.quantized.weight import AnyLinear, QuantizedLinear, concatenate

# Names of layers that transformers' models call with the same input, inside one parent module.
_SAME_INPUT = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
    frozenset({"query", "key", "value"}),
    frozenset({"query_proj", "key_proj", "value_proj"}),
)


def fusion_candidates(names: Iterable[str]) -> list[list[str]]:
    """Group layers by names that suggest a shared input; FusedProduct stays correct where the inputs differ."""
    groups: dict[tuple[str, frozenset[str]], list[str]] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        group = next((names for names in _SAME_INPUT if child in names), frozenset({child}))
        groups.setdefault((parent, group), []).append(name)
    return list(groups.values())


def can_fuse(linears: Sequence[AnyLinear]) -> bool:
    """Tell whether the layers can be one product: same in_features, all or none a bias, weights of one kind."""
    return len({(linear.in_features, linear.bias is None, _kind(linear)) for linear in linears}) == 1


def _kind(linear: AnyLinear) -> object:
    if not isinstance(linear, QuantizedLinear):
        return linear.weight.dtype
    weight = linear.weight
    return weight.bits, weight.group, weight.codes.dtype, weight.zeros is None


def fuse(linears: Sequence[AnyLinear]) -> AnyLinear:
    """Concatenate the outputs of layers that can be fused into one layer; a single layer is returned unchanged."""
    if len(linears) == 1:
        return linears[0]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    quantized = [linear.weight for linear in linears if isinstance(linear, QuantizedLinear)]
    if quantized:
        return QuantizedLinear(concatenate(quantized), bias)
    weights: list[Tensor] = [linear.weight for linear in linears if isinstance(linear, nn.Linear)]
    fused = nn.Linear(linears[0].in_features, sum(map(len, weights)), bias=bias is not None, device="meta")
    fused.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if bias is not None:
        fused.bias = nn.Parameter(bias, requires_grad=False)
    return fused


def fused_groups(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Group the names of layers by the product that computes them."""
    groups: dict[object, list[str]] = {}
    for name in names:
        layer = model.get_submodule(name)
        groups.setdefault(layer.product if isinstance(layer, FusedPart) else layer, []).append(name)
    return list(groups.values())


def place_parts(model: nn.Module, names: Sequence[str], product: FusedProduct) -> None:
    """Replace these layers of the model by the parts of a product, in the order of its widths."""
    for index, name in enumerate(names):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FusedPart(product, index))


class FusedProduct:
    """The outputs of layers with the same input, side by side: computed for the first layer that is called.

    `base` computes x [..., in_features] to [..., sum of `widths`]. Subclasses add the rows' adapters in `compute`.
    """

    def __init__(self, base: Callable[[Tensor], Tensor], widths: Sequence[int]) -> None:
        self.base = base
        self.widths = tuple(widths)
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._returned = 0

    def compute(self, x: Tensor) -> Tensor:
        """Compute all layers' outputs: x [..., in_features] to [..., sum of the widths]."""
        return self.base(x)

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of one layer for x, by its index in `widths`: a view of the whole product."""
        if len(self.widths) == 1:
            return self.compute(x)
        # Compared by identity, so that a layer called with another tensor gets its own product.
        if self._x is not x:
            parts = self.compute(x).split_with_sizes(self.widths, -1)
            self._x, self._parts, self._returned = x, parts, 0
        part = self._parts[index]
        self._returned += 1
        if self._returned == len(self.widths):
            # Every layer has its part: free a long prompt's activations.
            self._x, self._parts = None, ()
        return part


class FusedPart(nn.Module):
    """A layer of a FusedProduct."""

    def __init__(self, product: FusedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output: [..., in_features] to [..., its width]."""
        return self.product.part(self.index, x)
