"""The kernels of LoRA without a GPU: compiled for one, and their launches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.engine.triton_runs import compiled_for_sm_90
from worker.engine.lora.weights import AdapterWeights, LoraPair

pytest.importorskip("triton", reason="Triton is for Linux")

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("in_features", "widths", "max_rank", "dtype"),
    [
        (4096, (4096, 1024, 1024), 16, torch.bfloat16),
        (17, (5, 3), 3, torch.float32),
    ],
)
def test_kernels_compile_for_sm_90(
    in_features: int, widths: tuple[int, ...], max_rank: int, dtype: torch.dtype,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for call in launches(in_features, widths, max_rank, dtype):
        compiled = compiled_for_sm_90(call)
        if in_features % 16 == 0:
            # Reads and writes in bulk move 16 bytes at a time; three numbers of the tile and the rank do not,
            # nor do a DoRA's gains and shifts, a number or two for each thread.
            ptx = compiled.asm["ptx"]
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]+\], \[[^]]+\], (0x\w+)", ptx)
            assert copies.count("0x10") >= 4
            assert len(re.findall(r"ld\.global\.b32", ptx)) <= 6
            assert len(re.findall(r"ld\.global\.b16", ptx)) <= 2
            assert "st.global.b16" not in ptx


def launches(in_features: int, widths: tuple[int, ...], max_rank: int, dtype: torch.dtype) -> list[Any]:
    """A decode step's launches and a prefill's, as the model's forward pass makes them: nothing is run."""
    from worker.engine.lora.cuda import CudaLora

    linears = {f"module {index}": (in_features, width) for index, width in enumerate(widths)}
    lora = CudaLora(linears, {"group": tuple(linears)}, 2, max_rank, 32, dtype, CPU)
    x, y = torch.zeros(64, in_features, dtype=dtype), torch.zeros(64, sum(widths), dtype=dtype)
    lora.begin_decode([-1, 0, 1], 32)
    decode = lora.launches(x[:32], y[:32], "group")
    lora.begin_step([(0, 60), (1, 4)])
    return [*decode, *lora.launches(x, y, "group")]


def test_a_decode_steps_launches_depend_on_its_padded_size_alone() -> None:
    """Otherwise a graph would hold the launches of another step."""
    from worker.engine.lora.cuda import CudaLora

    lora = CudaLora({"m": (32, 48)}, {"g": ("m",)}, 4, 8, 8, torch.float32, CPU)
    x, y = torch.zeros(8, 32), torch.zeros(8, 48)
    seen = []
    for slots in ([], [-1, 2], [0, 0, 0, 1, 2, 3, 3, 3], [3]):
        lora.install(
            AdapterWeights({"m": LoraPair(torch.ones(len(slots) or 1, 32), torch.ones(len(slots) or 1, 48))}, 1), 3
        )
        lora.begin_decode(slots, 8)
        seen.append([described(call) for call in lora.launches(x, y, "g")])
    assert len(seen[0]) == 2
    assert seen.count(seen[0]) == len(seen)
    assert lora._table[:2].tolist() == [[3, 0, 1], [-1, 0, 0]]
    lora.begin_step([(-1, 5)])
    assert lora.launches(x, y, "g") == (), "a step without adapters launches nothing"


def described(call: Any) -> tuple[Any, ...]:
    """A launch by its numbers and addresses; that of the partial sums is the graph's own memory."""
    arguments = {
        name: value.data_ptr() if isinstance(value, Tensor) else value
        for name, value in call.arguments.items()
        if name not in ("sums", "sums_out")
    }
    return call.grid, arguments, dict(call.constants)


def test_a_group_of_modules_with_different_inputs_is_refused() -> None:
    from worker.engine.lora.cuda import CudaLora

    with pytest.raises(ValueError, match=r"group g take \[16, 32\] features"):
        CudaLora({"m": (32, 48), "n": (16, 48)}, {"g": ("m", "n")}, 1, 8, 8, torch.float32, CPU)
    with pytest.raises(ValueError, match="1 to 3 modules, not 4"):
        CudaLora({"m": (32, 48)}, {"g": ("m",) * 4}, 1, 8, 8, torch.float32, CPU)
