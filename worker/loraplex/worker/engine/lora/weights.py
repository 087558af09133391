"""Reads adapters from directories in peft's layout, checked against the model, and brings them to the device.

Tensors are views of the mapped safetensors file: only the pages that are used are read. DoRA (arXiv 2402.09353) becomes
a plain LoRA pair plus a gain and a shift per output, so that any batch can mix it:

    m / ||W + BA|| * (W x + B A x) + bias  =  y + gain * y + shift + B' A x        y = W x + bias, the base output

with gain = m / ||W + BA|| - 1, B' = (1 + gain) B and shift = -gain * bias. Each norm is over one output's weights,
and needs no copy of W: ||W + BA||^2 = ||W||^2 + 2 (W A^T) . B + B (A A^T) B^T, where the base layer computes W A^T.

On its way each adapter is one contiguous buffer in host memory. Tensors are cast to the model's dtype while they are
copied there, and their values are checked. On CUDA the buffer is copied to the device through staging memory, on a
stream of its own; only the loader thread waits for the transfer, so steps go on. The copy into a slot is on the device,
on the steps' stream, behind all steps launched before it, so that no step sees its slot change. On the CPU nothing is
copied into a slot: the slot holds the addresses in host memory, and a reference that keeps the buffer alive.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.adapter_files import AdapterFiles, read_adapter_files
from loraplex.contracts.artifacts.checkpoint import TensorInfo
from loraplex.contracts.artifacts.experts import ExpertSizes
from loraplex.contracts.artifacts.families import is_embedding
from loraplex.contracts.artifacts.peft_config import TOKENS_FIELD
from loraplex.contracts.artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE, tensor_names
from loraplex.worker.engine.device import Staging, dtype_name, host_adapter_bytes, prepare_loader
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine_api import AdapterSource, EngineConfig


@dataclass(frozen=True, slots=True)
class Rescale:
    """A DoRA adapter's change of the base layer's output y: y + gain * y + shift, both [out_features]."""

    gain: Tensor
    shift: Tensor


def dora_rescale(base: ModelLayers, module: str, a: Tensor, b: Tensor, magnitude: Tensor) -> Rescale:
    """Compute the gain and shift of a DoRA adapter, in float32.

    a [rank, in_features]; b [out_features, rank], scaled by alpha / rank; magnitude [out_features]. The formula is that
    of peft's lora/dora.py.
    """
    own, crossed = base.squares(module).double(), base.product(module, a).double()
    a, b = a.double(), b.double()
    added = (b @ (a @ a.t()) * b).sum(1)
    # Where BA nearly cancels W, rounding could make the square negative.
    norms = (own + 2 * (crossed.t() * b).sum(1) + added).clamp_(min=0).sqrt()
    gain = (magnitude.double() / norms - 1).float()
    bias = base.bias(module)
    return Rescale(gain, torch.zeros_like(gain) if bias is None else -gain * bias)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _map_tensors(path: Path, header: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return views of the file by tensor name; each keeps it mapped. Raises ArtifactError."""
    try:
        with open(path, "rb") as file:
            # torch requires writable memory. ACCESS_COPY gives it, and nothing is written to the file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ArtifactError(path.name, f"cannot be read: {error.strerror}") from error
    return {name: _view(mapped, info) for name, info in header.items()}


def _view(mapped: mmap.mmap, info: TensorInfo) -> Tensor:
    dtype, count = _DTYPES[info.dtype], math.prod(info.shape)
    if not count:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start).view(info.shape)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A module's A [rank, in_features] and B [rank, out_features]: the layer adds x A^T B; B contains the scaling.

    For token embeddings x is one-hot, in_features the vocabulary. Of a layer's experts each has a pair: A and B begin
    with a dimension for them. `rescale` is set for DoRA (see above).
    """

    a: Tensor
    b: Tensor
    rescale: Rescale | None = None

    @property
    def rank(self) -> int:
        """Return the rank, of each expert where there are experts."""
        return self.a.shape[-2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors of the pair."""
        return (self.a, self.b) if self.rescale is None else (self.a, self.b, self.rescale.gain, self.rescale.shift)

    def add_to(self, out: Tensor, shrunk: Tensor) -> None:
        """Add the pair to the base output of one adapter's rows, in place.

        out [rows, out_features] is the base output; shrunk [rows, rank] is x A^T.
        """
        if self.rescale is not None:
            out.addcmul_(out, self.rescale.gain).add_(self.rescale.shift)
        out.addmm_(shrunk, self.b)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's pairs by module name; `rank` is the largest of their ranks.

    `own` are the parameters of its classification head, such as classifier.weight, and the weights [vocabulary, hidden
    size] that it has in place of the base's embeddings or output head, by module. With `trained_tokens` some of the
    pairs put rows in the place of the base's.
    """

    pairs: Mapping[str, LoraPair]
    rank: int
    own: Mapping[str, Tensor] = field(default_factory=dict)
    trained_tokens: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, the pairs' module by module, and then the others."""
        return [*(tensor for pair in self.pairs.values() for tensor in pair.tensors), *self.own.values()]


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


def read_source(
    source: AdapterSource, base: ModelLayers, max_rank: int, max_expert_rank: int | None = None
) -> AdapterWeights:
    """Read an adapter, or a weighted set of adapters as one whose A's and B's are concatenated: ranks add up.

    A set equals peft's add_weighted_adapter with combination_type "cat" (lora/model.py): the sum of
    weight * scaling * B A. Raises what read_adapter raises.
    """
    adapters = [read_adapter(part.directory, base, max_rank, part.weight, max_expert_rank) for part in source.summands]
    if source.parts and any(pair.rescale for adapter in adapters for pair in adapter.pairs.values()):
        raise MismatchError("adapters", "one of them is a DoRA adapter, whose change of the base is no sum of others")
    if source.parts and any(adapter.own for adapter in adapters):
        raise MismatchError("adapters", "one of them has a head or embeddings of its own, which are no sum of others")
    if source.parts and any(adapter.trained_tokens for adapter in adapters):
        raise MismatchError("adapters", "one of them has trained tokens, whose embeddings are no sum of others")
    if len(adapters) == 1:
        return adapters[0]
    pairs: dict[str, LoraPair] = {}
    for module in dict.fromkeys(module for adapter in adapters for module in adapter.pairs):
        parts = [adapter.pairs[module] for adapter in adapters if module in adapter.pairs]
        pair = LoraPair(torch.cat([part.a for part in parts], -2), torch.cat([part.b for part in parts], -2))
        what = f"their ranks at {module} add up to"
        _check_rank("adapters", what, pair.rank, max_rank, max_expert_rank if pair.a.dim() == 3 else None)
        pairs[module] = pair
    return AdapterWeights(pairs, max(pair.rank for pair in pairs.values()))


def read_adapter(
    directory: str, base: ModelLayers, max_rank: int, weight: float = 1.0, max_expert_rank: int | None = None
) -> AdapterWeights:
    """Read an adapter of the base and scale its B's.

    Each A is a view of the mapped file, each B float32 and transposed; their values are checked by pack_adapter.
    `weight` is a factor of the whole adapter. Raises ArtifactError for broken files, MismatchError where the adapter
    does not fit the model or `max_rank` (of experts `max_expert_rank`, if set).
    """
    path, modules = Path(directory), base.loaded.adaptable
    files = read_adapter_files(path, modules, base.loaded.module.config.model_type, ends=base.ends)
    experts = {name: sizes.experts for name, sizes in modules.items() if isinstance(sizes, ExpertSizes)}
    for module, rank in files.ranks.items():
        of_tokens = module in files.tokens
        field, and_tokens = (TOKENS_FIELD, " with its trained tokens") if of_tokens else (WEIGHTS_FILE, "")
        _check_rank(
            field, f"{module}{and_tokens} has rank", rank, max_rank, max_expert_rank if module in experts else None
        )
    tensors = _map_tensors(path / WEIGHTS_FILE, files.header)
    free = modules.keys() - files.ranks.keys()
    own = {**files.head, **_changed_copies(files.copies, tensors, free, base), **files.ends}
    pairs = _pairs(files, [name for name in files.shapes if name not in experts], tensors, weight, base)
    for module, trained in files.tokens.items():
        for changed in (module, *(base.tied_to(module) if len(files.tokens) == 1 else ())):
            pairs[changed] = _with_tokens(pairs.get(changed), base, changed, trained.ids, tensors[trained.tensor])
    return AdapterWeights(
        pairs | _expert_pairs(files, experts, tensors, weight),
        max(files.ranks.values()),
        {parameter: tensors[name] for parameter, name in own.items()},
        bool(files.tokens),
    )


def _changed_copies(
    copies: Mapping[str, str], tensors: Mapping[str, Tensor], free: Collection[str], base: ModelLayers
) -> dict[str, str]:
    """Return those of check_copies that are not the base's own: the tensors by the modules that they replace.

    `free` are the modules that they may replace. Raises MismatchError for another one.
    """
    changed: dict[str, str] = {}
    for name, parameter in copies.items():
        if base.repeats(parameter, tensors[name]):
            continue
        module = parameter.removesuffix(".weight")
        if name != f"{TENSOR_PREFIX}{module}.weight" or module not in free:
            raise MismatchError(WEIGHTS_FILE, f"tensor {name} is not the model's own {parameter}")
        for replaced in (*base.tied_to(module), module):
            changed.setdefault(replaced, name)
    return changed


def _with_tokens(pair: LoraPair | None, base: ModelLayers, module: str, ids: Sequence[int], values: Tensor) -> LoraPair:
    """Return a module's pair that also puts rows of the embeddings, or of the head, in the place of the base's.

    One-hot rows choose the tokens, and the others have the difference to the base's rows: a pair whose rank is the
    number of tokens.
    """
    own = base.rows(module, ids)
    change, chosen = values.float() - own, torch.zeros(len(ids), base.vocabulary)
    chosen[torch.arange(len(ids)), torch.tensor(ids)] = 1
    embeds = is_embedding(module)
    a, b = (chosen, change * base.output_scale(module)) if embeds else (change, chosen)
    if pair is None:
        return LoraPair(a, b)
    if pair.rescale is not None:
        raise MismatchError(TOKENS_FIELD, f"{module} has DoRA too, which would scale the trained tokens")
    return LoraPair(torch.cat([pair.a.float(), a]), torch.cat([pair.b, b]))


def _pairs(
    files: AdapterFiles, modules: Sequence[str], tensors: Mapping[str, Tensor], weight: float, base: ModelLayers
) -> dict[str, LoraPair]:
    if not modules:
        return {}
    names = {module: tensor_names(module) for module in modules}
    scales = [weight * files.config.scaling_of(module, files.shapes[module].rank) for module in modules]
    # One call for all tensors: for a small adapter the calls cost more than the arithmetic.
    scaled = torch._foreach_mul([tensors[names[module]["B"]].float() for module in modules], scales)
    pairs = {}
    for module, b in zip(modules, scaled, strict=True):
        a, change = tensors[names[module]["A"]], None
        if files.config.use_dora:
            change = dora_rescale(base, module, a, b, tensors[names[module]["magnitude"]])
            b.mul_(1 + change.gain[:, None])
        if is_embedding(module):
            b.mul_(base.output_scale(module))
        pairs[module] = LoraPair(a, b.t(), change)
    return pairs


def _expert_pairs(
    files: AdapterFiles, experts: Mapping[str, int], tensors: Mapping[str, Tensor], weight: float
) -> dict[str, LoraPair]:
    """Return the pairs of `experts`, numbers by name. An old peft's A is for the outputs, and its B for the inputs."""
    pairs = {}
    for module, (rank, _, _) in files.shapes.items():
        if module not in experts:
            continue
        names, count = tensor_names(module), experts[module]
        # peft's rows of A are one expert's after the other's, its columns of B one rank's after the other's.
        first = tensors[names["A"]].view(count, rank, -1)
        second = tensors[names["B"]].view(-1, rank, count).permute(2, 1, 0)
        a, b = (second, first) if module in files.former else (first, second)
        pairs[module] = LoraPair(a, b.float() * (weight * files.config.scaling_of(module, rank)))
    return pairs


def _check_rank(field: str, what: str, rank: int, max_rank: int, max_expert_rank: int | None) -> None:
    """Raise MismatchError for a rank beyond the engine's; `max_expert_rank` is None where it is not of experts."""
    limit, flag = (max_rank, "--max-rank") if max_expert_rank is None else (max_expert_rank, "--max-expert-rank")
    if rank > limit:
        raise MismatchError(field, f"{what} {rank}; this engine takes {limit} ({flag})")


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
    """Implements loraplex.worker.engine.scheduling.adapter_tiers.AdapterMemory for torch models.

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
        self._staging = Staging(device) if self.transfers else None

    def read(self, source: AdapterSource) -> PackedAdapter:
        """Read an adapter from its files into host memory."""
        return pack_adapter(self._read(source), self._dtype)

    def transfer(self, prepared: PackedAdapter) -> PackedAdapter:
        """Copy an adapter to the device and wait for the transfer."""
        assert self._staging is not None, "the memory says that it transfers"
        memory = self._staging.copy(prepared.memory)
        return PackedAdapter(packed_views(prepared.weights, memory), memory)

    def install(self, prepared: PackedAdapter, slot: int) -> None:
        """Put an adapter into a slot."""
        self._install(prepared.weights, slot)
        if prepared.memory.is_cuda:
            # The buffer belongs to the transfer stream's allocator: keep it until this stream has copied from it.
            prepared.memory.record_stream(torch.cuda.current_stream(self._device))

    def size(self, prepared: PackedAdapter) -> int:
        """Return the buffer's bytes: cast to the model's dtype, and padded to the alignment."""
        return prepared.memory.nbytes


# Makes an adapter memory, of what TorchAdapterMemory takes.
MakeMemory = Callable[
    [Callable[[AdapterSource], AdapterWeights], Callable[[AdapterWeights, int], None], torch.device, torch.dtype],
    TorchAdapterMemory,
]


def adapter_memory(
    base: ModelLayers,
    max_rank: int,
    *installs: Callable[[AdapterWeights, int], None],
    max_expert_rank: int | None = None,
    make: MakeMemory = TorchAdapterMemory,
) -> TorchAdapterMemory:
    """Return the memory of a loaded model's adapters; `installs` put one into a slot."""

    def read(source: AdapterSource) -> AdapterWeights:
        return read_source(source, base, max_rank, max_expert_rank)

    def install(weights: AdapterWeights, slot: int) -> None:
        for into in installs:
            into(weights, slot)

    return make(read, install, base.loaded.device, base.loaded.dtype)


def adapter_cache(
    base: ModelLayers,
    config: EngineConfig,
    on_loaded: Callable[[], None],
    *installs: Callable[[AdapterWeights, int], None],
    make: MakeMemory = TorchAdapterMemory,
) -> AdapterCache[PackedAdapter]:
    """Return the adapter cache of an engine; `on_loaded` is called from a loader thread."""
    of_experts = config.max_expert_rank if base.loaded.device.type == "cuda" else None
    memory = adapter_memory(base, config.max_rank, *installs, max_expert_rank=of_experts, make=make)
    loads = LoaderThreads[PackedAdapter](on_loaded, prepare=partial(prepare_loader, base.loaded.device))
    return AdapterCache(
        config.adapter_slots, memory, loads, host_adapter_bytes(config.host_adapter_bytes, base.loaded.device)
    )


def pack_adapter(
    weights: AdapterWeights, dtype: torch.dtype, allocate: Callable[[int], Tensor] | None = None
) -> PackedAdapter:
    """Copy an adapter into one host buffer: a new one, or zeros of `allocate`, which takes their number.

    Raises ArtifactError for values that are not finite or too large.
    """
    tensors = weights.tensors
    numbers = sum(sum(_padded_size(tensor, dtype)) for tensor in tensors)
    memory = allocate(numbers) if allocate else torch.zeros(numbers, dtype=dtype)
    packed = packed_views(weights, memory)
    torch._foreach_copy_(packed.tensors, tensors)
    if not _usable(memory):
        tensors_of = {name: pair.tensors for name, pair in packed.pairs.items()}
        tensors_of |= {name: (tensor,) for name, tensor in packed.own.items()}
        modules = (name for name, own in tensors_of.items() if not all(map(_usable, own)))
        raise ArtifactError(
            WEIGHTS_FILE,
            f"{next(modules)} has values that are not finite, or beyond {_LARGEST:g}, in {dtype_name(dtype)}",
        )
    return PackedAdapter(packed, memory)


def packed_views(like: AdapterWeights, memory: Tensor) -> AdapterWeights:
    """Return views of `memory` with the shapes of the adapter's tensors, one after the other."""
    sizes = [size for tensor in like.tensors for size in _padded_size(tensor, memory.dtype)]
    places = iter(memory.split_with_sizes(sizes)[::2])

    def view(tensor: Tensor) -> Tensor:
        return next(places).view(tensor.shape)

    def views(pair: LoraPair) -> LoraPair:
        a, b, change = view(pair.a), view(pair.b), pair.rescale
        return LoraPair(a, b, None if change is None else Rescale(view(change.gain), view(change.shift)))

    pairs = {name: views(pair) for name, pair in like.pairs.items()}
    return AdapterWeights(pairs, like.rank, {name: view(tensor) for name, tensor in like.own.items()})


def _padded_size(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return a tensor's number of elements, and the number of padding elements behind it that align the next tensor."""
    return tensor.numel(), -tensor.numel() % (_ALIGNMENT // dtype.itemsize)


def _usable(numbers: Tensor) -> bool:
    """Tell whether all values are finite and within the bound."""
    # Compared as Python floats: in float16 the bound would be infinite. Comparisons with NaN are false.
    low, high = (bound.item() for bound in numbers.aminmax())
    return low >= -_LARGEST and high <= _LARGEST
