"""An adapter's way to the device: through staging memory, beside the steps, and in a slot what it was in its files."""

from __future__ import annotations

import pytest
import torch

from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair, TorchAdapterMemory
from loraplex.worker.engine_api import AdapterSource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

CUDA = torch.device("cuda")
SIZE = 1024


def weights(number: int) -> AdapterWeights:
    """An adapter full of its number."""
    pair = LoraPair(torch.full((16, SIZE), float(number)), torch.full((16, SIZE), -float(number)))
    return AdapterWeights({"layer": pair}, 16)


def test_adapters_arrive_whole_while_the_device_is_busy() -> None:
    """Staging memory is used again at once by the next adapter: none may overtake a copy into a slot."""
    slots = torch.zeros(32, 16, SIZE, device=CUDA)

    def install(adapter: AdapterWeights, slot: int) -> None:
        slots[slot].copy_(adapter.pairs["layer"].a)

    memory = TorchAdapterMemory(lambda source: weights(int(source.digest)), install, CUDA, torch.float32)
    assert memory.transfers
    busy = torch.randn(4096, 4096, device=CUDA)
    for number in range(64):
        prepared = memory.read(AdapterSource(str(number), "/"))
        assert not prepared.memory.is_pinned()
        transferred = memory.transfer(prepared)
        assert transferred.memory.device.type == "cuda"
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        memory.install(transferred, number % 32)
        del transferred, prepared
    torch.cuda.synchronize()
    assert slots[:, 0, 0].tolist() == [float(32 + slot) for slot in range(32)]
    assert all(bool((slots[slot] == slots[slot, 0, 0]).all()) for slot in range(32))
