"""Linear layers that models call one after the other with the same input, computed as one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

_SHARING = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
    frozenset({"query", "key", "value"}),
)


def fusion_candidates(names: Iterable[str]) -> list[list[str]]:
    """The names of layers, those together that are likely to share an input; who relies on it must look whether."""
    groups: dict[tuple[str, frozenset[str]], list[str]] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        sharing = next((names for names in _SHARING if child in names), frozenset({child}))
        groups.setdefault((parent, sharing), []).append(name)
    return list(groups.values())


def can_fuse(linears: Sequence[nn.Linear]) -> bool:
    """Whether these layers can be one product: as many inputs, and all or none with a bias."""
    return len({(linear.in_features, linear.bias is None) for linear in linears}) == 1


def fuse(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Layers that can be fused as one, with their outputs side by side; one alone is returned as it is."""
    if len(linears) == 1:
        return linears[0]
    has_bias = linears[0].bias is not None
    width = sum(linear.out_features for linear in linears)
    fused = nn.Linear(linears[0].in_features, width, bias=has_bias, device="meta")
    weights: list[Tensor] = [linear.weight for linear in linears]
    fused.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if has_bias:
        biases: list[Tensor] = [linear.bias for linear in linears]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def fused_groups(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """The names of layers, those together that are one product."""
    groups: dict[object, list[str]] = {}
    for name in names:
        layer = model.get_submodule(name)
        groups.setdefault(layer.product if isinstance(layer, FusedPart) else layer, []).append(name)
    return list(groups.values())


def replace_linears(model: nn.Module, names: Sequence[str], product: FusedProduct) -> None:
    """Put the parts of a product in the places of these layers, in their order."""
    for index, name in enumerate(names):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FusedPart(product, index))


class FusedProduct:
    """What layers that are called with the same input give, `widths` features each: computed for the first that asks.

    `product` makes [..., in_features] into [..., sum of the widths]; `base` is the same without adapters.
    """

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        widths: Sequence[int],
        base: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._product = product
        self.base = base or product
        self.widths = tuple(widths)
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._asked = 0

    def part(self, index: int, x: Tensor) -> Tensor:
        """What the layer of that index gives for x: a view of the whole product."""
        if len(self.widths) == 1:
            return self._product(x)
        # The same object: a layer that was called with something else meanwhile is not mistaken.
        if self._x is not x:
            parts = self._product(x).split_with_sizes(self.widths, -1)
            self._x, self._parts, self._asked = x, parts, 0
        part = self._parts[index]
        self._asked += 1
        if self._asked == len(self.widths):
            # Nobody else will ask: a long prompt's numbers need not stay.
            self._x, self._parts = None, ()
        return part


class FusedPart(nn.Module):
    """One of the layers of a FusedProduct."""

    def __init__(self, product: FusedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Its part of the product."""
        return self.product.part(self.index, x)
