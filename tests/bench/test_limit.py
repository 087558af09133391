"""The limit of a run: what the steps must read and compute, counted by hand; and that the engine's steps are seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bare_engine import BareEngine
from bench.ceilings import Ceilings
from bench.limit import Step, limit_s, recorded_steps
from bench.models import QWEN2_04B, TINY, ModelShape, save_adapter, save_model
from bench.workload import Workload

SHAPE = ModelShape("counted", "llama", layers=2, hidden=4, mlp=6, heads=2, kv_heads=1, vocabulary=10, context=64)
# q and o 16 each, k and v 8 each, three of 24: 120 a layer.
LINEARS, HEAD = 240, 40
# (in + out) of the seven, twice: 8 + 6 + 6 + 8 + 10 + 10 + 10 = 58 a layer.
ADAPTER = 2 * 116


def test_parameters_are_those_of_the_published_shapes() -> None:
    assert (SHAPE.linear_parameters, SHAPE.head_parameters) == (LINEARS, HEAD)
    assert SHAPE.adapter_parameters(rank=2) == ADAPTER
    whole = QWEN2_04B.linear_parameters + QWEN2_04B.head_parameters
    assert 2 * whole == pytest.approx(773e6, rel=0.01)
    assert 8 * 2 * QWEN2_04B.adapter_parameters(16) == pytest.approx(141e6, rel=0.01)


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    step = Step(tokens=5, samples=2, adapted=3, adapters=2, kept=20, seen=15)
    keys_and_values = 2 * 2 * 1 * 2 * 20
    step_bytes = 2 * (LINEARS + HEAD + 2 * ADAPTER + keys_and_values)
    operations = 2 * (5 * LINEARS + 2 * HEAD + 3 * ADAPTER + 2 * 2 * 2 * 2 * 15)
    reading, computing = Ceilings(1.0, 1e12), Ceilings(1e12, 1.0)
    assert limit_s([step], SHAPE, 2, reading) == step_bytes
    assert limit_s([step, step], SHAPE, 2, computing) == 2 * operations
    # A chunk that ends before the prompt does has no logits.
    assert limit_s([Step(5, 0, 0, 0, 20, 15)], SHAPE, 2, reading) == 2 * (LINEARS + keys_and_values)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BareEngine]:
    model = save_model(TINY, tmp_path / "model")
    adapters = [save_adapter(TINY, 4, tmp_path / f"a{index}", seed=index) for index in range(2)]
    engine = BareEngine(model, adapters, rows=4)
    yield engine
    engine.close()


@pytest.mark.model
def test_the_steps_of_an_engine_hold_all_of_its_tokens(engine: BareEngine) -> None:
    workload = Workload(requests=6, prompt=10, short=3, long=5)
    timed = engine.run(workload.draw(1, TINY.vocabulary, adapters=2))
    tokens = 5 + 5 * 3
    assert timed.tokens == tokens
    # The last token of each answer is sampled and never computed.
    assert sum(step.tokens for step in timed.steps) == 6 * 10 + tokens - 6
    assert sum(step.samples for step in timed.steps) == tokens
    assert sum(step.adapted for step in timed.steps) == 6 * 10 + tokens - 6
    assert all(step.adapters in (1, 2) for step in timed.steps)
    # Token i of an answer, after a prompt of 10, attends to all before it.
    assert sum(step.seen for step in timed.steps) == sum(
        sum(range(1, 10 + answered)) for answered in (5, 3, 3, 3, 3, 3)
    )
    with recorded_steps() as steps:
        pass
    engine.run(workload.draw(2, TINY.vocabulary))
    assert steps == [], "steps are recorded after the context has closed"
