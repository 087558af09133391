"""The parts of an adapter that the ranks of a split model have, in one memory that their processes share.

    a layer whose rows are split      A whole                       B [rank, out]: rank 0's outputs │ rank 1's │ ...
    a layer whose columns are split   A [rank, in]: the same way    B whole, added by each rank before the ranks' sum

Rank 0 reads an adapter, checks it and writes the memory; the others map it. What several ranks have lies there once.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from loraplex.contracts.artifacts import MismatchError
from loraplex.contracts.artifacts.peft_config import SAVED_FIELD
from loraplex.worker.engine.device import Staging
from loraplex.worker.engine.lora.base_layers import LoadedBase
from loraplex.worker.engine.lora.weights import (
    AdapterLayers,
    AdapterWeights,
    LoraPair,
    PackedAdapter,
    Rescale,
    TorchAdapterMemory,
    pack_adapter,
    packed_views,
)
from loraplex.worker.engine.parallel.group import SplitModel
from loraplex.worker.engine.parallel.splits import Part
from loraplex.worker.engine_api import AdapterSource


@dataclass(frozen=True, slots=True)
class AdapterShapes:
    """The shapes of an adapter: name, rank, and whether it rescales (DoRA) of each pair; name and shape of each of its
    head's parameters.
    """

    pairs: tuple[tuple[str, int, bool], ...]
    own: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, weights: AdapterWeights) -> AdapterShapes:
        """Return those of a whole adapter."""
        pairs = tuple((name, pair.a.shape[-2], pair.rescale is not None) for name, pair in weights.pairs.items())
        return cls(pairs, tuple((name, tuple(one.shape)) for name, one in weights.own.items()))


class _Layer:
    """The parts of a layer's pairs by rank; a pair of flat tensors has them side by side."""

    def __init__(self, split: SplitModel, name: str) -> None:
        splits = [of_rank.get(name) for of_rank in split.linears]
        self._inputs = [(one.inputs,) for one in splits if one is not None and one.inputs is not None]
        self._outputs = [one.outputs for one in splits if one is not None and one.outputs is not None]
        self._sums = any(one is not None and one.sums for one in splits)

    def beside(self, pair: LoraPair) -> LoraPair:
        """Return a whole pair with its parts side by side."""
        change = pair.rescale
        if change is not None:
            # The sum has rank 0's shift alone.
            shift = torch.cat([change.shift, torch.zeros_like(change.shift)]) if self._sums else change.shift
            change = Rescale(_beside(change.gain, self._outputs), _beside(shift, self._outputs))
        return LoraPair(_beside(pair.a, self._inputs), _beside(pair.b, self._outputs), change)

    def of(self, pair: LoraPair, rows: Sequence[int], rank: int) -> LoraPair:
        """Return a rank's part of a pair of flat tensors; A and B are [*rows, columns]."""
        change = pair.rescale
        if change is not None:
            gain = _piece(change.gain, self._outputs, (), rank)
            shift = change.shift.view(2, -1)[min(rank, 1)] if self._sums else None
            change = Rescale(gain, _piece(change.shift, self._outputs, (), rank) if shift is None else shift)
        a, b = _piece(pair.a, self._inputs, rows, rank), _piece(pair.b, self._outputs, rows, rank)
        return LoraPair(a, b, change)


def _beside(tensor: Tensor, spans: list[Any]) -> Tensor:
    """Return the parts [..., spans], one after the other; without spans the tensor, all flat."""
    if not spans:
        return tensor.reshape(-1)
    return torch.cat([Part(-1, one).of(tensor).reshape(-1) for one in spans])


def _piece(flat: Tensor, spans: list[Any], rows: Sequence[int], rank: int) -> Tensor:
    """Return a rank's part [*rows, width] of what `_beside` has made."""
    if not spans:
        return flat.view(*rows, -1)
    sizes = [prod(rows) * sum(stop - first for first, stop in one) for one in spans]
    return flat.split_with_sizes(sizes)[rank].view(*rows, -1)


def rank_weights(shapes: AdapterShapes, memory: Tensor, split: SplitModel, rank: int) -> AdapterWeights:
    """Return a rank's part of an adapter in a memory that SharedAdapterMemory has filled."""
    pairs, rows, empty = {}, {}, torch.empty(0, device="meta")
    for name, count, rescales in shapes.pairs:
        inputs, outputs, *experts = split.whole[name]
        rows[name] = (*experts, count)
        a, b = empty.new_empty(*rows[name], inputs), empty.new_empty(*rows[name], outputs)
        change = Rescale(empty.new_empty(outputs), empty.new_empty(outputs)) if rescales else None
        pairs[name] = _Layer(split, name).beside(LoraPair(a, b, change))
    own_shapes = {name: torch.empty(shape, device="meta") for name, shape in shapes.own}
    largest = max(count for _, count, _ in shapes.pairs)
    flat = packed_views(AdapterWeights(pairs, largest, own_shapes), memory)
    own = {name: _Layer(split, name).of(pair, rows[name], rank) for name, pair in flat.pairs.items()}
    return AdapterWeights(own, largest, flat.own)


class SharedMemory:
    """Memory that a file without a name holds: other processes map it by the file's descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make a new one, or take a descriptor."""
        if descriptor is None:
            # In memory where the system can: Docker's /dev/shm has 64 MB.
            if sys.platform == "linux":
                descriptor = os.memfd_create("adapter")
            else:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
        self.descriptor = descriptor

    def resize(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """Give it room for so many numbers; returns these, which are 0."""
        os.ftruncate(self.descriptor, numbers * dtype.itemsize)
        return self.numbers(dtype)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return its numbers; they stay as long as the tensor."""
        return torch.frombuffer(mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size), dtype=dtype)

    def __del__(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class SharedAdapter(PackedAdapter):
    """An adapter in shared memory, or a copy of that on the device; `weights` are rank 0's."""

    shapes: AdapterShapes
    shared: SharedMemory


# Tells the other ranks what to put into a slot.
SendAdapter = Callable[[AdapterShapes, SharedMemory, int], None]


class SharedAdapterMemory(TorchAdapterMemory):
    """The adapters of a split model, as rank 0 has them. Their bytes are those of all ranks."""

    def __init__(
        self,
        split: SplitModel,
        send: SendAdapter,
        read: Callable[[AdapterSource], AdapterWeights],
        install: Callable[[AdapterWeights, int], None],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(read, install, device, dtype)
        self._split, self._send = split, send

    def read(self, source: AdapterSource) -> SharedAdapter:
        """See TorchAdapterMemory."""
        weights, shared = self._read(source), SharedMemory()
        if end := next((name for name in weights.own if name in self._split.whole), ""):
            raise MismatchError(SAVED_FIELD, f"an adapter's own {end} is not served with --tensor-parallel")
        pairs = {name: _Layer(self._split, name).beside(pair) for name, pair in weights.pairs.items()}
        parted = AdapterWeights(pairs, weights.rank, weights.own)
        packed = pack_adapter(parted, self._dtype, lambda numbers: shared.resize(numbers, self._dtype))
        return self._shared(AdapterShapes.of(weights), packed.memory, shared)

    def transfer(self, prepared: PackedAdapter) -> SharedAdapter:
        """See TorchAdapterMemory."""
        assert self._staging is not None, "the memory says that it transfers"
        assert isinstance(prepared, SharedAdapter), "what `read` returns"
        return self._shared(prepared.shapes, self._staging.copy(prepared.memory), prepared.shared)

    def install(self, prepared: PackedAdapter, slot: int) -> None:
        """See TorchAdapterMemory."""
        assert isinstance(prepared, SharedAdapter), "what `read` and `transfer` return"
        self._send(prepared.shapes, prepared.shared, slot)
        super().install(prepared, slot)

    def _shared(self, shapes: AdapterShapes, memory: Tensor, shared: SharedMemory) -> SharedAdapter:
        return SharedAdapter(rank_weights(shapes, memory, self._split, 0), memory, shapes, shared)


class RankAdapters:
    """The slots of a rank from 1 on, into which rank 0 says what goes."""

    def __init__(self, loaded: LoadedBase, layers: AdapterLayers) -> None:
        assert loaded.split is not None, "a split model's"
        self._split, self._layers, self._dtype = loaded.split, layers, loaded.dtype
        self._staging = Staging(loaded.device) if loaded.device.type == "cuda" else None

    def install(self, shapes: AdapterShapes, shared: SharedMemory, slot: int) -> None:
        """Put an adapter into a slot; on CUDA the next step waits for the copy."""
        memory = shared.numbers(self._dtype)
        if self._staging is not None:
            memory = self._staging.copy(memory)
        self._layers.install(rank_weights(shapes, memory, self._split, self._split.group.rank), slot)
        if memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))
