"""A decoder layer as compiled kernels from end to end.

x ─▶ norm ─▶ q|k|v ─▶ rotate ─▶ attention ─▶ o ─▶ + x, norm ─▶ gate|up ─▶ silu(gate) * up ─▶ down ─▶ + ─▶

Its numbers lie in an arena: new memory for each, or, for a program, the same places in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.kernels.rows import compile_rows
from loraplex.worker.engine.attention.cpu import CpuPlan
from loraplex.worker.engine.attention.paged import AttentionStep, LayerCall
from loraplex.worker.engine.device import dtype_name
from loraplex.worker.engine.lora.cpu import CpuGroup

# Minimum number of numbers that threads share: fewer take less time than the sharing.
_SHARED = 16_384


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization: x / sqrt(mean of x ** 2 + epsilon) * weight [columns], float32."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Heads:
    """The queries, keys and values of a row, side by side: heads * key_dim, kv_heads * key_dim, kv_heads * value_dim.

    Queries and keys of each head are normalized where there are norms, which have one epsilon.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """The cosines and sines of each row [rows, columns]; the first `columns` numbers of a head are rotated."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """The slot of each row [rows] in a layer's keys and values."""

    slots: Tensor
    keys: Tensor
    values: Tensor


class RowOperators:
    """The operators for rows of one dtype; from one thread. A kernel is compiled at its first call."""

    def __init__(self, dtype: torch.dtype, shared: int = _SHARED) -> None:
        """Let threads share what has at least `shared` numbers."""
        self.dtype = dtype
        self._shared = shared
        self.counter = np.zeros(1, np.int64)
        self._at = self.counter.ctypes.data

    def norm(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        """Normalize rows x into `out`."""
        self.add_norm(x, None, x, norm, out)

    def add_norm(self, x: Tensor, y: Tensor | None, sums: Tensor, norm: Norm, out: Tensor) -> None:
        """Write x + y into `sums`, and these normalized into `out`; x alone where there is no y."""
        size = x.element_size()
        other = (0, 0) if y is None else (y.data_ptr(), y.stride(0) * size)
        self._run(
            "norm",
            out,
            *(x.data_ptr(), x.stride(0) * size, *other, sums.data_ptr(), sums.stride(0) * size),
            *(norm.weight.data_ptr(), out.data_ptr(), out.stride(0) * size, norm.epsilon),
        )

    def gate(self, x: Tensor, out: Tensor) -> None:
        """Multiply silu of the first half of rows x by the second half into `out`, which has half the columns."""
        size, columns = x.element_size(), out.shape[1]
        first = x.data_ptr()
        self._run("gate", out, first, first + columns * size, x.stride(0) * size, out.data_ptr(), out.stride(0) * size)

    def rotate(self, x: Tensor, heads: Heads, rotation: Rotation | None, to: Slots | None = None) -> None:
        """Normalize and rotate the queries and keys of rows x, in place; then write keys and values to their slots."""
        size = x.element_size()
        turn = (0, 0, 0, 0)
        if rotation is not None:
            cos = rotation.cos
            turn = cos.data_ptr(), rotation.sin.data_ptr(), cos.stride(0) * size, cos.shape[1] // 2
        norms = [0 if norm is None else norm.weight.data_ptr() for norm in (heads.query_norm, heads.key_norm)]
        places = (0, 0, 0) if to is None else (to.slots.data_ptr(), to.keys.data_ptr(), to.values.data_ptr())
        norm = heads.query_norm or heads.key_norm
        self._run(
            "rotate",
            x,
            *(x.data_ptr(), x.stride(0) * size, heads.heads, heads.kv_heads, heads.key_dim, heads.value_dim),
            *(*turn, *norms, *places, size, norm.epsilon if norm else 0.0),
        )

    def add(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Add rows x and y into `out`."""
        size = x.element_size()
        places = [part for rows in (x, y, out) for part in (rows.data_ptr(), rows.stride(0) * size)]
        self._run("add", out, *places)

    def widen(self, x: Tensor, out: Tensor) -> None:
        """Convert rows x to float32 into `out`."""
        self._run("widen", out, x.data_ptr(), x.stride(0) * x.element_size(), out.data_ptr(), out.stride(0) * 4)

    def _run(self, name: str, over: Tensor, *places: float) -> None:
        rows, columns = over.shape
        kernel = compile_rows(name, dtype_name(self.dtype))
        self.counter[0] = 0
        (kernel.run if rows * columns >= self._shared else kernel.run_alone)(rows, columns, self._at, *places)


class Arena:
    """The memory of a layer's numbers, new for each, and the products of its linear layers."""

    def __init__(self, operators: RowOperators) -> None:
        self.operators = operators

    def rows(self, name: str, like: Tensor, columns: int) -> Tensor:
        """Return memory for as many rows as `like` has, valid until the same name is asked for again."""
        return like.new_empty(len(like), columns)

    def multiply(self, name: str, group: CpuGroup, x: Tensor) -> Tensor:
        """Return a group's product of rows x, and what the rows' adapters add."""
        return group.compute(x)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP: down(silu(gate) * up), of which gate and up are one product."""

    gate_up: CpuGroup
    down: CpuGroup

    def run(self, x: Tensor, arena: Arena) -> Tensor:
        """Compute rows x."""
        both = arena.multiply("gate_up", self.gate_up, x)
        gated = arena.rows("gated", x, self.down.in_features)
        arena.operators.gate(both, gated)
        return arena.multiply("down", self.down, gated)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A decoder layer; `attention` holds all of its call but the step's own queries, keys and values."""

    before: Norm
    qkv: CpuGroup
    heads: Heads
    attention: LayerCall
    rotates: bool
    o: CpuGroup
    between: Norm
    mlp: Mlp

    @property
    def groups(self) -> tuple[CpuGroup, ...]:
        """Return the products of linear layers."""
        return self.qkv, self.o, self.mlp.gate_up, self.mlp.down

    @property
    def widths(self) -> tuple[object, ...]:
        """Return the widths of its rows: layers with the same can share memory."""
        heads = self.heads
        attended = heads.heads, heads.kv_heads, heads.key_dim, heads.value_dim
        return *((group.in_features, group.width) for group in self.groups), attended

    def run(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan, arena: Arena) -> Tensor:
        """Compute rows x [tokens, columns] of a step."""
        cache = step.cache
        to = None if cache.scales else Slots(step.slot_mapping, *cache.slots[self.attention.layer])
        call = self.call(self.project(x, rotation, arena, to))
        if cache.scales:
            plan.quantize(call, step.slot_mapping, cache)
        attended = self.attended(x, arena)
        plan.attend(call, cache, attended)
        return self.finish(x, attended.flatten(1), arena)

    def attended(self, x: Tensor, arena: Arena) -> Tensor:
        """Return memory for what the heads of rows x attend to: [rows, heads, value_dim]."""
        heads, dim = self.heads.heads, self.heads.value_dim
        return arena.rows("attended", x, heads * dim).view(len(x), heads, dim)

    def project(self, x: Tensor, rotation: Rotation, arena: Arena, to: Slots | None = None) -> Tensor:
        """Return the rows' queries, keys and values, rotated, side by side; keys and values go to their slots."""
        normed = arena.rows("normed", x, x.shape[1])
        arena.operators.norm(x, self.before, normed)
        qkv = arena.multiply("qkv", self.qkv, normed)
        arena.operators.rotate(qkv, self.heads, rotation if self.rotates else None, to)
        return qkv

    def call(self, qkv: Tensor) -> LayerCall:
        """Return the layer's call of its attention."""
        heads, of = self.heads, self.attention
        first, tokens, row = qkv.storage_offset(), len(qkv), qkv.stride(0)
        values = first + (heads.heads + heads.kv_heads) * heads.key_dim
        query = qkv.as_strided((tokens, heads.heads, heads.key_dim), (row, heads.key_dim, 1), first)
        keys = first + heads.heads * heads.key_dim
        key = qkv.as_strided((tokens, heads.kv_heads, heads.key_dim), (row, heads.key_dim, 1), keys)
        value = qkv.as_strided((tokens, heads.kv_heads, heads.value_dim), (row, heads.value_dim, 1), values)
        return LayerCall(of.layer, query, key, value, of.scaling, of.window, of.softcap, of.sinks)

    def finish(self, x: Tensor, attended: Tensor, arena: Arena) -> Tensor:
        """Return the layer's result from its input and what its heads attended to, side by side."""
        projected = arena.multiply("o", self.o, attended)
        sums, normed = (arena.rows(name, x, x.shape[1]) for name in ("sums", "normed"))
        arena.operators.add_norm(x, projected, sums, self.between, normed)
        down = self.mlp.run(normed, arena)
        out = arena.rows("out", x, x.shape[1])
        arena.operators.add(sums, down, out)
        return out
