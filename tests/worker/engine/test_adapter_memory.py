"""An adapter in one piece of memory is the same adapter; `tests/gpu` has the copy to a device."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts import ArtifactError
from loraplex.worker.engine import device
from loraplex.worker.engine.device import host_adapter_bytes
from loraplex.worker.engine.lora.weights import (
    AdapterWeights,
    LoraPair,
    Rescale,
    TorchAdapterMemory,
    adapter_cache,
    pack_adapter,
)
from loraplex.worker.engine_api import AdapterSource, EngineConfig

CPU = torch.device("cpu")


def weights() -> AdapterWeights:
    """Ranks and widths that leave gaps between the tensors; of the dtypes and strides that reading gives."""
    generator = torch.Generator().manual_seed(3)
    pairs = {
        f"layer {rank}": LoraPair(
            torch.randn(rank, 5, generator=generator).to(torch.float16 if rank == 8 else torch.float32),
            torch.randn(7, rank, generator=generator).t(),
            Rescale(*torch.randn(2, 7, generator=generator)) if rank == 3 else None,
        )
        for rank in (1, 3, 8)
    }
    return AdapterWeights(pairs, 8)


def test_a_packed_adapter_is_the_same_in_one_piece() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        original = weights()
        packed = pack_adapter(original, dtype)
        assert packed.weights.rank == 8
        assert packed.weights.pairs.keys() == original.pairs.keys()
        for name, pair in original.pairs.items():
            for ours, theirs in zip(packed.weights.pairs[name].tensors, pair.tensors, strict=True):
                assert torch.equal(ours, theirs.to(dtype))
                assert ours.is_contiguous()
                assert ours.untyped_storage().data_ptr() == packed.memory.data_ptr()
                assert ours.data_ptr() % 16 == 0


def test_its_size_is_what_it_takes() -> None:
    memory = TorchAdapterMemory(lambda _: weights(), lambda _weights, _slot: None, CPU, torch.float32)
    prepared = memory.read(AdapterSource("a", "/"))
    tensors = [tensor for pair in prepared.weights.pairs.values() for tensor in pair.tensors]
    assert not memory.transfers
    assert memory.size(prepared) == prepared.memory.untyped_storage().nbytes()
    assert sum(tensor.nbytes for tensor in tensors) <= memory.size(prepared)
    assert memory.size(prepared) < sum(tensor.nbytes for tensor in tensors) + 64 * len(tensors)


def test_it_is_installed_from_where_it_lies() -> None:
    installed: list[tuple[AdapterWeights, int]] = []
    memory = TorchAdapterMemory(
        lambda _: weights(), lambda weights, slot: installed.append((weights, slot)), CPU, torch.float32
    )
    prepared = memory.read(AdapterSource("a", "/"))
    memory.install(prepared, 3)
    assert installed == [(prepared.weights, 3)]


@pytest.mark.parametrize(
    ("value", "dtype", "named"),
    [
        (float("nan"), torch.float32, "not finite.* in float32"),
        (float("-inf"), torch.bfloat16, "not finite.* in bfloat16"),
        (-2e20, torch.bfloat16, "beyond 1e\\+20"),
        (1e5, torch.float16, "not finite.* in float16"),
    ],
)
def test_numbers_that_no_token_can_be_made_with_are_refused(value: float, dtype: torch.dtype, named: str) -> None:
    """In the dtype that is computed with; 1e5 is more than a float16 holds."""
    for tensor in range(4):  # A, B, gain, shift
        adapter = weights()
        adapter.pairs["layer 3"].tensors[tensor][..., 0] = value
        with pytest.raises(ArtifactError, match=f"layer 3 .*{named}"):
            pack_adapter(adapter, dtype)


class Stream:
    """A stream whose work is done when its event is waited for: as a device does it that has other work."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []


class Event:
    """An event of Stream: what was queued before its record is done when somebody waits for it."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self, stream: Stream) -> None:
        self.copies, stream.copies = stream.copies, []

    def synchronize(self) -> None:
        for to, of in self.copies:
            to[:] = of
        self.copies = []


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all pinned memory; a copy without waiting reads its source only when an event is waited for."""
    sizes: list[int] = []
    stream, empty, copy = Stream(), torch.empty, torch.Tensor.copy_

    def allocate(*size: int, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        if pin_memory:
            sizes.append(made.nbytes)
        return made

    def queue(to: torch.Tensor, of: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(to, of)
        stream.copies.append((to, of))
        return to

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "copy_", queue)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event())
    return sizes


def test_adapters_of_any_size_go_through_the_same_pinned_memory(
    pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned blocks of their own would be rounded up to powers of two, and kept."""
    monkeypatch.setattr(device, "_STAGING_BYTES", 96)
    cuda = torch.device("cuda", 0)
    memory = TorchAdapterMemory(lambda _: weights(), lambda _weights, _slot: None, cuda, torch.bfloat16)
    assert pinned == [96] * 3
    for _ in range(3):
        prepared = memory.read(AdapterSource("a", "/"))
        assert prepared.memory.nbytes > 4 * 96
        assert prepared.memory.nbytes % 96
        transferred = memory.transfer(prepared)
        assert torch.equal(transferred.memory, prepared.memory)
        assert torch.equal(transferred.weights.pairs["layer 8"].b, prepared.weights.pairs["layer 8"].b)
    assert pinned == [96] * 3


def test_workers_of_one_machine_share_its_memory_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_host_bytes", lambda: 800)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert host_adapter_bytes(0, CPU) == 100
    assert host_adapter_bytes(0, torch.device("cuda", 1)) == 25
    assert host_adapter_bytes(7, torch.device("cuda", 1)) == 7


def test_threads_that_load_adapters_work_on_the_model_s_device(
    pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's own current device is at first device 0, where it would take a context."""
    cuda = torch.device("cuda", 1)
    devices: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: devices.update({threading.current_thread().name: device})
    )
    config = SimpleNamespace(model_type="llama")
    loaded = SimpleNamespace(device=cuda, dtype=torch.bfloat16, module=SimpleNamespace(config=config))
    base: Any = SimpleNamespace(loaded=loaded)
    cache = adapter_cache(base, EngineConfig("model", host_adapter_bytes=1 << 20), lambda: None)
    try:
        assert devices == {f"adapter-loader_{thread}": cuda for thread in range(4)}
    finally:
        cache.close()
