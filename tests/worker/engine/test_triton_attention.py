"""The kernels of attention compiled for a GPU, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention.paged import KvCache, LayerCall
from loraplex.worker.engine.device import before_compilations
from tests.worker.engine.triton_runs import compiled_for, spilled_bytes

pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "score", "capability"),
    [
        (8, 4, 256, torch.bfloat16, {"window": 4096, "softcap": 50.0}, 90),
        pytest.param(4, 4, 24, torch.float32, {"softcap": 30.0, "sinks": True}, 80, marks=pytest.mark.nightly),
        pytest.param(
            32, 8, 128, torch.bfloat16, {"int8": True, "batch_invariant": True}, 100, marks=pytest.mark.nightly
        ),
    ],
)
def test_kernels_compile(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, score: dict[str, Any], capability: int
) -> None:  # fmt: skip
    names = [call.kernel.__name__ for call in launches(heads, kv_heads, dim, dtype, score)]
    decodes = ["attend_chunks"] if score.get("batch_invariant") else ["attend_splits", "combine_splits"]
    writes = ["write_heads"] if score.get("int8") else []
    # Behind a short context a program computes all of a tile, behind a long one its splits are combined.
    assert names == [*writes, *decodes, "attend_chunks", "attend_chunks", "combine_chunks"]
    for call in launches(heads, kv_heads, dim, dtype, score):
        compiled_for(capability, call)


def launches(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, score: dict[str, Any]) -> list[Any]:
    """A step's launches as the model's forward pass makes them: nothing is run."""
    from loraplex.worker.engine.attention.cuda import ChunkRows, DecodeRows, TritonPlan, write_call

    tables = torch.zeros(2, 4, dtype=torch.int32)
    plan = TritonPlan(
        DecodeRows(tables, torch.zeros(2, dtype=torch.int64)), ChunkRows(tables, ((2, 0, 40), (42, 5, 9)))
    )
    late = TritonPlan(None, ChunkRows(tables, ((2, 0, 40), (42, 5000, 9))))
    int8, batch_invariant = bool(score.get("int8")), bool(score.get("batch_invariant"))
    shape, cpu = KvShape(1, kv_heads, dim, dim), torch.device("cpu")
    cache = KvCache(shape, 4, 16, dtype, cpu, int8=int8, batch_invariant=batch_invariant)
    query, new = torch.zeros(51, heads, dim, dtype=dtype), torch.zeros(51, kv_heads, dim, dtype=dtype)
    sinks = torch.zeros(heads, dtype=dtype) if score.get("sinks") else None
    call = LayerCall(0, query, new, new, dim**-0.5, score.get("window"), score.get("softcap"), sinks)
    writes = [write_call(call, torch.zeros(51, dtype=torch.int64), cache)] if int8 else []
    out = torch.empty_like(query)
    return [*writes, *plan.kernels(call, cache, out), *late.kernels(call, cache, out)]


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "int8"),
    [
        (32, 8, 128, False),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((32, 8, 128, True), (8, 4, 256, False))),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((8, 4, 256, True), (32, 32, 64, False))),
    ],
)
def test_sums_of_attention_stay_in_registers(heads: int, kv_heads: int, dim: int, int8: bool) -> None:
    """With a split more of positions, 64 more lanes or half of the warps an H100 would keep some of them in memory."""
    for call in launches(heads, kv_heads, dim, torch.bfloat16, {"int8": int8}):
        assert spilled_bytes(compiled_for(90, call), 90) == 0, call.kernel.__name__


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
    """A worker waits longer for an engine that compiles; see loraplex.worker.io.app.watch_steps."""
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
