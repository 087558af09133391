"""A random walk of the encoder's scheduler over a real adapter cache whose loads end when the walk says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.contracts.options import Encode, FinishReason, StoppingParams
from loraplex.encoders.engine import EncoderScheduler
from loraplex.worker.engine_api import AdapterSource, EngineLimits, Failure, NewSequence

LIMITS = EngineLimits(rows=12, max_tokens=40, max_rank=8, vocab_size=50, block_size=16, blocks=36, adapter_slots=2)
ROWS, STEP_TOKENS = 6, 60
BROKEN = "adapter-3"
NOT_FINITE = Failure("INTERNAL", "NAN_LOGITS", "not finite")


def arrival(rng: random.Random, name: str) -> NewSequence:
    adapter = rng.choice(["", "adapter-0", "adapter-1", "adapter-2", BROKEN])
    return NewSequence(
        name,
        tuple(rng.choices(range(50), k=rng.randint(1, 40))),
        adapter=AdapterSource(adapter, "/nowhere") if adapter else None,
        stopping=StoppingParams(max_tokens=0),
        encode=Encode("embed"),
        tenant=rng.choice("ab"),
        priority=rng.choice([-1, 0, 0, 2]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_every_text_ends_once_and_nothing_stays(seed: int, gated_loads: Callable[..., Any]) -> None:
    rng = random.Random(seed)
    loads = gated_loads(LIMITS.adapter_slots, frozenset({BROKEN}))
    begun: list[str] = []
    scheduler = EncoderScheduler(LIMITS, ROWS, STEP_TOKENS, loads.cache, begun.append)
    waiting: dict[str, NewSequence] = {}
    ended: dict[str, FinishReason | None] = {}

    def take(outputs: list[Any]) -> None:
        for output in outputs:
            spec = waiting.pop(output.sequence_id)
            ended[output.sequence_id] = output.finish
            broken = spec.adapter is not None and spec.adapter.digest == BROKEN
            assert not broken or output.finish is FinishReason.FAILED
            assert bool(output.vector) == (output.finish is FinishReason.LENGTH)

    for number in range(400):
        if number < 250 and rng.random() < 0.6:
            spec = waiting[f"s{number}"] = arrival(rng, f"s{number}")
            scheduler.add_sequence(spec)
        if waiting and rng.random() < 0.05:
            name = rng.choice(list(waiting))
            scheduler.abort(name)
            del waiting[name]
        if loads.loading() and (rng.random() < 0.3 or number >= 250):
            loads.finish_load(rng.choice(loads.loading()))
        take(scheduler.take_arrivals())
        batch = scheduler.schedule()
        tokens = sum(len(one.ids) for one in batch)
        assert len(batch) <= ROWS
        assert tokens <= STEP_TOKENS or len(batch) == 1
        assert all((one.adapter_slot >= 0) == (one.spec.adapter is not None) for one in batch), "its slot is there"
        scheduler.check()
        if batch and rng.random() < 0.1:
            take(scheduler.revoke(batch))
        elif batch:
            take(scheduler.commit(batch, [NOT_FINITE if rng.random() < 0.05 else (1.0, 2.0) for _ in batch]))
        scheduler.check()
    assert not waiting, f"seed {seed}"
    stats = scheduler.stats()
    assert (stats.rows_running, stats.rows_waiting, stats.slots_pinned) == (0, 0, 0)
    assert len(begun) == len(set(begun)) >= sum(finish is FinishReason.LENGTH for finish in ended.values()) > 50
