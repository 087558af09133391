"""What a tenant or an adapter has answered changes no draft of another, so that no step tells of it."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path

import pytest

from loraplex.contracts.options import StoppingParams
from loraplex.hash_engine import HashEngine
from loraplex.speculation import SuffixDrafter
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence, Speculation
from tests.hash_oracle import expected_ids

SPEC = "hash:?vocab=600&seed=3"
PROMPT, TOKENS = tuple(range(40)), 200
STOPPING = StoppingParams(max_tokens=TOKENS)
ANSWER = expected_ids(SPEC, PROMPT, stopping=STOPPING)
OTHER = expected_ids(SPEC, PROMPT[::-1], stopping=STOPPING)
Steps = list[tuple[int, tuple[int, ...], int, int]]


class DraftingEngine:
    """A hash engine with drafts of suffixes, whose steps all take as long."""

    def __init__(self) -> None:
        self._loaded = threading.Event()
        self._engine = HashEngine(EngineConfig(SPEC, rows=9, max_rank=8), self._loaded.set)
        drafter = self._engine._scheduler.drafter = SuffixDrafter(Speculation("suffix", 8), count().__next__)
        row = Row(Sequence(NewSequence("measured", PROMPT), 0, frozenset()), 0, 1, samples=True)
        for _ in range(4):
            drafter.observe(Batch((row,), 1, 1))

    def steps(self, sequence: NewSequence) -> Steps:
        """Return what each step gave of a sequence."""
        self._engine.add_sequence(sequence)
        steps: Steps = []
        finished = False
        while not finished:
            self._loaded.clear()
            if not self._engine.has_work():
                assert self._loaded.wait(60)
            for output in self._engine.step():
                steps.append((output.offset, output.token_ids, output.drafted, output.accepted))
                finished = output.finish is not None
        return steps

    def close(self) -> None:
        self._engine.close()


def steps_after(answer: tuple[int, ...], tenant: str, adapter: AdapterSource | None) -> Steps:
    """Return the steps of acme's answer, after others have got this answer."""
    engine = DraftingEngine()
    for number in range(3):
        engine.steps(NewSequence(f"{number}", PROMPT, answer[:-1], adapter=adapter, stopping=STOPPING, tenant=tenant))
    steps = engine.steps(NewSequence("acme's", PROMPT, stopping=STOPPING, tenant="acme"))
    engine.close()
    assert tuple(token for _, ids, *_ in steps for token in ids) == ANSWER
    return steps


@pytest.fixture
def adapter(tmp_path: Path) -> AdapterSource:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"any")
    return AdapterSource("sha256:a", str(tmp_path))


def test_the_answers_of_others_change_no_step(adapter: AdapterSource) -> None:
    assert len(steps_after(ANSWER, "acme", None)) < TOKENS / 4, "its own answers make it faster"
    for tenant, with_adapter in (("globex", None), ("acme", adapter), ("globex", adapter)):
        assert steps_after(ANSWER, tenant, with_adapter) == steps_after(OTHER, tenant, with_adapter)
