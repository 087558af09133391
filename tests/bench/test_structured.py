"""bench.structured on the hash model: every row and ratio is there and is a number. No times."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models import TINY
from bench.ours import ServedCluster
from bench.structured import AIMS, Setup, report
from bench.structured_compile import compile_seconds
from bench.tokenizer import save_tokenizer

SIZE = 600


@pytest.mark.model
def test_every_row_and_ratio_is_there(tmp_path: Path) -> None:
    setup = Setup(replace(TINY, vocabulary=SIZE), rows=4, prompt=4, tokens=6, rounds=1, lone=2, compiled=4)
    save_tokenizer(SIZE, tmp_path)
    compiled = compile_seconds((tmp_path / "tokenizer.json").read_bytes(), SIZE, setup.compiled)
    with ServedCluster(Path(f"hash:?vocab={SIZE}"), (), setup.rows) as cluster:
        written = report(setup, {"cluster": cluster}, compiled, True, "float32").to_json()
    assert written["aims"].keys() == AIMS.keys()
    assert written["ratios"].keys() == {key for key in AIMS if "peer" not in key}
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
    assert len(written["rows"]) == 5
    for row in written["rows"]:
        assert 0 < row["low"] <= row["median"] <= row["high"] < math.inf
