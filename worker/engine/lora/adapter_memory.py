"""Adapter weights on their way from files through host memory to the device, each adapter in one contiguous buffer.

Tensors are cast to the model's dtype while they are copied into the buffer, and their values are checked there.

On CUDA the buffer is pinned and copied to the device in one transfer, on a stream of its own; only the loader thread
waits for the transfer, so steps go on. The copy into a slot is on the device, on the steps' stream, behind all steps
launched before it, so that no step sees its slot change. On the CPU nothing is copied into a slot: the slot holds the
addresses in host memory, and a reference that keeps the buffer alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from artifacts import ArtifactError
from artifacts.revision import WEIGHTS_FILE
from worker.engine.device import dtype_name, host_adapter_bytes, keep_to_one_core
from worker.engine.lora.base_layers import ModelLayers
from worker.engine.lora.weights import AdapterWeights, LoraPair, Rescale, read_source
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine.scheduling.loader_threads import LoaderThreads
from worker.engine_api import AdapterSource, EngineConfig

# Alignment of each tensor in the buffer, in bytes: a cache line of the CPU, four times what CUDA reads at once.
_ALIGNMENT = 64
# Largest magnitude of a weight that is accepted. Trained weights are far below; a larger one would overflow in products
# with usual activations and give NaN logits.
_LARGEST = 1e20


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter whose tensors are contiguous views of the buffer `memory`, one after the other, all of one dtype."""

    weights: AdapterWeights
    memory: Tensor


class TorchAdapterMemory:
    """Implements worker.engine.scheduling.adapter_tiers.AdapterMemory for torch models.

    `read` reads an adapter from its directory, `install` puts it into a slot of the model's layers.
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
        self.transfers = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.transfers else None  # type: ignore[no-untyped-call]  # torch's own

    def read(self, source: AdapterSource) -> PackedAdapter:
        """Read an adapter from its files into host memory."""
        return pack_adapter(self._read(source), self._dtype, pinned=self.transfers)

    def transfer(self, prepared: PackedAdapter) -> PackedAdapter:
        """Copy an adapter to the device and wait for the transfer; the calling thread sleeps, it does not spin."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's own
        with torch.cuda.stream(self._stream):
            memory = prepared.memory.to(self._device, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
        return PackedAdapter(_views(prepared.weights, memory), memory)

    def install(self, prepared: PackedAdapter, slot: int) -> None:
        """Put an adapter into a slot."""
        self._install(prepared.weights, slot)
        if prepared.memory.is_cuda:
            # The buffer belongs to the transfer stream's allocator: keep it until this stream has copied from it.
            prepared.memory.record_stream(torch.cuda.current_stream(self._device))

    def size(self, prepared: PackedAdapter) -> int:
        """Return the buffer's bytes: cast to the model's dtype, and padded to the alignment."""
        return prepared.memory.nbytes


def adapter_memory(
    base: ModelLayers, max_rank: int, *installs: Callable[[AdapterWeights, int], None]
) -> TorchAdapterMemory:
    """Return the memory of a loaded model's adapters; `installs` put one into a slot."""
    loaded = base.loaded
    architecture: str = loaded.module.config.model_type

    def read(source: AdapterSource) -> AdapterWeights:
        return read_source(source, loaded.adaptable, max_rank, base, architecture)

    def install(weights: AdapterWeights, slot: int) -> None:
        for into in installs:
            into(weights, slot)

    return TorchAdapterMemory(read, install, loaded.device, loaded.dtype)


def adapter_cache(
    base: ModelLayers,
    config: EngineConfig,
    on_loaded: Callable[[], None],
    *installs: Callable[[AdapterWeights, int], None],
) -> AdapterCache[PackedAdapter]:
    """Return the adapter cache of an engine; `on_loaded` is called from a loader thread."""
    memory = adapter_memory(base, config.max_rank, *installs)
    loads = LoaderThreads[PackedAdapter](on_loaded, prepare=keep_to_one_core)
    return AdapterCache(config.adapter_slots, memory, loads, host_adapter_bytes(config.host_adapter_bytes))


def pack_adapter(weights: AdapterWeights, dtype: torch.dtype, *, pinned: bool = False) -> PackedAdapter:
    """Copy an adapter into one host buffer. Raises ArtifactError for values that are not finite or too large."""
    tensors = weights.tensors
    memory = torch.zeros(sum(sum(_padded_size(tensor, dtype)) for tensor in tensors), dtype=dtype, pin_memory=pinned)
    packed = _views(weights, memory)
    torch._foreach_copy_(packed.tensors, tensors)
    if not _usable(memory):
        tensors_of = {name: pair.tensors for name, pair in packed.pairs.items()}
        tensors_of |= {name: (tensor,) for name, tensor in packed.head.items()}
        modules = (name for name, own in tensors_of.items() if not all(map(_usable, own)))
        raise ArtifactError(
            WEIGHTS_FILE,
            f"{next(modules)} has values that are not finite, or beyond {_LARGEST:g}, in {dtype_name(dtype)}",
        )
    return PackedAdapter(packed, memory)


def _views(like: AdapterWeights, memory: Tensor) -> AdapterWeights:
    """Return views of `memory` with the shapes of the adapter's tensors, one after the other."""
    sizes = [size for tensor in like.tensors for size in _padded_size(tensor, memory.dtype)]
    places = iter(memory.split_with_sizes(sizes)[::2])

    def view(tensor: Tensor) -> Tensor:
        return next(places).view(tensor.shape)

    def views(pair: LoraPair) -> LoraPair:
        a, b, change = view(pair.a), view(pair.b), pair.rescale
        return LoraPair(a, b, None if change is None else Rescale(view(change.gain), view(change.shift)))

    pairs = {name: views(pair) for name, pair in like.pairs.items()}
    return AdapterWeights(pairs, like.rank, {name: view(tensor) for name, tensor in like.head.items()})


def _padded_size(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return a tensor's number of elements, and the number of padding elements behind it that align the next tensor."""
    return tensor.numel(), -tensor.numel() % (_ALIGNMENT // dtype.itemsize)


def _usable(numbers: Tensor) -> bool:
    """Tell whether all values are finite and within the bound."""
    # Compared as Python floats: in float16 the bound would be infinite. Comparisons with NaN are false.
    low, high = (bound.item() for bound in numbers.aminmax())
    return low >= -_LARGEST and high <= _LARGEST


class AdapterLayers(Protocol):
    """A model's adaptable layers: cpu.py on the CPU, cuda.py on CUDA. Called by one thread."""

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter; steps that are already launched still use the old one."""

    def begin_step(self, rows: Sequence[tuple[int, int]], logit_counts: Sequence[int] = ()) -> None:
        """Set the rows that the layers compute until the next call.

        `rows` are (slot or -1, tokens): first those with one token, then those with more, each sorted by slot.
        `logit_counts` are the numbers of their tokens that the output head computes logits for.
        """

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """Set rows of one token each, with padding rows up to `padded`; `row_slots` are sorted.

        On CUDA all calls with the same `padded` lead to the same launches, so that a CUDA graph can hold them.
        """
