"""An engine with a chunk sizer: the same ids however prompts are cut, and every step's time is observed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.chunk_sizer import ChunkBudget, ChunkSizer

pytestmark = pytest.mark.model

VOCAB = 320
SETTINGS = {"rows": 5, "kv_blocks": 100, "block_size": 4, "step_tokens": 24, "adapter_slots": 3, "max_rank": 16}


class Moods(ChunkSizer):
    """Gives chunks beside decodes random budgets, as measured times might; keeps what it has observed."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self.chance = random.Random(3)
        self.observed: list[tuple[Batch, float]] = []

    def observe(self, batch: Batch, seconds: float) -> None:
        self.observed.append((batch, seconds))
        super().observe(batch, seconds)

    def budget(self, tokens: int, decodes: Sequence[int], prompts: int) -> ChunkBudget:
        super().budget(tokens, decodes, prompts)
        return ChunkBudget(min(tokens, self.chance.choice([0, 1, 2, 3, 5, 11]) if decodes else 9))


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_ids_do_not_depend_on_chunk_sizes_and_every_step_is_observed(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chance = random.Random(7)
    adapters = [None, *tiny_llama.adapters]
    requests = [
        tiny_llama.request(f"r{number}", [chance.randrange(3, VOCAB) for _ in range(size)], 12, adapters[number % 4])
        for number, size in enumerate([3, 40, 1, 57, 8, 33, 20, 60])
    ]
    arrivals = {0: requests[:3], 4: requests[3:6], 9: requests[6:]}
    moods = Moods()
    monkeypatch.setattr("loraplex.worker.engine.torch_engine.ChunkSizer", lambda target_s: moods)
    engine = make_engine(tiny_llama.directory, **SETTINGS, paced=True)
    outputs = run_until_idle(engine, arrivals)
    for request in requests:
        got = tuple(token for output in outputs[request.sequence_id] for token in output.token_ids)
        assert got == tiny_llama.expected(request)
    assert len(moods.observed) == engine.stats().steps
    assert all(seconds > 0 for _, seconds in moods.observed)
    counts = {row.count for batch, _ in moods.observed for row in batch.rows}
    # Which sizes there are depends on when the adapters' loads end.
    assert len(counts) >= 5, counts


def test_a_prompt_beside_decodes_with_measured_chunk_sizes(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    decodes = [tiny_llama.request(f"d{number}", [5 + number, 6, 7], 90, None) for number in range(3)]
    prompt = tiny_llama.request("prompt", [3 + number % 300 for number in range(120)], 4, None)
    engine = make_engine(tiny_llama.directory, **SETTINGS, paced=True)
    outputs = run_until_idle(engine, {0: decodes, 10: [prompt]})
    for request in (*decodes, prompt):
        got = tuple(token for output in outputs[request.sequence_id] for token in output.token_ids)
        assert got == tiny_llama.expected(request)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_a_step_takes_as_long_as_its_threads_compute_whichever_of_them_must_wait(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch, ahead: bool,
) -> None:  # fmt: skip
    """Beside other work the main thread gets little of a step's work, and the wall's clock goes on."""
    launched, moods = 0, Moods()
    clocks = SimpleNamespace(
        monotonic=lambda: 9 * launched, process_time=lambda: 4 * launched, thread_time=lambda: launched
    )
    monkeypatch.setattr("loraplex.worker.engine.torch_engine.ChunkSizer", lambda target_s: moods)
    monkeypatch.setattr("loraplex.worker.engine.torch_engine.time", clocks)
    engine = make_engine(tiny_llama.directory, **SETTINGS, paced=True, threads=2)
    launch = engine._runner.launch

    def timed(batch: Batch) -> Any:
        nonlocal launched
        launched += 1
        return launch(batch)

    monkeypatch.setattr(engine._runner, "launch", timed)
    run_until_idle(engine, {0: [tiny_llama.request(f"d{number}", [5 + number], 9, None) for number in range(3)]})
    # Stepping ahead, another device computes, and times are the clock's.
    assert sum(seconds for _, seconds in moods.observed) == launched * (9 if ahead else 2)
