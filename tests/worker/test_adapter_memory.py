"""An adapter in one piece of memory is the same adapter; `tests/gpu` has the copy to a device."""

from __future__ import annotations

import torch

from worker.lora.adapter_memory import TorchAdapterMemory, pack
from worker.lora.dora import Rescale
from worker.lora.weights import AdapterWeights, LoraPair
from worker.scheduling.contract import AdapterSource

CPU = torch.device("cpu")


def weights(dtype: torch.dtype) -> AdapterWeights:
    """Ranks and widths that leave gaps between the tensors."""
    generator = torch.Generator().manual_seed(3)
    pairs = {
        f"layer {rank}": LoraPair(
            torch.randn(rank, 5, generator=generator).to(dtype),
            torch.randn(7, rank, generator=generator).to(dtype).t(),
            Rescale(*torch.randn(2, 7, generator=generator).to(dtype)) if rank == 3 else None,
        )
        for rank in (1, 3, 8)
    }
    return AdapterWeights(pairs, 8)


def test_a_packed_adapter_is_the_same_in_one_piece() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        original = weights(dtype)
        packed = pack(original)
        assert packed.weights.rank == 8
        assert packed.weights.pairs.keys() == original.pairs.keys()
        for name, pair in original.pairs.items():
            for ours, theirs in zip(packed.weights.pairs[name].tensors, pair.tensors, strict=True):
                assert torch.equal(ours, theirs)
                assert ours.is_contiguous()
                assert ours.untyped_storage().data_ptr() == packed.memory.data_ptr()
                assert ours.data_ptr() % 16 == 0


def test_its_size_is_what_it_takes() -> None:
    memory = TorchAdapterMemory(lambda _: weights(torch.float32), lambda _weights, _slot: None, CPU)
    prepared = memory.read(AdapterSource("a", "/"))
    tensors = [tensor for pair in prepared.weights.pairs.values() for tensor in pair.tensors]
    assert not memory.stages
    assert memory.size(prepared) == prepared.memory.untyped_storage().nbytes()
    assert sum(tensor.nbytes for tensor in tensors) <= memory.size(prepared)
    assert memory.size(prepared) < sum(tensor.nbytes for tensor in tensors) + 64 * len(tensors)


def test_it_is_installed_from_where_it_lies() -> None:
    installed: list[tuple[AdapterWeights, int]] = []
    memory = TorchAdapterMemory(
        lambda _: weights(torch.float32), lambda weights, slot: installed.append((weights, slot)), CPU
    )
    prepared = memory.read(AdapterSource("a", "/"))
    memory.install(prepared, 3)
    assert installed == [(prepared.weights, 3)]
