"""The kernels of attention without a GPU: interpreted against the torch path, and compiled for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from worker.model.attention import LayerCall
from worker.model.kv_cache import KvCache

pytest.importorskip("triton", reason="Triton is for Linux")

ROOT = Path(__file__).parents[2]
# Of an sm_90 device, for one program.
SHARED_BYTES = 227 * 1024
TOLERANCES = {"float32": 5e-6, "float16": 3e-3}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def test_kernels_compute_what_torch_computes() -> None:
    # A process of its own: nothing else here may find Triton interpreted.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("attention_cases.py")), "cpu"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    assert [len(differences[name]) for name in TOLERANCES] == [30, 7]
    for name, tolerance in TOLERANCES.items():
        assert differences[name].pop("alone") == 0
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "score"),
    [
        (32, 8, 128, torch.bfloat16, {}),
        (8, 4, 256, torch.bfloat16, {"window": 4096, "softcap": 50.0}),
        (64, 8, 64, torch.bfloat16, {"window": 128, "sinks": True}),
        (14, 2, 80, torch.float16, {}),
        (4, 4, 24, torch.float32, {"softcap": 30.0, "sinks": True}),
    ],
)
def test_kernels_compile_for_sm_90(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, score: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for call in launches(heads, kv_heads, dim, dtype, score):
        constants = dict(call.constants) | {name: None for name, value in call.arguments.items() if value is None}
        signature = {
            name: "constexpr" if name in constants else kind(call.arguments[name]) for name in call.kernel.arg_names
        }
        compiled = triton.compile(
            ASTSource(call.kernel, signature, constants),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": call.warps, "num_stages": call.stages},
        )
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_BYTES


def launches(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, score: dict[str, Any]) -> list[Any]:
    """A step's launches as the model's forward pass makes them: nothing is run."""
    from worker.model.triton_attention import Chunks, DecodeRows, TritonPlan

    tables = torch.zeros(2, 4, dtype=torch.int32)
    plan = TritonPlan(DecodeRows(tables, torch.zeros(2, dtype=torch.int64)), Chunks(tables, ((2, 0, 40), (42, 5, 9))))
    cache = KvCache(1, kv_heads, dim, 4, 16, dtype, torch.device("cpu"))
    query, new = torch.zeros(51, heads, dim, dtype=dtype), torch.zeros(51, kv_heads, dim, dtype=dtype)
    sinks = torch.zeros(heads, dtype=dtype) if score.get("sinks") else None
    call = LayerCall(0, query, new, new, dim**-0.5, score.get("window"), score.get("softcap"), sinks)
    return list(plan.kernels(call, cache, torch.empty_like(query)))


def kind(value: Any) -> str:
    """An argument's type, as Triton's signatures spell it."""
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
