"""The kernels of LoRA without a GPU: compiled for one, and their launches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.contracts.artifacts.experts import ExpertSizes
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair
from tests.worker.engine.triton_runs import compiled_for, compiled_for_sm_90

pytest.importorskip("triton", reason="Triton is for Linux")

CPU = torch.device("cpu")


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize(
    ("in_features", "widths", "max_rank", "dtype"),
    [
        (4096, (4096, 1024, 1024), 16, torch.bfloat16),
        pytest.param(17, (5, 3), 3, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_kernels_compile_for_sm_90(
    in_features: int, widths: tuple[int, ...], max_rank: int, dtype: torch.dtype
) -> None:
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
    from loraplex.worker.engine.lora.cuda import CudaLora

    linears = {f"module {index}": (in_features, width) for index, width in enumerate(widths)}
    lora = CudaLora(linears, {"group": tuple(linears)}, 2, max_rank, 32, dtype, CPU)
    x, y = torch.zeros(64, in_features, dtype=dtype), torch.zeros(64, sum(widths), dtype=dtype)
    lora.begin_decode([-1, 0, 1], 32)
    decode = lora.launches(x[:32], y[:32], "group")
    lora.begin_step([(0, 60), (1, 4)])
    return [*decode, *lora.launches(x, y, "group")]


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_of_experts_tiles_compiles(capability: int) -> None:
    from loraplex.worker.engine.lora.cuda_experts import CudaExperts

    experts = CudaExperts(lora_of({"m": (32, 48)}), {}, 2, 16, 8, torch.bfloat16, CPU)
    compiled_for(capability, experts.tiles_call(torch.zeros(64, dtype=torch.int64), 8))


def test_a_decode_step_of_experts_has_the_same_launches_whatever_its_rows() -> None:
    """A slot that holds an adapter of fewer ranks, or none, has nothing of the one before."""
    from loraplex.worker.engine.lora.cuda_experts import CudaExperts

    experts = CudaExperts(lora_of({"m": (32, 48)}), {"up": ExpertSizes(16, 24, 3)}, 2, 4, 8, torch.float32, CPU)
    addresses = set()
    for rank, slots in ((4, [0, 1]), (2, [1]), (0, [-1, -1, 1])):
        pair = LoraPair(torch.ones(3, rank, 16), torch.full((3, rank, 24), 2.0))
        experts.install(AdapterWeights({"up": pair} if rank else {}, rank), 1)
        group = experts.groups["up"]
        assert group.ranks[:, 0].tolist() == [0, 0, 0, *[rank] * 3]
        assert (group.a[3:, 0, :rank] == 1).all()
        assert (group.b[3:, : rank * 24] == 2).all()
        experts.begin_decode(slots, 8)
        row_slots: Any = experts.row_slots
        assert row_slots.tolist() == [*slots, *[-1] * (8 - len(slots))]
        addresses.add(row_slots.data_ptr())
    assert len(addresses) == 1
    experts.begin_step([(-1, 2), (1, 3)])
    row_slots = experts.row_slots
    assert row_slots.tolist() == [-1, -1, 1, 1, 1]
    experts.begin_step([(-1, 5)])
    assert experts.row_slots is None, "a step without adapters launches nothing of them"


def lora_of(linears: dict[str, tuple[int, int]]) -> Any:
    """Slots of layers that stand alone."""
    from loraplex.worker.engine.lora.cuda import CudaLora

    return CudaLora(linears, {name: (name,) for name in linears}, 2, 8, 8, torch.float32, CPU)


def test_a_decode_steps_launches_depend_on_its_padded_size_alone() -> None:
    """Otherwise a graph would hold the launches of another step."""
    from loraplex.worker.engine.lora.cuda import CudaLora

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
    from loraplex.worker.engine.lora.cuda import CudaLora

    with pytest.raises(ValueError, match=r"group g take \[16, 32\] features"):
        CudaLora({"m": (32, 48), "n": (16, 48)}, {"g": ("m", "n")}, 1, 8, 8, torch.float32, CPU)
    with pytest.raises(ValueError, match="1 to 3 modules, not 4"):
        CudaLora({"m": (32, 48)}, {"g": ("m",) * 4}, 1, 8, 8, torch.float32, CPU)
