"""The parts of a model that each of several ranks has, by the rules of transformers' base_model_tp_plan.

    queries, keys and values   rows, by heads; a key's head is copied where there are fewer of these than ranks
    gate and up, experts too   rows
    o and down                 columns, of the same heads and rows: the ranks' outputs are summed
    output head                rows; the ranks' logits are put side by side

A layer that is in no rule is whole on every rank. Some families normalize the queries of all heads together: their
ranks put queries, keys and values side by side, attend with all heads, and each takes its own columns for o.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loraplex.contracts.artifacts.families import HEAD, HEAD_WEIGHTS
from loraplex.worker.engine_api import ModelUnusableError

# A range of numbers along a dimension: the first, and the one behind the last.
Span = tuple[int, int]

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")
# The tensors of experts, one by one or all of a layer, in checkpoints and in modules.
_EXPERT = re.compile(r"(?:.*\.)?experts\.(?:\d+\.)?(?P<kind>\w+?)(?:\.weight)?")
_EXPERTS_OF_GRANITE = re.compile(r"block_sparse_moe\.(?P<kind>(?:input|output)_linear)\.weight")
# transformers' names of the rules that are known here; others are refused.
_ROWS, _COLUMNS = {"colwise", "colwise_gather_output", "packed_colwise"}, {"rowwise", "rowwise_split_input"}
_WHOLE = {"replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj"}
_EXPERTS = "moe_tp_experts"
# Names of the tensors of experts that give their inner numbers, those that give the gates beside them, and those that
# take them, in checkpoints and in transformers' modules.
_UP = {"gate_proj", "up_proj", "w1", "w3"}
_GATE_UP = {"gate_up_proj", "input_linear"}
_DOWN = {"down_proj", "w2", "output_linear"}
# Layers whose outputs belong to the heads of keys and values.
_KEYS = {"k_proj", "v_proj"}
# Columns that kernels take at once: inner numbers are cut at multiples of them, where there are enough.
_UNIT = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Spans of a tensor along one dimension, side by side."""

    dim: int
    spans: tuple[Span, ...]

    def of(self, tensor: Any) -> Tensor:
        """Return the part of a tensor, or of a slice of a file that is not read yet, which then reads no more."""
        before = (slice(None),) * (self.dim % len(_shape(tensor)))
        parts = [tensor[(*before, slice(first, stop))] for first, stop in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def shape(self, shape: Iterable[int]) -> list[int]:
        """Return the shape of the part of a tensor of this shape."""
        sizes = list(shape)
        sizes[self.dim] = sum(stop - first for first, stop in self.spans)
        return sizes


@dataclass(frozen=True, slots=True)
class Split:
    """A rank's part of a linear layer: the outputs in `outputs` of its inputs in `inputs`; None: all.

    `sums`: the ranks' outputs are summed. `gathers`: they are put side by side; it is the number of all of them.
    `cuts`: the input comes whole, and the rank takes its own.
    """

    outputs: tuple[Span, ...] | None = None
    inputs: Span | None = None
    sums: bool = False
    gathers: int = 0
    cuts: bool = False

    @property
    def part(self) -> Part:
        """Return the part of the weight [outputs, inputs]."""
        return Part(0, self.outputs) if self.outputs is not None else Part(1, (self.inputs or (0, 0),))


class RankPlan:
    """The parts of a model that one of several ranks has."""

    def __init__(self, config: Any, rank: int, ranks: int, group: int = 0) -> None:
        """Plan a model by its transformers config; quantized weights have scales for groups of so many columns.

        Raises ModelUnusableError where the model cannot be divided.
        """
        self._rank, self._ranks, self._group = rank, ranks, group
        styles: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        name = (config.architectures or [config.model_type])[0]
        if not styles:
            raise ModelUnusableError(f"--tensor-parallel: transformers has no plan to divide {name}; leave it out")
        unknown = sorted(set(styles.values()) - _ROWS - _COLUMNS - _WHOLE - {_EXPERTS})
        if unknown:
            raise ModelUnusableError(
                f"--tensor-parallel: transformers divides {name} by the unknown rule {unknown[0]}; leave it out"
            )
        self._styles = {name.removeprefix("layers.*."): style for name, style in styles.items()}
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or self._heads
        for what, count in (("attention heads", self._heads), ("key heads", self._kv_heads)):
            if count % ranks and (count == self._heads or ranks % count):
                raise ModelUnusableError(
                    f"--tensor-parallel {ranks}: {name} has {count} {what}, which cannot be divided among so many ranks"
                )

    def split(self, name: str, outputs: int, inputs: int) -> Split | None:
        """Return the part of a linear layer of so many outputs and inputs; None: all of it."""
        if name == HEAD:
            return Split(self._padded(outputs), gathers=outputs)
        tail = _tail(name)
        style, last = self._styles.get(tail, ""), tail.rpartition(".")[2]
        if _is_attention(tail):
            return self._of_attention(style, last, outputs, inputs)
        if style in _COLUMNS:
            return Split(inputs=self._inner(inputs), sums=True)
        if style in _ROWS:
            return Split(self._blocks(outputs, 2) if last == "gate_up_proj" else (self._inner(outputs),))
        return None

    def split_experts(self, name: str, outputs: int, inputs: int) -> Split | None:
        """Return the part of each expert of a tensor that has so many outputs and inputs for each; None: all of it."""
        part = self.part(name, (outputs, inputs))
        if part is None:
            return None
        return Split(part.spans) if part.dim == -2 else Split(inputs=part.spans[0], sums=True)

    def part(self, name: str, shape: Sequence[int]) -> Part | None:
        """Return the part of a tensor of a checkpoint, or of a parameter of its model; None: all of it."""
        if name in HEAD_WEIGHTS:
            return Part(0, self._padded(shape[0]))
        tail = _tail(name)
        expert = _EXPERT.fullmatch(tail) or _EXPERTS_OF_GRANITE.fullmatch(tail)
        if expert is not None and _EXPERTS in self._styles.values():
            return self._of_experts(expert["kind"], shape)
        layer, _, kind = tail.rpartition(".")
        last = layer.rpartition(".")[2]
        if _is_attention(tail) and (kind == "sinks" or (last in ("q_norm", "k_norm") and len(shape) == 2)):
            return Part(0, (self._of_kv_heads(shape[0]) if last == "k_norm" else self._of_heads(shape[0]),))
        # Sizes of a bias alone are those of outputs.
        split = self.split(name.rpartition(".")[0], shape[0], shape[-1]) if kind in ("weight", "bias") else None
        if split is None or (kind == "bias" and split.outputs is None):
            return None
        return split.part

    def parts(self, slices: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's slices, by name, as parts that are read when transformers asks for them."""
        parts = {name: self.part(name, whole.get_shape()) for name, whole in slices.items()}
        return {
            name: whole if (part := parts[name]) is None else SlicePart(whole, part) for name, whole in slices.items()
        }

    def sums(self, model: nn.Module) -> list[str]:
        """Return the names of a model's modules, apart from linear layers, whose outputs are summed."""
        return [name for name, _ in model.named_modules() if self._styles.get(_tail(name)) == _EXPERTS]

    def _of_attention(self, style: str, last: str, outputs: int, inputs: int) -> Split | None:
        size = outputs // self._ranks
        match style:
            case "colwise":
                return Split((self._of_kv_heads(outputs) if last in _KEYS else self._of_heads(outputs),))
            case "rowwise":
                return Split(inputs=self._of_heads(inputs), sums=True)
            case "colwise_gather_output" if outputs % self._ranks == 0:
                return Split(((self._rank * size, (self._rank + 1) * size),), gathers=outputs)
            case "rowwise_split_input":
                return Split(inputs=self._inner(inputs), sums=True, cuts=True)
        return None

    def _of_experts(self, kind: str, shape: Sequence[int]) -> Part | None:
        # One expert's [out, in], or those of all [experts, out, in].
        if kind in _UP:
            return Part(-2, (self._inner(shape[-2]),))
        if kind in _GATE_UP:
            return Part(-2, self._blocks(shape[-2], 2))
        return Part(-1, (self._inner(shape[-1]),)) if kind in _DOWN else None

    def _of_heads(self, size: int) -> Span:
        each = size // self._ranks
        return self._rank * each, (self._rank + 1) * each

    def _of_kv_heads(self, size: int) -> Span:
        if self._kv_heads % self._ranks == 0:
            return self._of_heads(size)
        head, each = self._rank * self._kv_heads // self._ranks, size // self._kv_heads
        return head * each, (head + 1) * each

    def _blocks(self, size: int, blocks: int) -> tuple[Span, ...]:
        """Return the rank's part of each of some blocks that lie one after the other."""
        each = size // blocks
        first, stop = self._inner(each)
        return tuple((block * each + first, block * each + stop) for block in range(blocks))

    def _inner(self, size: int) -> Span:
        """Return the rank's part of inner numbers: whole groups, or else whole units, where there are enough."""
        unit = next((unit for unit in (self._group, _UNIT, 2) if unit and size >= unit * self._ranks), 1)
        first, stop = (-(-size // unit) * rank // self._ranks * unit for rank in (self._rank, self._rank + 1))
        return first, min(stop, size)

    def _padded(self, size: int) -> tuple[Span, ...]:
        """Return as many outputs as any rank has; where there are none left, the last one again."""
        each = -(-size // self._ranks)
        first, stop = (min(size, rank * each) for rank in (self._rank, self._rank + 1))
        return (*(((first, stop),) if first < stop else ()), *[(size - 1, size)] * (each - stop + first))


def _tail(name: str) -> str:
    """Return the name within a layer, as the plans have it; else the name."""
    found = _LAYER.search(name)
    return found[1] if found else name


def _is_attention(tail: str) -> bool:
    return tail.startswith(("self_attn.", "attention."))


def _shape(tensor: Any) -> Sequence[int]:
    shape: Sequence[int] = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
    return shape


class SlicePart:
    """A part of a slice of a safetensors file, as transformers takes a slice: it is read when it is indexed."""

    def __init__(self, whole: Any, part: Part) -> None:
        self._whole, self._part = whole, part

    def __getitem__(self, index: Any) -> Tensor:
        """Read the part."""
        return self._part.of(self._whole)[index]

    def get_shape(self) -> list[int]:
        """Return the part's shape."""
        return self._part.shape(self._whole.get_shape())

    def get_dtype(self) -> str:
        """Return the name of the dtype."""
        dtype: str = self._whole.get_dtype()
        return dtype
