"""The torch engine's tiers: what comes back from host memory is exact, and the counts tell what happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence, Output

pytestmark = pytest.mark.model

SETTINGS = {"rows": 4, "kv_blocks": 100, "block_size": 8, "adapter_slots": 1, "max_rank": 16}
PROMPT = (5, 6, 7, 8, 9)


def ask(name: str, adapter: str, directory: Path) -> NewSequence:
    stopping = StoppingParams(max_tokens=12, ignore_eos=True)
    return NewSequence(name, PROMPT, adapter=AdapterSource(adapter, str(directory)), stopping=stopping)


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)


@pytest.mark.parametrize("host_bytes", [0, 1])
def test_an_adapter_comes_back_from_host_memory(
    tiny_llama: Any,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    tmp_path: Path,
    host_bytes: int,
) -> None:
    """With a budget of one byte nothing is kept; without one (as fits) no file is read again."""
    names = list(tiny_llama.adapters)
    for name in names:
        shutil.copytree(tiny_llama.adapters[name], tmp_path / name)
    engine = make_engine(tiny_llama.directory, host_adapter_bytes=host_bytes, **SETTINGS)
    firsts = {name: run_until_idle(engine, {0: [ask("first", name, tmp_path / name)]})["first"] for name in names}
    stats = engine.stats()
    assert (stats.adapter_hits, stats.adapter_misses, stats.tiers.swaps) == (0, len(names), len(names) - 1)
    assert stats.tiers.device_bytes > 0
    assert (stats.tiers.host_bytes > stats.tiers.device_bytes) == (host_bytes == 0)
    shutil.rmtree(tmp_path)
    for name in names[:-1]:
        outputs = run_until_idle(engine, {0: [ask("again", name, tmp_path / name)]})["again"]
        if host_bytes == 0:
            assert ids(outputs) == ids(firsts[name]) == tiny_llama.answer(PROMPT, 12, name)
        else:
            assert outputs[-1].failure.reason == "ADAPTER_UNLOADABLE"
    assert len({ids(outputs) for outputs in firsts.values()}) == len(names)


def test_a_resident_adapter_is_a_hit(
    tiny_llama: Any, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    name, directory = next(iter(tiny_llama.adapters.items()))
    engine = make_engine(tiny_llama.directory, **SETTINGS)
    for number in range(3):
        run_until_idle(engine, {0: [ask(str(number), name, directory)]})
    stats = engine.stats()
    assert (stats.adapter_hits, stats.adapter_misses, stats.tiers.swaps, stats.tiers.loading) == (2, 1, 0, 0)
    # The adapter is in both tiers.
    assert stats.tiers.host_bytes == stats.tiers.device_bytes > 0
