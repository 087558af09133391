"""The loaded model's own layers, as reading an adapter asks for them: for DoRA, and to check copied weights.

Linear layers that a model calls one after the other with the same input are fused, computed as one product:

    x ──▶ FusedProduct.compute(x) ──▶ y [..., q | k | v] ──▶ q_proj, k_proj and v_proj each return a view of y
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from loraplex.contracts.artifacts.base_modules import read_weights
from loraplex.contracts.artifacts.checkpoint import read_checkpoint, read_config
from loraplex.contracts.artifacts.experts import ExpertSizes
from loraplex.contracts.artifacts.families import HEAD, HEAD_WEIGHTS, is_embedding
from loraplex.worker.engine.device import return_freed_memory
from loraplex.worker.engine.parallel.group import SplitModel
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedEmbedding, QuantizedLinear, is_linear, linear_of
from loraplex.worker.engine.quantized.stored import QuantizedWeights, open_slices
from loraplex.worker.engine.quantized.weight import QuantizedWeight, concatenate

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
    return weight.bits, weight.group, weight.codes.dtype, weight.scales.dtype, weight.zeros is None


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
    return linear_of(torch.cat(weights), bias)


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
        model.set_submodule(name, FusedPart(product, index))


class FusedProduct:
    """The outputs of layers with the same input, side by side: computed for the first layer that is called.

    `base` computes x [..., in_features] to [..., sum of `widths`]. Subclasses add the rows' adapters in `multiply`.
    `add`, where it is set, makes the ranks' sum of what one has computed.
    """

    def __init__(self, base: Callable[[Tensor], Tensor], widths: Sequence[int]) -> None:
        self.base = base
        self.widths = tuple(widths)
        self.add: Callable[[Tensor], Tensor] | None = None
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._returned = 0

    def compute(self, x: Tensor) -> Tensor:
        """Compute all layers' outputs: x [..., in_features] to [..., sum of the widths]."""
        y = self.multiply(x)
        return y if self.add is None else self.add(y)

    def multiply(self, x: Tensor) -> Tensor:
        """Compute this rank's part of `compute`."""
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

    @property
    def is_plain(self) -> bool:
        """Tell whether the layer has no hooks, so that its product may be computed in its place."""
        return not self._forward_hooks and not self._forward_pre_hooks

    def sum_by(self, add: Callable[[Tensor], Tensor]) -> None:
        """Let the product return what `add` makes of it."""
        self.product.add = add


# Number of a weight's rows that are cast to float32 at once: larger pieces stay in the process's heap.
_PIECE_ROWS = 256


@dataclass(frozen=True)
class LoadedBase:
    """A base model ready to run, with its sizes.

    `linears` are the layers that an adapter may change, `ends` the token embeddings and the layers of its head: of each
    (in_features, out_features) by name; `experts` are the tensors of experts. `pooling` is the way in which hidden
    states become one vector where a request does not say.
    """

    module: Any
    device: torch.device
    dtype: torch.dtype
    context_length: int
    vocab_size: int
    pooling: str
    linears: Mapping[str, tuple[int, int]]
    ends: Mapping[str, tuple[int, int]]
    directory: Path
    # Number of the model's weights.
    parameters: int
    # Weights that are quantized; None where none are.
    quantized: QuantizedWeights | None
    experts: Mapping[str, ExpertSizes] = field(default_factory=dict, kw_only=True)
    # The ranks that the model is split among, of whose layers `linears` and `ends` are parts; None: this one has all.
    split: SplitModel | None = field(default=None, kw_only=True)

    @property
    def adaptable(self) -> dict[str, tuple[int, ...]]:
        """Return what adapters may change on this device: CUDA's kernels leave the ends as they are."""
        layers = {**self.linears, **self.experts, **(self.ends if self.device.type == "cpu" else {})}
        return layers if self.split is None else {name: self.split.whole[name] for name in layers}


class ModelLayers:
    """The layers of a model on any device, as numbers on the CPU.

    Called by loader threads while steps run. Made before its weights are packed, of which it keeps one number for each
    output of a layer. Neither the products nor the reading change anything that steps use.
    """

    def __init__(self, loaded: LoadedBase) -> None:
        self.loaded = loaded
        # The number of tokens that have embeddings.
        self.vocabulary: int = loaded.module.get_input_embeddings().num_embeddings
        self._squares: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}
        for name in (*loaded.linears, *loaded.ends):
            layer = loaded.module.get_submodule(name)
            # Embeddings stay as they are: they can be asked later.
            if is_linear(layer):
                self._squares[name] = squares_of(layer.weight).cpu()
                if layer.bias is not None:
                    self._biases[name] = layer.bias.detach().float().cpu()
        return_freed_memory()

    def squares(self, module: str) -> Tensor:
        """Return the sum of squares of each output's weights: [out_features] float32."""
        if module in self._squares:
            return self._squares[module]
        weight: Any = self._own(module).weight
        return squares_of(numbers_of(weight, torch.float32).t()).cpu()

    @property
    def ends(self) -> Mapping[str, tuple[int, ...]]:
        """Return the sizes of token embeddings and output head, which adapters may not change on every device."""
        split = self.loaded.split
        return self.loaded.ends if split is None else {name: split.whole[name] for name in self.loaded.ends}

    @torch.inference_mode()
    def product(self, module: str, a: Tensor) -> Tensor:
        """Multiply a [rows, in_features] with the layer's weight, without its bias: [rows, out_features] float32.

        For token embeddings in_features is the vocabulary: each row of a weights the tokens' embeddings.
        """
        layer, a = self._own(module), a.to(self.loaded.device, self.loaded.dtype)
        if isinstance(layer, nn.Embedding | QuantizedEmbedding):
            return (a @ numbers_of(layer.weight, a.dtype)).float().cpu()
        if isinstance(layer, AnyLinear):
            return linear(a, numbers_of(layer.weight, a.dtype)).float().cpu()
        # Not through the part's own call: it keeps what the step that runs has computed.
        assert isinstance(layer, FusedPart)
        y = layer.product.base(a).split_with_sizes(layer.product.widths, -1)[layer.index]
        bias = self.bias(module)
        return y.float().cpu() if bias is None else y.float().cpu() - bias

    def bias(self, module: str) -> Tensor | None:
        """Return the layer's bias [out_features] float32; None where it has none."""
        return self._biases.get(module)

    def output_scale(self, module: str) -> float:
        """Return the factor that the model multiplies token embeddings by (1 in most families)."""
        return float(getattr(self._own(module), "embed_scale", 1.0))

    def rows(self, module: str, ids: Sequence[int]) -> Tensor:
        """Return tokens' rows of the embeddings or of the output head: [ids, hidden size] float32.

        Quantized ones as the model computes with them.
        """
        chosen, quantized = torch.tensor(ids), self.loaded.quantized
        if quantized is not None and (rows := quantized.rows(module, chosen)) is not None:
            return rows.dequantize(self.loaded.dtype).float()
        return self._weight(module)[chosen].to("cpu", self.loaded.dtype).float()

    def tied_to(self, module: str) -> tuple[str, ...]:
        """Return the output head, if it shares its weight with embeddings of this name."""
        quantized = self.loaded.quantized
        # transformers is told that quantized ends are not tied: it does not load them.
        tied = getattr(self.loaded.module.config, "tie_word_embeddings", False) or (quantized and quantized.tied)
        return (HEAD,) if tied and is_embedding(module) and HEAD in self.loaded.ends else ()

    def repeats(self, parameter: str, values: Tensor) -> bool:
        """Tell whether a parameter of the embeddings or the output head equals these values in the model's dtype."""
        module, _, kind = parameter.rpartition(".")
        dtype, quantized = self.loaded.dtype, self.loaded.quantized
        if kind == "weight" and quantized is not None:
            repeated = quantized.repeats(module, values, dtype)
            if repeated is not None:
                return repeated
        own = self.bias(module) if kind == "bias" else self._weight(module)
        return own is not None and torch.equal(own.to("cpu", dtype), values.to(dtype))

    def _weight(self, module: str) -> Tensor:
        """Return the weight of the embeddings or the head from its file: in memory it may be packed."""
        checkpoint = read_checkpoint(self.loaded.directory)
        with open_slices(checkpoint, mapped=True) as slices:
            name = None if is_embedding(module) else next((name for name in HEAD_WEIGHTS if name in slices), None)
            if name is None:
                weights = read_weights(read_config(self.loaded.directory), checkpoint).values()
                name = next(weight.tensor for weight in weights if weight.is_embedding)
            weight: Tensor = slices[name][...]
        return weight

    def _own(self, module: str) -> nn.Module:
        layer = self.loaded.module.get_submodule(module)
        own: nn.Module = getattr(layer, "base", layer)  # adapted embeddings have the model's own
        return own


def numbers_of(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight as it is or, where it is quantized, dequantized."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight


def squares_of(weight: Tensor | QuantizedWeight) -> Tensor:
    """Return the squared norm of each row; in pieces, because a float32 copy is made of each."""
    if isinstance(weight, QuantizedWeight):
        starts = range(0, weight.out_features, _PIECE_ROWS)
        return torch.cat([squares_of(weight.rows(slice(start, start + _PIECE_ROWS)).dequantize()) for start in starts])
    norms = torch.empty(len(weight), device=weight.device)
    # One for all pieces: the heap does not use an aligned piece's memory for the next one.
    wide = torch.empty(min(_PIECE_ROWS, len(weight)), weight.shape[1], device=weight.device)
    for piece, part in zip(torch.split(weight, _PIECE_ROWS), torch.split(norms, _PIECE_ROWS), strict=True):
        torch.linalg.vector_norm(wide[: len(piece)].copy_(piece), dim=1, out=part)
    return norms.square_()


def own_forward(module: Any) -> Callable[..., Any]:
    """Return a module's forward without a reference to the module, which would then never be freed by its last one."""
    method = WeakMethod(module.forward)

    def forward(*arguments: Any, **named: Any) -> Any:
        own = method()
        assert own is not None, "the module is calling"
        return own(*arguments, **named)

    return forward
