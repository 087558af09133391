"""The steps of a decoder whose layers the kernels compute, in place of its modules' forward.

    ids ─▶ embeddings ─▶ layer ─▶ layer ─▶ ... ─▶ norm ─▶ output head ─▶ logits

From the first layer on they run kernel by kernel, or, where a step's tokens are few, as one program. A program is
recorded for each number of tokens, over memory that all programs share:

    hidden states, rotation, slots   copied there before a program runs
    attention, adapters              calls whose arguments differ from step to step: one of each is recorded again

A row's bits are the same either way: the kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from loraplex.kernels.program import Program, as_integers
from loraplex.kernels.threads import ThreadCall, recorded_calls
from loraplex.worker.engine.attention.cpu import CpuPlan
from loraplex.worker.engine.attention.paged import AttentionContext, AttentionStep, KvCache
from loraplex.worker.engine.decoder.layer import Arena, DecoderLayer, Rotation, RowOperators
from loraplex.worker.engine.decoder.recognition import Norm
from loraplex.worker.engine.linear.layer import PanelLayer, scratch_memory
from loraplex.worker.engine.lora.cpu import CpuGroup

# Maximum number of a program's tokens: with more, the time between calls is a small part of a step.
_MOST_TOKENS = 64
# Maximum number of programs: one for each number of tokens, and set of layers that adapters are on. 50 KB each.
_MOST_PROGRAMS = 256

_Counters = Sequence[NDArray[np.int64]]
_Memory = tuple[Tensor, Tensor, Tensor, Tensor]


def can_record(group: CpuGroup) -> bool:
    """Tell whether a group's product is one call of a kernel, but for the adapters on it."""
    return isinstance(group.base, PanelLayer) and group.base.takes_rows and group.add is None


class _SharedMemory(Arena):
    """An arena whose memory is the same in every layer and program."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(RowOperators(dtype, shared=0))
        # Products that adapters were added to, with their inputs and outputs.
        self.adapted: list[tuple[CpuGroup, Tensor, Tensor]] = []
        # The scratch memory that recorded calls refer to.
        self._scratch: list[Tensor] = []
        self._rows: dict[str, Tensor] = {}

    def rows(self, name: str, like: Tensor, columns: int) -> Tensor:
        """See Arena."""
        return self._memory(name, columns, like.dtype)[: len(like)]

    def multiply(self, name: str, group: CpuGroup, x: Tensor) -> Tensor:
        """See Arena; of groups that `can_record`."""
        base, y, inputs = group.base, self.rows(name, x, group.width), x
        assert isinstance(base, PanelLayer), "a layer that is one call"
        if base.input_dtype != x.dtype:
            inputs = self._memory(f"{name}, inputs", x.shape[1], base.input_dtype)[: len(x)]
            self.operators.widen(x, inputs)
        self._grow_scratch(base)
        base.multiply_into(inputs, y)
        if group.adapts:
            group.add_adapters(x, y)
            self.adapted.append((group, x, y))
        return y

    def _grow_scratch(self, layer: PanelLayer) -> None:
        """Let the scratch memory grow to what any program needs, and keep it."""
        x = torch.empty(_MOST_TOKENS, layer.in_features, dtype=layer.input_dtype)
        with recorded_calls():
            layer.multiply_into(x, x.new_empty(_MOST_TOKENS, layer.out_features))
        scratch, _ = scratch_memory()
        if not any(scratch is one for one in self._scratch):
            self._scratch.append(scratch)

    def _memory(self, name: str, columns: int, dtype: torch.dtype) -> Tensor:
        memory = self._rows.get(name)
        if memory is None:
            memory = self._rows[name] = torch.empty(_MOST_TOKENS, columns, dtype=dtype)
        assert (memory.shape[1], memory.dtype) == (columns, dtype), "rows of the same kind"
        return memory


class _LayersProgram:
    """The recorded calls of all layers for one number of tokens.

    `memory` has hidden states, rotations and slots, which are copied there before a run, and the result.
    """

    def __init__(
        self, memory: _Memory, calls: Sequence[ThreadCall], again: Callable[[CpuPlan], None], counters: _Counters
    ) -> None:
        """Take the calls; `again` makes those of one layer that differ from step to step."""
        self.memory, self._again = memory, again
        self._program = Program(calls, counters)
        functions = np.array([call.function for call in calls])
        self._places = {one: np.flatnonzero(functions == one)[:, None] for one in set(functions.tolist())}

    def run(self, plan: CpuPlan) -> None:
        """Make the calls of a step."""
        arguments = self._program.arguments
        with recorded_calls() as calls:
            self._again(plan)
        for call in calls:
            # Arguments that changed are the step's, equal in all layers; the rest are the layer's.
            places, new = self._places[call.function], as_integers(call, arguments.shape[1])
            changed = np.flatnonzero(new != arguments[places[0, 0]])
            arguments[places, changed] = new[changed]
        self._program.run()


# Number of positions whose rotations are computed at once: whole vectors, by one thread, so that a position's bits do
# not depend on when they are computed.
_ROTATIONS = 128


class Rotations:
    """The rotations of positions as the model's module computes them, which are the same in every step."""

    def __init__(self, compute: Callable[..., Any], dtype: torch.dtype) -> None:
        """Take the module, of hidden states and position ids; its rotations are of `dtype`."""
        self._compute = compute
        self._like = torch.empty(1, 1, 0, dtype=dtype)
        # The cosines of each position, and its sines beside them.
        self._table = self._parts(0)

    def rows(self, positions: Tensor, stop: int, out: Tensor | None = None) -> Tensor:
        """Return the cosines and sines [tokens, 2 * columns] of positions [tokens] before `stop`."""
        if stop > (known := len(self._table)):
            starts = range(known, max(stop, 2 * known), _ROTATIONS)
            self._table = torch.cat([self._table, *map(self._parts, starts)])
        if out is None:
            return self._table.index_select(0, positions)
        return torch.index_select(self._table, 0, positions, out=out)

    @property
    def width(self) -> int:
        """Return the number of cosines and sines of a position."""
        return self._table.shape[1]

    def _parts(self, start: int) -> Tensor:
        positions = torch.arange(start, start + _ROTATIONS)
        part: Tensor = torch.cat(self._compute(self._like, positions[None]), -1)[0]
        return part


def rotation_of(rows: Tensor) -> Rotation:
    """Return the rotation that `Rotations.rows` has computed."""
    return Rotation(*rows.chunk(2, -1))


@dataclass(frozen=True, slots=True)
class Ends:
    """What is before a decoder's layers and behind them.

    `product` is the head's, where it can be recorded; None: the head is called as a module.
    """

    embeddings: Callable[[Tensor], Tensor]
    rotations: Rotations
    norm: Norm
    head: Callable[[Tensor], Tensor]
    product: CpuGroup | None


class DecoderSteps:
    """The steps of a decoder; from one thread."""

    def __init__(
        self, layers: Sequence[DecoderLayer], ends: Ends, context: AttentionContext, dtype: torch.dtype
    ) -> None:
        """Take all layers, in their order; they pass hidden states on as they are, with one rotation for all."""
        self._layers = layers
        self._ends = ends
        self._groups = [group for layer in layers for group in layer.groups]
        self._context = context
        self._dtype = dtype
        self._new = Arena(RowOperators(dtype))
        self._shared = _SharedMemory(dtype)
        self._slots = torch.empty(_MOST_TOKENS, dtype=torch.int64)
        self._programs: dict[object, _LayersProgram] = {}
        self._has_programs = len({layer.widths for layer in layers}) == 1 and all(map(can_record, self._groups))
        self._cache: KvCache | None = None

    def body_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of the model below the head; `original` computes what is no step of the paged cache."""

        def forward(input_ids: Tensor, position_ids: Tensor, **named: Any) -> Any:
            if (step := self._step()) is None:
                return original(input_ids=input_ids, position_ids=position_ids, **named)
            # A copy: the memory is that of the next step as well.
            hidden = self._hidden(input_ids[0], position_ids[0], step).clone()
            return BaseModelOutputWithPast(last_hidden_state=hidden[None])

        return forward

    def forward(self, original: Callable[..., Any], body: nn.Module) -> Callable[..., Any]:
        """Return the forward of the model; `original` calls the body, and computes steps where that has hooks."""
        hooks = body._forward_hooks

        def forward(input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, **named: Any) -> Any:
            if hooks or (step := self._step()) is None:
                return original(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **named)
            return SimpleNamespace(logits=self._logits(input_ids[0], position_ids[0], step, logits_to_keep)[None])

        return forward

    def _step(self) -> AttentionStep | None:
        """Return the step of the paged cache that is being computed, if its keys and values are of this dtype."""
        step = self._context.step
        if not isinstance(step, AttentionStep):
            return None
        return step if step.cache.slots[0][0].dtype in (self._dtype, torch.int8) else None

    def _logits(self, ids: Tensor, positions: Tensor, step: AttentionStep, places: Tensor) -> Tensor:
        """Return the logits of the tokens at `places`, which are in order."""
        every, product = len(places) == len(ids), self._ends.product
        if every and product is not None and product.is_base and self._runs_programs(ids, step):
            return self._run_program(ids, positions, step, product)
        hidden = self._hidden(ids, positions, step)
        return self._ends.head(hidden if every else hidden[places])

    def _hidden(self, ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Return the hidden states of all tokens [tokens, columns] that the head gets."""
        if self._runs_programs(ids, step):
            return self._run_program(ids, positions, step, None)
        plan, ends = _plan_of(step), self._ends
        x, rotation = ends.embeddings(ids), rotation_of(ends.rotations.rows(positions, plan.stop))
        for layer in self._layers:
            x = layer.run(x, rotation, step, plan, self._new)
        return self._normed(x, self._new)

    def _runs_programs(self, ids: Tensor, step: AttentionStep) -> bool:
        """Tell whether a step of these tokens runs as a program."""
        self._cache = self._cache or step.cache
        return self._has_programs and len(ids) <= _MOST_TOKENS and step.cache is self._cache

    def _normed(self, x: Tensor, arena: Arena) -> Tensor:
        out = arena.rows("normed", x, x.shape[1])
        arena.operators.norm(x, self._ends.norm, out)
        return out

    def _run_program(self, ids: Tensor, positions: Tensor, step: AttentionStep, head: CpuGroup | None) -> Tensor:
        """Return the hidden states that the head gets, or the logits that it gives."""
        plan, ends = _plan_of(step), self._ends
        x = ends.embeddings(ids)
        adapted = tuple(group.adapts for group in self._groups) if self._groups[0].rows_adapt else ()
        key = x.shape[0], torch.get_num_threads(), head is None, adapted
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) == _MOST_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = self._record(x, step, plan, head)
        hidden, rotation, slots, out = program.memory
        hidden.copy_(x)
        slots.copy_(step.slot_mapping)
        ends.rotations.rows(positions, plan.stop, rotation)
        program.run(plan)
        return out

    def _record(self, x: Tensor, step: AttentionStep, plan: CpuPlan, head: CpuGroup | None) -> _LayersProgram:
        """Record the calls of a step with hidden states like x."""
        shared = self._shared
        x, rotations = shared.rows("out", x, x.shape[1]), shared.rows("rotation", x, self._ends.rotations.width)
        slots = self._slots[: len(x)]
        rotation, step = rotation_of(rotations), replace(step, slot_mapping=slots)
        shared.adapted.clear()
        with recorded_calls() as calls:
            for layer in self._layers:
                hidden = layer.run(x, rotation, step, plan, shared)
                assert hidden.data_ptr() == x.data_ptr(), "the next layer's input"
            out = self._normed(x, shared)
            if head is not None:
                out = shared.multiply("logits", head, out)
        # The first of each kernel: a width that tiles do not take has its own.
        adapted = {group.kernel: (group, inputs, y) for group, inputs, y in reversed(shared.adapted)}.values()
        first = self._layers[0]
        qkv, attended = shared.rows("qkv", x, first.groups[0].width), first.attended(x, shared)
        call = first.attention.call_of(qkv, qkv)

        def again(plan: CpuPlan) -> None:
            plan.attend(call, step.cache, attended)
            for group, inputs, y in adapted:
                group.add_adapters(inputs, y)

        counters = [shared.operators.counter, scratch_memory()[1], step.cache.counters]
        counters += [group.counters for group, _, _ in adapted]
        return _LayersProgram((x, rotations, slots, out), calls, again, counters)


def _plan_of(step: AttentionStep) -> CpuPlan:
    assert isinstance(step.plan, CpuPlan), "a step on the CPU"
    return step.plan
