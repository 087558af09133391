"""`loraplex plan`: the memory that a model takes, and how much fits, from its headers, without loading it.

KV per token = 2 (keys and values) x layers x KV heads x head size x bytes of a number.
In int8 a head takes its size and 4 bytes. Of a divided model all sizes are those of a rank, the largest one's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.artifacts.base_modules import LinearWeight, model_bytes, read_weights
from loraplex.contracts.artifacts.checkpoint import read_checkpoint
from loraplex.contracts.artifacts.encoders import ENCODERS, inner_weights
from loraplex.contracts.artifacts.families import KV_CACHE_HELP, KvShape, check_kv_cache_dtype, is_inner, kv_shape
from loraplex.contracts.artifacts.gguf_files import refuse_gguf
from loraplex.contracts.artifacts.quantization import FLAG_HELP as QUANTIZE_HELP
from loraplex.contracts.artifacts.quantization import parse_quantization, stored_scheme
from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.worker.sizing import DTYPE_BYTES, available_host_bytes, cpu_dtype, own_dtype, slot_numbers

# Share of the memory that the weights leave free; the rest is for activations and everything else on the device.
USABLE = 0.9
# Names of the layers whose outputs are the keys and values of a rank's heads.
_KEY_LAYERS = ("k_proj", "kv_b_proj", "qkv_proj", "query_key_value")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


TENSOR_PARALLEL_HELP = "number of devices that share the model's weights"
MAX_EXPERT_RANK_HELP = "maximum rank of adapters of experts on CUDA, which take memory per expert; 0: none"
MEMORY_HELP = "the memory of a device, such as 80GiB"


@dataclass(frozen=True)
class PlanSettings:
    """Says what a model takes, and how many sequences and adapters fit, without loading it."""

    model: str = setting("a transformers directory")
    context: int = setting("tokens of prompt and answer together", 4096, least=1)
    batch: int = setting("sequences at once", 32, least=1)
    adapters: int = setting("adapters on the device at once", 64, least=0)
    rank: int = setting("the rank of each, on every linear layer", 16, least=0)
    dtype: str = setting("auto, float32, bfloat16 or float16", "auto")
    quantize: str = setting(QUANTIZE_HELP, "")
    kv_cache_dtype: str = setting(KV_CACHE_HELP, "")
    tensor_parallel: int = setting(f"{TENSOR_PARALLEL_HELP}; the sizes are then those of one device", 1, least=1)
    max_expert_rank: int = setting(MAX_EXPERT_RANK_HELP, 0, least=0)
    memory: str = setting(f"{MEMORY_HELP}; empty: what this machine has available", "")
    json: bool = setting("print one JSON object", False)
    cluster: bool = setting("plan a whole cluster for a load: `loraplex plan --cluster --help`", False)

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError, or ArtifactError for a scheme or the KV cache's dtype."""
        check_bounds(self)
        parse_quantization(self.quantize)
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise ValueError(f"--dtype {self.dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")


@dataclass(frozen=True)
class MemoryPlan:
    """All sizes in bytes. `sequences_fit` counts sequences of the whole context beside weights and adapter slots.

    `adapters_fit` counts adapter slots beside weights and the batch. `needed_bytes` has all of these, and `spare_bytes`
    for activations and everything else on the device.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    # Tokens of a sequence: what was asked for, and at most the model's own context.
    context: int
    batch: int
    adapters: int
    # The scheme of the weights; empty: they are in `dtype`.
    quantization: str
    # The KV cache's dtype; empty: it is in `dtype`.
    kv_cache_dtype: str
    # Ranks that the model is divided among; all sizes but those of host memory are those of one.
    tensor_parallel: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_bytes: int
    adapter_bytes: int
    adapter_slots_bytes: int
    spare_bytes: int
    needed_bytes: int
    memory_bytes: int
    sequences_fit: int
    adapters_fit: int
    # Rules of thumb for buying: weights in 16 bits, or quantized, x 1.25, better x 1.5; twice that of host memory. None
    # is less than what is needed.
    device_at_least_bytes: int
    device_recommended_bytes: int
    host_recommended_bytes: int


class RankParts(Protocol):
    """The parts of a model that one of several ranks has: loraplex.worker.engine.parallel.splits.RankPlan."""

    def split(self, name: str, outputs: int, inputs: int) -> Any:
        """Return the part of a linear layer, a Split; None: all of it."""

    def split_experts(self, name: str, outputs: int, inputs: int) -> Any:
        """Return the part of each expert of a tensor, a Split; None: all of it."""

    def part(self, name: str, shape: Sequence[int]) -> Any:
        """Return the part of a checkpoint's tensor, a Part; None: all of it."""


# Divides a model among ranks, by the number of columns that share a scale of quantized weights (0: all, or none).
Divide = Callable[[int], Sequence[RankParts]]


def plan(settings: PlanSettings, divide: Divide = lambda columns: ()) -> MemoryPlan:
    """Compute the plan; `divide` gives the parts of the ranks, where there are several.

    Raises ArtifactError for a model that can't be read, ValueError for a bad memory size, and what `divide` raises.
    """
    refuse_gguf("--model", settings.model)
    if not Path(settings.model).is_dir():
        raise ArtifactError("--model", f"{settings.model!r} is not a directory; a model is a transformers directory")
    base = read_base_model(settings.model, quantize=settings.quantize, kv_cache_dtype=settings.kv_cache_dtype)
    config = json.loads(base.files["config.json"])
    checkpoint = read_checkpoint(Path(settings.model))
    dtype = _dtype(settings, config, next(tensor.dtype for _, tensor in checkpoint.tensors.values()))
    width = DTYPE_BYTES[dtype]
    encoder = ENCODERS.get(base.architecture)
    read = inner_weights(checkpoint, encoder) if encoder else read_weights(config, checkpoint)
    scheme, stored = parse_quantization(settings.quantize), stored_scheme(config)
    chosen = stored.quantization if stored else scheme
    parameters, whole = model_bytes(checkpoint, read, scheme, width)
    ranks = divide(chosen.group if chosen else 0)
    weights = max(
        (model_bytes(checkpoint, _weights_of(rank, read), scheme, width, _shape_of(rank))[1] for rank in ranks),
        default=whole,
    )
    # An encoder keeps nothing of a text.
    kept = None if encoder else _kv_of(ranks, kv_shape(config), read)
    per_token = kept.token_bytes(width, settings.kv_cache_dtype) if kept else 0
    adapter = max(_adapter_numbers(base, settings, rank) for rank in (ranks or (None,))) * width
    # The ranks on this machine's CPU share its memory.
    memory = parse_bytes(settings.memory) if settings.memory else available_host_bytes() // settings.tensor_parallel
    usual = whole if base.quantization else 2 * parameters
    usual_of_rank = math.ceil(usual * weights / whole)
    slots = settings.adapters * adapter
    context = min(settings.context, base.context_length)
    per_sequence = per_token * context
    usable = int((memory - weights) * USABLE)
    beside = slots + per_sequence * settings.batch
    spare = math.ceil(beside / USABLE) - beside
    needed = weights + beside + spare
    return MemoryPlan(
        model=base.name,
        architecture=base.architecture,
        parameters=parameters,
        dtype=dtype,
        context=context,
        batch=settings.batch,
        adapters=settings.adapters,
        quantization=base.quantization,
        kv_cache_dtype=base.kv_cache_dtype,
        tensor_parallel=settings.tensor_parallel,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_bytes_per_sequence=per_sequence,
        kv_bytes=per_sequence * settings.batch,
        adapter_bytes=adapter,
        adapter_slots_bytes=slots,
        spare_bytes=spare,
        needed_bytes=needed,
        memory_bytes=memory,
        sequences_fit=_fit(usable - slots, per_sequence, settings.batch),
        adapters_fit=_fit(usable - per_sequence * settings.batch, adapter, settings.adapters),
        device_at_least_bytes=max(math.ceil(usual_of_rank * 1.25), needed),
        device_recommended_bytes=max(math.ceil(usual_of_rank * 1.5), math.ceil(needed * 1.2)),
        host_recommended_bytes=max(math.ceil(usual * 3), needed * settings.tensor_parallel),
    )


def _weights_of(rank: RankParts, weights: Mapping[str, LinearWeight]) -> dict[str, LinearWeight]:
    """Return a rank's parts of the linear layers by name; token embeddings are whole."""
    parts = {}
    for name, weight in weights.items():
        split = None if weight.is_embedding else rank.split(name, weight.out_features, weight.in_features)
        inputs, outputs = _sizes(split, weight.in_features, weight.out_features)
        parts[name] = replace(weight, in_features=inputs, out_features=outputs)
    return parts


def _shape_of(rank: RankParts) -> Callable[[str, Sequence[int]], Sequence[int]]:
    def shape_of(tensor: str, shape: Sequence[int]) -> Sequence[int]:
        part = rank.part(tensor, shape)
        own: Sequence[int] = shape if part is None else part.shape(shape)
        return own

    return shape_of


def _sizes(split: Any, inputs: int, outputs: int) -> tuple[int, int]:
    """Return the in_features and out_features of a rank's part of a layer."""
    if split is None:
        return inputs, outputs
    if split.outputs is not None:
        return inputs, sum(stop - first for first, stop in split.outputs)
    first, stop = split.inputs
    return stop - first, outputs


def _kv_of(ranks: Sequence[RankParts], shape: KvShape, weights: Mapping[str, LinearWeight]) -> KvShape:
    """Return the keys and values of a rank: all heads where each rank attends with all."""
    layers = ((name, weight) for name, weight in weights.items() if name.rpartition(".")[2] in _KEY_LAYERS)
    name, weight = next(layers, ("", None))
    if not ranks or weight is None:
        return shape
    split = ranks[0].split(name, weight.out_features, weight.in_features)
    if split is None or split.gathers:
        return shape
    _, outputs = _sizes(split, weight.in_features, weight.out_features)
    return replace(shape, kv_heads=shape.kv_heads * outputs // weight.out_features)


def _adapter_numbers(base: BaseModel, settings: PlanSettings, rank: RankParts | None) -> int:
    """Return how many numbers a slot has: those of all inner linear layers, and of experts where slots are for them."""
    layers = []
    for module in filter(lambda module: is_inner(module.name), base.modules):
        split = None
        if rank is not None:
            divide = rank.split_experts if module.experts else rank.split
            split = divide(module.name, module.out_features, module.in_features)
        layers.append((*_sizes(split, module.in_features, module.out_features), module.experts))
    return slot_numbers(layers, settings.rank, settings.max_expert_rank)


def _fit(room: int, size: int, count: int) -> int:
    """Return how many things of a size fit; of things that take nothing, as many as wanted."""
    if room < 0:
        return 0
    return room // size if size else count


def as_json(result: Any) -> str:
    """Render a plan, of a device or a cluster, as one JSON object."""
    return json.dumps(asdict(result))


def as_lines(result: MemoryPlan) -> str:
    """Render the plan for people: a name and a value a line."""
    verdict = "fits" if result.needed_bytes <= result.memory_bytes else "does not fit"
    missing = result.needed_bytes - result.memory_bytes
    rows = {
        "model": f"{result.model} ({result.architecture}), {_parameters(result.parameters)} parameters, {result.dtype}",
        "ranks": f"{result.tensor_parallel}, each on a device with these sizes",
        "weights": shown(result.weight_bytes) + (f" in {result.quantization}" if result.quantization else ""),
        "KV per token": shown(result.kv_bytes_per_token)
        + (f" in {result.kv_cache_dtype}" if result.kv_cache_dtype else ""),
        "KV per sequence": f"{shown(result.kv_bytes_per_sequence)} for {result.context:,} tokens",
        "KV of the batch": f"{shown(result.kv_bytes)} for {result.batch} sequences",
        "adapter": shown(result.adapter_bytes),
        "adapter slots": f"{shown(result.adapter_slots_bytes)} for {result.adapters} adapters",
        "spare": f"{shown(result.spare_bytes)} for activations and everything else",
        "needed": f"{shown(result.needed_bytes)}: weights, batch, slots and spare",
        "memory": f"{shown(result.memory_bytes)}: {verdict}" + (f", {shown(missing)} missing" if missing > 0 else ""),
        "sequences that fit": f"{result.sequences_fit}, beside {result.adapters} adapters",
        "adapters that fit": f"{result.adapters_fit}, beside {result.batch} sequences",
        "rule of thumb": f"a device of {shown(result.device_at_least_bytes)}, better "
        f"{shown(result.device_recommended_bytes)}; {shown(result.host_recommended_bytes)} of host memory",
    }
    if result.tensor_parallel == 1:
        del rows["ranks"]
    return "\n".join(f"{name:20}{value}" for name, value in rows.items())


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _dtype(settings: PlanSettings, config: Mapping[str, Any], stored: str) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    own = own_dtype(config, stored)
    if own not in DTYPE_BYTES:
        raise ArtifactError("config.json", f"dtype {own!r} is not supported; say --dtype {', '.join(DTYPE_BYTES)}")
    # Without a device's memory the plan is for this machine's CPU.
    return own if settings.memory else cpu_dtype(own)


def parse_bytes(text: str) -> int:
    """Parse a size of memory. Raises ValueError."""
    number = text.lower().removesuffix("b")
    for unit in sorted(_UNITS, key=len, reverse=True):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), _UNITS[unit]
            break
    else:
        factor = 1
    try:
        value = int(float(number) * factor)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"--memory {text}: not a size such as 80GiB or 24GB")
    return value


def shown(count: int) -> str:
    """Render a number of bytes."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
