"""bench.quantized on a model that takes milliseconds: every row and ratio is there and is a number. No times."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from bench import quantized, quantized_engines
from bench.models import TINY
from bench.quantized import AIMS, Setup, measure
from bench.workload import Workload


class InThisProcess:
    """Stands for bench.isolated.Isolated: a process for each engine would take half a minute."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = make()

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *given: Any) -> None:
        self._context.__exit__(*given)


@pytest.mark.model
def test_every_row_and_ratio_is_there(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "Isolated", InThisProcess)
    monkeypatch.setattr(quantized_engines, "_READ_BYTES", 1 << 20)
    workload = Workload(requests=3, prompt=4, short=2, long=3)
    written = measure(Setup(TINY, workload, rows=2, prompt=4, tokens=4, worst_tokens=3, rounds=1), quick=True).to_json()
    assert written["aims"].keys() == AIMS.keys()
    assert written["ratios"].keys() == {key for key in AIMS if "vllm" not in key}
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
    assert len(written["rows"]) == 15
    for row in written["rows"]:
        assert 0 < row["low"] <= row["median"] <= row["high"] < math.inf
