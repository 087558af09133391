"""Adapters of a torch model on their way from files over host memory to the device: one piece of memory each.

What is read is cast straight into that piece, and checked there: as a slot will hold it.

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

from artifacts.errors import ArtifactError
from artifacts.revision import WEIGHTS_FILE
from worker.engine.lora.dora import Rescale
from worker.engine.lora.weights import AdapterWeights, LoraPair
from worker.engine_api import AdapterSource

# Tensors begin at multiples of so many bytes.
_ALIGNMENT = 64
# No trained weight is near it; products with it do not overflow for any input that a model could go on with.
_LARGEST = 1e20


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter whose tensors are contiguous views of `memory`, one after the other, all of one dtype."""

    weights: AdapterWeights
    memory: Tensor


class TorchAdapterMemory:
    """`read` gives an adapter in host memory, `install` puts it in a slot; see
    worker.engine.adapter_cache.loading.AdapterMemory.
    """

    def __init__(
        self,
        read: Callable[[AdapterSource], AdapterWeights],
        install: Callable[[AdapterWeights, int], None],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._read = read
        self._install = install
        self._device = device
        self._dtype = dtype
        self.stages = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.stages else None  # type: ignore[no-untyped-call]  # torch's own

    def read(self, source: AdapterSource) -> PackedAdapter:
        """From files to host memory."""
        return pack_adapter(self._read(source), self._dtype, pinned=self.stages)

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


def pack_adapter(weights: AdapterWeights, dtype: torch.dtype, *, pinned: bool = False) -> PackedAdapter:
    """The adapter in one piece of host memory. Raises ArtifactError where it has numbers that can't be used."""
    tensors = weights.tensors
    memory = torch.zeros(sum(sum(_padded_size(tensor, dtype)) for tensor in tensors), dtype=dtype, pin_memory=pinned)
    packed = _views(weights, memory)
    torch._foreach_copy_(packed.tensors, tensors)
    if not _usable(memory):
        modules = (name for name, pair in packed.pairs.items() if not all(map(_usable, pair.tensors)))
        raise ArtifactError(
            WEIGHTS_FILE,
            f"{next(modules)} has values that are not finite, or beyond {_LARGEST:g}, in "
            f"{str(dtype).removeprefix('torch.')}",
        )
    return PackedAdapter(packed, memory)


def _views(like: AdapterWeights, memory: Tensor) -> AdapterWeights:
    """Tensors of the same shapes, one after the other in `memory`."""
    sizes = [size for tensor in like.tensors for size in _padded_size(tensor, memory.dtype)]
    places = iter(memory.split_with_sizes(sizes)[::2])

    def view(tensor: Tensor) -> Tensor:
        return next(places).view(tensor.shape)

    def views(pair: LoraPair) -> LoraPair:
        a, b, change = view(pair.a), view(pair.b), pair.rescale
        return LoraPair(a, b, None if change is None else Rescale(view(change.gain), view(change.shift)))

    return AdapterWeights({name: views(pair) for name, pair in like.pairs.items()}, like.rank)


def _padded_size(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """How many numbers it takes, and how many are left out behind it so that the next one is aligned."""
    return tensor.numel(), -tensor.numel() % (_ALIGNMENT // dtype.itemsize)


def _usable(numbers: Tensor) -> bool:
    """Whether tokens can be made with them."""
    # As Python's numbers: in float16 the bound itself is infinite. NaN is within no bounds.
    low, high = (bound.item() for bound in numbers.aminmax())
    return low >= -_LARGEST and high <= _LARGEST
