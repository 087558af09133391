"""The steps of a model's decoder layers: kernel by kernel, or, where a step's tokens are few, as one program.

A program is recorded for each number of tokens, over memory that all programs share:

    hidden states, rotation, slots   copied there before a program runs
    attention, adapters              calls whose arguments differ from step to step: one of each is recorded again

Long chunks are computed by torch's operators, so a step that has one has no program. A row's bits are the same either
way: the kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.attention.cpu import CpuPlan
from worker.engine.attention.paged import AttentionContext, AttentionStep, KvCache
from worker.engine.decoder.layer import Arena, DecoderLayer, Rotation, RowOperators
from worker.engine.kernels.program import Program, as_integers, can_run
from worker.engine.kernels.threads import ThreadCall, recorded_calls
from worker.engine.linear.layer import PanelLayer, scratch_memory
from worker.engine.lora.cpu import CpuGroup

# Maximum number of a program's tokens: with more, the time between calls is a small part of a step.
_MOST_TOKENS = 64
# Maximum number of programs: one for each number of tokens, and set of layers that adapters are on. 50 KB each.
_MOST_PROGRAMS = 256

_Counters = NDArray[np.int64]


class _NotOneCallError(Exception):
    """A linear layer is not one call of a kernel."""


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
        """See Arena. Raises _NotOneCallError."""
        base, y = group.base, self.rows(name, x, group.width)
        if not isinstance(base, PanelLayer) or not base.takes_rows:
            raise _NotOneCallError
        inputs = x
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
    """The recorded calls of all layers for one number of tokens."""

    def __init__(
        self, calls: Sequence[ThreadCall], again: Callable[[CpuPlan], None], counters: Sequence[_Counters]
    ) -> None:
        """Take the calls; `again` makes those of one layer that differ from step to step."""
        self._program = Program(calls)
        self._again = again
        self._counters = counters
        functions = [call.function for call in calls]
        self._places = {
            function: np.flatnonzero(np.array(functions) == function) for function in dict.fromkeys(functions)
        }

    def run(self, plan: CpuPlan) -> None:
        """Make the calls of a step."""
        arguments = self._program.arguments
        with recorded_calls() as calls:
            self._again(plan)
        for call in calls:
            # Arguments that changed are the step's, equal in all layers; the rest are the layer's.
            places, new = self._places[call.function], as_integers(call, arguments.shape[1])
            changed = np.flatnonzero(new != arguments[places[0]])
            arguments[np.ix_(places, changed)] = new[changed]
        self._program.run([*self._counters, plan.counters])


class DecoderSteps:
    """The steps of a model's decoder layers; from one thread."""

    def __init__(self, layers: Sequence[DecoderLayer], context: AttentionContext, dtype: torch.dtype) -> None:
        """Take all layers, in their order; they pass hidden states on as they are, with one rotation for all."""
        self._layers = layers
        self._groups = [group for layer in layers for group in layer.groups]
        self._context = context
        self._dtype = dtype
        self._new = Arena(RowOperators(dtype))
        self._shared = _SharedMemory(dtype)
        self._slots = torch.empty(_MOST_TOKENS, dtype=torch.int64)
        self._programs: dict[object, _LayersProgram] = {}
        self._has_programs = can_run() and len({layer.widths for layer in layers}) == 1
        self._cache: KvCache | None = None
        # The step whose layers are all computed, while the model still calls them.
        self._done: AttentionStep | None = None

    def forward(self, index: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the forward of layer `index`; `original` computes what is no step of the paged cache."""

        def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
            step, embeddings = self._context.step, named.get("position_embeddings")
            if not isinstance(step, AttentionStep) or embeddings is None:
                return original(hidden_states, *arguments, **named)
            stored = step.cache.slots[0][0].dtype
            if hidden_states.dtype != self._dtype or stored not in (self._dtype, torch.int8):
                return original(hidden_states, *arguments, **named)
            if self._done is step:
                if index == len(self._layers) - 1:
                    self._done = None
                return hidden_states
            rotation = Rotation(*(part[0].contiguous() for part in embeddings))
            return self._compute(index, hidden_states[0].contiguous(), rotation, step)[None]

        return forward

    def _compute(self, index: int, x: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
        plan = step.plan
        assert isinstance(plan, CpuPlan), "a step on the CPU"
        self._cache = self._cache or step.cache
        few = len(x) <= _MOST_TOKENS and not plan.chunks and step.cache is self._cache
        if index == 0 and few and self._has_programs:
            try:
                out = self._run_program(x, rotation, step, plan)
            except _NotOneCallError:
                self._has_programs = False
            else:
                self._done = step if len(self._layers) > 1 else None
                return out
        return self._layers[index].run(x, rotation, step, plan, self._new)

    def _run_program(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan) -> Tensor:
        """Compute all layers. Raises _NotOneCallError."""
        shared, slots = self._shared, self._slots[: len(x)]
        columns = rotation.cos.shape[1]
        out, cos, sin = (
            shared.rows(name, x, width) for name, width in (("out", x.shape[1]), ("cos", columns), ("sin", columns))
        )
        for to, of in ((out, x), (cos, rotation.cos), (sin, rotation.sin), (slots, step.slot_mapping)):
            to.copy_(of)
        key = len(x), torch.get_num_threads(), tuple(group.adapts for group in self._groups)
        if key not in self._programs:
            if len(self._programs) == _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = self._record(out, Rotation(cos, sin), replace(step, slot_mapping=slots), plan)
        self._programs[key].run(plan)
        return out

    def _record(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan) -> _LayersProgram:
        shared = self._shared
        shared.adapted.clear()
        with recorded_calls() as calls:
            for layer in self._layers:
                out = layer.run(x, rotation, step, plan, shared)
                assert out.data_ptr() == x.data_ptr(), "the next layer's input"
        first, adapted = self._layers[0], shared.adapted[:1]
        call, attended = first.call(shared.rows("qkv", x, first.qkv.width)), first.attended(x, shared)

        def again(plan: CpuPlan) -> None:
            plan.attend(call, step.cache, attended)
            for group, inputs, y in adapted:
                group.add_adapters(inputs, y)

        counters = [shared.operators.counter, scratch_memory()[1], *(group.counters for group, _, _ in adapted)]
        return _LayersProgram(calls, again, counters)
