"""Adapters of a torch model on their way from files over host memory to the device: one piece of memory each.

On CUDA the piece is pinned and copied in one go on a stream of its own, by a loader thread that alone waits for it:
steps go on meanwhile. Into a slot it is then copied on the device, on the steps' own stream: behind whatever step was
launched before, so that none sees a slot change. On the CPU a slot tells where in host memory the piece is,
and keeps it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.lora.dora import Rescale
from worker.lora.weights import AdapterWeights, LoraPair
from worker.scheduling.contract import AdapterSource

# Tensors begin at multiples of so many bytes.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter whose tensors are views of `memory`, uint8 [bytes]."""

    weights: AdapterWeights
    memory: Tensor


class TorchAdapterMemory:
    """`read` gives an adapter in host memory, `install` puts it in a slot; see worker.lora.loading.AdapterMemory."""

    def __init__(
        self,
        read: Callable[[AdapterSource], AdapterWeights],
        install: Callable[[AdapterWeights, int], None],
        device: torch.device,
    ) -> None:
        self._read = read
        self._install = install
        self._device = device
        self.stages = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.stages else None  # type: ignore[no-untyped-call]  # torch's own

    def read(self, source: AdapterSource) -> PackedAdapter:
        """From files to host memory."""
        return pack(self._read(source), pinned=self.stages)

    def stage(self, prepared: PackedAdapter) -> PackedAdapter:
        """To the device; returns when it is there. The calling thread sleeps, it does not spin."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's own
        with torch.cuda.stream(self._stream):
            memory = prepared.memory.to(self._device, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
        return PackedAdapter(_views(prepared.weights, memory), memory)

    def install(self, prepared: PackedAdapter, slot: int) -> None:
        """Into a slot."""
        self._install(prepared.weights, slot)
        if prepared.memory.is_cuda:
            # It was allocated on the other stream, which might give it away before this one has copied it.
            prepared.memory.record_stream(torch.cuda.current_stream(self._device))

    def size(self, prepared: PackedAdapter) -> int:
        """Bytes as stored: cast, and padded to the alignment."""
        return prepared.memory.nbytes


def pack(weights: AdapterWeights, *, pinned: bool = False) -> PackedAdapter:
    """The same adapter in one piece of host memory."""
    total = sum(_padded(tensor) for pair in weights.pairs.values() for tensor in pair.tensors)
    packed_weights = _views(weights, memory := torch.empty(total, dtype=torch.uint8, pin_memory=pinned))
    for module, pair in weights.pairs.items():
        for place, tensor in zip(packed_weights.pairs[module].tensors, pair.tensors, strict=True):
            place.copy_(tensor)
    return PackedAdapter(packed_weights, memory)


def _views(like: AdapterWeights, memory: Tensor) -> AdapterWeights:
    """Tensors of the same shapes, one after the other in `memory`."""
    offset = 0

    def view(tensor: Tensor) -> Tensor:
        nonlocal offset
        piece = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        offset += _padded(tensor)
        return piece

    def views(pair: LoraPair) -> LoraPair:
        a, b, change = view(pair.a), view(pair.b), pair.rescale
        return LoraPair(a, b, None if change is None else Rescale(view(change.gain), view(change.shift)))

    return AdapterWeights({name: views(pair) for name, pair in like.pairs.items()}, like.rank)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
