"""The kernels of attention without a GPU: interpreted against the torch path, and compiled for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.families import KvShape
from tests.worker.engine.triton_runs import compiled_for_sm_90, result_of
from worker.engine.attention.paged import KvCache, LayerCall

pytest.importorskip("triton", reason="Triton is for Linux")

TOLERANCES = {"float32": 5e-6, "float16": 3e-3}


def test_kernels_compute_what_torch_computes() -> None:
    differences = result_of("attention_cases.py", "cpu")
    assert [len(differences[name]) for name in TOLERANCES] == [13, 6]
    for name, tolerance in TOLERANCES.items():
        assert differences[name].pop("alone") == differences[name].pop("codes") == 0
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "score"),
    [
        (8, 4, 256, torch.bfloat16, {"window": 4096, "softcap": 50.0}),
        (4, 4, 24, torch.float32, {"softcap": 30.0, "sinks": True}),
        (32, 8, 128, torch.bfloat16, {"int8": True}),
    ],
)
def test_kernels_compile_for_sm_90(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, score: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for call in launches(heads, kv_heads, dim, dtype, score):
        compiled_for_sm_90(call)


def launches(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, score: dict[str, Any]) -> list[Any]:
    """A step's launches as the model's forward pass makes them: nothing is run."""
    from worker.engine.attention.cuda import ChunkRows, DecodeRows, TritonPlan, write_call

    tables = torch.zeros(2, 4, dtype=torch.int32)
    plan = TritonPlan(
        DecodeRows(tables, torch.zeros(2, dtype=torch.int64)), ChunkRows(tables, ((2, 0, 40), (42, 5, 9)))
    )
    int8 = bool(score.get("int8"))
    cache = KvCache(KvShape(1, kv_heads, dim, dim), 4, 16, dtype, torch.device("cpu"), int8=int8)
    query, new = torch.zeros(51, heads, dim, dtype=dtype), torch.zeros(51, kv_heads, dim, dtype=dtype)
    sinks = torch.zeros(heads, dtype=dtype) if score.get("sinks") else None
    call = LayerCall(0, query, new, new, dim**-0.5, score.get("window"), score.get("softcap"), sinks)
    writes = [write_call(call, torch.zeros(51, dtype=torch.int64), cache)] if int8 else []
    return writes + list(plan.kernels(call, cache, torch.empty_like(query)))
