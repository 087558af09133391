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
from loraplex.worker.engine.attention.paged import AttentionStep
from loraplex.worker.engine.decoder.recognition import AttentionForm, Norm
from loraplex.worker.engine.device import dtype_name
from loraplex.worker.engine.lora.cpu import CpuGroup

# Minimum number of numbers that threads share: fewer take less time than the sharing.
_SHARED = 16_384


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

    def rotate(self, x: Tensor, form: AttentionForm, rotation: Rotation | None, to: Slots | None = None) -> None:
        """Normalize and rotate the queries and keys of rows x, in place; then write keys and values to their slots.

        Each head is normalized by itself, where there are norms.
        """
        size = x.element_size()
        turn = (0, 0, 0, 0)
        if rotation is not None:
            cos = rotation.cos
            turn = cos.data_ptr(), rotation.sin.data_ptr(), cos.stride(0) * size, cos.shape[1] // 2
        norms = (0, 0) if form.norms is None else [norm.weight.data_ptr() for norm in form.norms]
        places = (0, 0, 0) if to is None else (to.slots.data_ptr(), to.keys.data_ptr(), to.values.data_ptr())
        self._run(
            "rotate",
            x,
            *(x.data_ptr(), x.stride(0) * size, form.heads, form.kv_heads, form.key_dim, form.value_dim),
            *(*turn, *norms, *places, size, form.norms[0].epsilon if form.norms else 0.0),
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
class DecoderLayer:
    """A decoder layer: its form of attention, and the products of its linear layers, of which gate and up are one."""

    before: Norm
    attention: AttentionForm
    between: Norm
    groups: tuple[CpuGroup, CpuGroup, CpuGroup, CpuGroup]

    @property
    def widths(self) -> tuple[object, ...]:
        """Return the widths of its rows: layers with the same can share memory."""
        form = self.attention
        attended = form.heads, form.kv_heads, form.key_dim, form.value_dim
        return *((group.in_features, group.width) for group in self.groups), attended

    def run(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan, arena: Arena) -> Tensor:
        """Compute rows x [tokens, columns] of a step."""
        cache, form, operators, (of_qkv, o, gate_up, down) = step.cache, self.attention, arena.operators, self.groups
        normed = arena.rows("normed", x, x.shape[1])
        operators.norm(x, self.before, normed)
        qkv = arena.multiply("qkv", of_qkv, normed)
        to = None if cache.scales else Slots(step.slot_mapping, *cache.slots[form.call.layer])
        operators.rotate(qkv, form, rotation if form.columns else None, to)
        call, attended = form.call_of(qkv, qkv), self.attended(x, arena)
        if cache.scales:
            plan.quantize(call, step.slot_mapping, cache)
        plan.attend(call, cache, attended)
        projected = arena.multiply("o", o, attended.flatten(1))
        sums, normed = (arena.rows(name, x, x.shape[1]) for name in ("sums", "normed"))
        operators.add_norm(x, projected, sums, self.between, normed)
        both, gated = arena.multiply("gate_up", gate_up, normed), arena.rows("gated", x, down.in_features)
        operators.gate(both, gated)
        computed, out = arena.multiply("down", down, gated), arena.rows("out", x, x.shape[1])
        operators.add(sums, computed, out)
        return out

    def attended(self, x: Tensor, arena: Arena) -> Tensor:
        """Return memory for what the heads of rows x attend to: [rows, heads, value_dim]."""
        heads, dim = self.attention.heads, self.attention.value_dim
        return arena.rows("attended", x, heads * dim).view(len(x), heads, dim)
