"""The whole engine on the device: in float32 the ids that transformers gives on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from worker.engine import TorchEngine, build_engine
from worker.scheduling.contract import NewSequence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

# Few blocks: prompts are cut into chunks, and running sequences preempt each other.
CRAMPED: dict[str, Any] = {
    "rows": 6, "kv_blocks": 26, "block_size": 4, "step_tokens": 16, "adapter_slots": 3, "max_rank": 16,
}  # fmt: skip


@pytest.fixture
def make_engine() -> Iterator[Callable[..., TorchEngine]]:
    """Builds engines that are closed after the test."""
    engines = []

    def make(tiny: Any, dtype: str, **settings: Any) -> TorchEngine:
        # What a step computes is not to depend on the clock.
        engine = build_engine(str(tiny.directory), "cuda", dtype, paced=False, **settings)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def requests(tiny: Any, adapters: tuple[str | None, ...]) -> list[NewSequence]:
    chance = random.Random(5)
    made = []
    for number in range(14):
        prompt = [chance.randrange(3, 320) for _ in range(chance.choice([1, 3, 8, 17, 30, 52]))]
        made.append(tiny.request(f"r{number}", prompt, chance.randrange(2, 36), adapters[number % len(adapters)]))
    return made


def answers(engine: TorchEngine, sequences: list[NewSequence]) -> dict[str, tuple[int, ...]]:
    """Each sequence's ids. They arrive one by one, while others run."""
    ids: dict[str, tuple[int, ...]] = {sequence.sequence_id: () for sequence in sequences}
    waiting, unfinished = list(sequences), set(ids)
    while unfinished:
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            ids[output.sequence_id] += tuple(output.token_ids)
            if output.finish:
                unfinished.remove(output.sequence_id)
    return ids


@pytest.mark.parametrize("adapters", [(None,), (None, "plain", "patterned", "rslora")])
def test_cuda_gives_the_ids_of_transformers(
    tiny: Any, adapters: tuple[str | None, ...], make_engine: Callable[..., TorchEngine]
) -> None:
    sequences = requests(tiny, adapters)
    expected = {sequence.sequence_id: tiny.expected(sequence) for sequence in sequences}
    assert len(set(expected.values())) == len(sequences)
    engine = make_engine(tiny, "float32", **CRAMPED)
    assert engine._runner._graphs is not None, "decode steps were to be captured"
    assert answers(engine, sequences) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs_to_the_end(tiny: Any, dtype: str, make_engine: Callable[..., TorchEngine]) -> None:
    sequences = requests(tiny, (None, "plain", "patterned", "rslora"))
    ids = answers(make_engine(tiny, dtype, rows=16, adapter_slots=3, max_rank=16), sequences)
    assert all(ids.values())
    assert len({token for some in ids.values() for token in some}) > 20
