"""The kernels of attention compiled for a GPU, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts.families import KvShape
from tests.worker.engine.triton_runs import compiled_for_sm_90
from worker.engine.attention.paged import KvCache, LayerCall
from worker.engine.device import before_compilations

pytest.importorskip("triton", reason="Triton is for Linux")


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


class Driver:
    """A driver of an sm_90 device, as far as compiling asks."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def test_a_kernel_says_that_it_is_compiled_before_it_is_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker waits longer for an engine that compiles; see worker.io.app.watch_steps."""
    from triton import knobs
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(driver, "_active", Driver(), raising=False)
    compilations: list[str] = []
    before_compilations(lambda: compilations.append("begins"))
    _, combine, *_ = launches(4, 4, 16, torch.float32, {})
    for _ in range(2):
        combine.kernel.warmup(
            **combine.arguments, **combine.constants, grid=combine.grid, num_warps=combine.warps,
            num_stages=combine.stages,
        )  # fmt: skip
        assert compilations == ["begins"]
