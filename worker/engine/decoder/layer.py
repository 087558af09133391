"""A decoder layer as compiled kernels from end to end.

x ─▶ norm ─▶ q|k|v ─▶ rotate ─▶ attention ─▶ o ─▶ + x, norm ─▶ gate|up ─▶ silu(gate) * up ─▶ down ─▶ + ─▶

Its numbers lie in an arena: new memory for each, or, for a program, the same places in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.engine.attention.cpu.plan import CpuPlan
from worker.engine.attention.paged import AttentionStep, LayerCall
from worker.engine.decoder.operators import Heads, Norm, Rotation, RowOperators, Slots
from worker.engine.lora.cpu.group import CpuGroup


class Arena(Protocol):
    """The memory of a layer's numbers, and the products of its linear layers."""

    operators: RowOperators

    def rows(self, name: str, like: Tensor, columns: int) -> Tensor:
        """Return memory for as many rows as `like` has, valid until the same name is asked for again."""

    def multiply(self, name: str, group: CpuGroup, x: Tensor) -> Tensor:
        """Return a group's product of rows x, and what the rows' adapters add."""


class NewMemory:
    """An arena of new memory."""

    def __init__(self, operators: RowOperators) -> None:
        self.operators = operators

    @staticmethod
    def rows(name: str, like: Tensor, columns: int) -> Tensor:
        """See Arena."""
        return like.new_empty(len(like), columns)

    @staticmethod
    def multiply(name: str, group: CpuGroup, x: Tensor) -> Tensor:
        """See Arena."""
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
class AttentionForm:
    """The form of a layer's attention; `call` holds all but the step's own queries, keys and values."""

    heads: Heads
    call: LayerCall
    rotates: bool


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A decoder layer."""

    before: Norm
    qkv: CpuGroup
    attention: AttentionForm
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
        heads = self.attention.heads
        attended = heads.heads, heads.kv_heads, heads.key_dim, heads.value_dim
        return *((group.in_features, group.width) for group in self.groups), attended

    def run(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan, arena: Arena) -> Tensor:
        """Compute rows x [tokens, columns] of a step."""
        cache = step.cache
        to = None if cache.scales else Slots(step.slot_mapping, *cache.slots[self.attention.call.layer])
        call = self.call(self.project(x, rotation, arena, to))
        if cache.scales:
            plan.quantize(call, step.slot_mapping, cache)
        attended = self.attended(x, arena)
        plan.attend(call, cache, attended)
        return self.finish(x, attended.flatten(1), arena)

    def attended(self, x: Tensor, arena: Arena) -> Tensor:
        """Return memory for what the heads of rows x attend to: [rows, heads, value_dim]."""
        heads = self.attention.heads
        return arena.rows("attended", x, heads.heads * heads.value_dim).view(len(x), heads.heads, heads.value_dim)

    def project(self, x: Tensor, rotation: Rotation, arena: Arena, to: Slots | None = None) -> Tensor:
        """Return the rows' queries, keys and values, rotated, side by side; keys and values go to their slots."""
        normed = arena.rows("normed", x, x.shape[1])
        arena.operators.norm(x, self.before, normed)
        qkv = arena.multiply("qkv", self.qkv, normed)
        arena.operators.rotate(qkv, self.attention.heads, rotation if self.attention.rotates else None, to)
        return qkv

    def call(self, qkv: Tensor) -> LayerCall:
        """Return the layer's call of its attention."""
        heads, of = self.attention.heads, self.attention.call
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
