"""The minimum time of a run: the steps that the engine really ran, at the machine's ceilings.

limit of a run = sum over its steps of max(bytes that the step must read / bandwidth, operations / peak)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.ceilings import Ceilings
from bench.models import ALL_LINEARS, ModelShape
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.scheduler import Scheduler

# Bytes of a bfloat16 number.
_WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Step:
    """The work of a step: its tokens, sampled rows, tokens with an adapter, and the number of adapters.

    `kept` is the sum over the rows of the positions whose keys and values are read, `seen` the sum over all tokens of
    the positions each one attends to.
    """

    tokens: int
    samples: int
    adapted: int
    adapters: int
    kept: int
    seen: int


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Record the steps that any engine of this process schedules while the context is open."""
    steps: list[Step] = []
    schedule = Scheduler.schedule

    def recording(self: Scheduler) -> Batch | None:
        batch = schedule(self)
        if batch is not None:
            steps.append(step_of(batch))
        return batch

    Scheduler.schedule = recording  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        Scheduler.schedule = schedule  # type: ignore[method-assign]


def step_of(batch: Batch) -> Step:
    """Return the work of a batch that is about to run."""
    slots = [row.sequence.adapter_slot for row in batch.rows]
    adapted = sum(row.count for row, slot in zip(batch.rows, slots, strict=True) if slot >= 0)
    return Step(
        tokens=batch.tokens,
        samples=sum(row.samples for row in batch.rows),
        adapted=adapted,
        adapters=len({slot for slot in slots if slot >= 0}),
        kept=sum(row.start + row.count for row in batch.rows),
        seen=sum(row.count * row.start + row.count * (row.count + 1) // 2 for row in batch.rows),
    )


def limit_s(
    steps: Iterable[Step],
    shape: ModelShape,
    rank: float,
    ceilings: Ceilings,
    linears: Collection[str] = ALL_LINEARS,
) -> float:
    """Return the minimum seconds of the steps in bfloat16. Adapters have the mean rank `rank` and change `linears`."""
    adapter = shape.adapter_parameters(rank, linears)
    return sum(
        max(
            step_bytes(step, shape, adapter) / ceilings.bytes_per_s,
            _operations(step, shape, adapter) / ceilings.operations_per_s,
        )
        for step in steps
    )


def step_bytes(step: Step, shape: ModelShape, adapter: float) -> float:
    """Return the bytes that a step must read: of weights, of its adapters of `adapter` weights each, of the cache."""
    weights = shape.linear_parameters + (shape.head_parameters if step.samples else 0) + step.adapters * adapter
    keys_and_values = 2 * shape.layers * shape.kv_heads * shape.head_dim * step.kept
    return _WEIGHT_BYTES * (weights + keys_and_values)


def _operations(step: Step, shape: ModelShape, adapter: float) -> float:
    products = step.tokens * shape.linear_parameters + step.samples * shape.head_parameters + step.adapted * adapter
    # Products of queries with keys, and of attention weights with values.
    attention = 2 * shape.layers * shape.heads * shape.head_dim * step.seen
    return 2 * (products + attention)
