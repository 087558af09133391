"""`python -m worker plan`: the memory that a model takes, and how much fits, from its headers, without loading it.

KV per token = 2 (keys and values) x layers x KV heads x head size x bytes of a number.
In int8 a head takes its size and 4 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artifacts import ArtifactError
from artifacts.base_model import BaseModel, read_base_model
from artifacts.base_modules import model_bytes, read_weights
from artifacts.checkpoint import read_checkpoint
from artifacts.encoders import ENCODERS, inner_weights
from artifacts.families import KV_CACHE_HELP, check_kv_cache_dtype, is_inner, kv_shape
from artifacts.quantization import FLAG_HELP as QUANTIZE_HELP
from artifacts.quantization import parse_quantization
from rpc.settings import check_bounds, setting
from worker.sizing import DTYPE_BYTES, available_host_bytes, cpu_dtype, own_dtype

# Share of the memory that the weights leave free; the rest is for activations and everything else on the device.
USABLE = 0.9
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


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
    memory: str = setting("the device's memory, such as 80GiB; empty: what this machine has available", "")

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError, or ArtifactError for a scheme or the KV cache's dtype."""
        check_bounds(self)
        parse_quantization(self.quantize)
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise ValueError(f"--dtype {self.dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")


@dataclass(frozen=True)
class Plan:
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


def plan(settings: PlanSettings) -> Plan:
    """Compute the plan. Raises ArtifactError for a model that can't be read, ValueError for a bad memory size."""
    if not Path(settings.model).is_dir():
        raise ArtifactError("--model", f"{settings.model!r} is not a directory; a model is a transformers directory")
    base = read_base_model(settings.model, quantize=settings.quantize, kv_cache_dtype=settings.kv_cache_dtype)
    config = json.loads(base.files["config.json"])
    checkpoint = read_checkpoint(Path(settings.model))
    dtype = _dtype(settings, config, next(tensor.dtype for _, tensor in checkpoint.tensors.values()))
    width = DTYPE_BYTES[dtype]
    encoder = ENCODERS.get(base.architecture)
    read = inner_weights(checkpoint, encoder) if encoder else read_weights(config, checkpoint)
    parameters, weights = model_bytes(checkpoint, read, parse_quantization(settings.quantize), width)
    # An encoder keeps nothing of a text.
    per_token = 0 if encoder else kv_shape(config).token_bytes(width, settings.kv_cache_dtype)
    adapter = settings.rank * _features(base) * width
    memory = _parse_bytes(settings.memory) if settings.memory else available_host_bytes()
    usual = weights if base.quantization else 2 * parameters
    slots = settings.adapters * adapter
    context = min(settings.context, base.context_length)
    per_sequence = per_token * context
    usable = int((memory - weights) * USABLE)
    beside = slots + per_sequence * settings.batch
    spare = math.ceil(beside / USABLE) - beside
    needed = weights + beside + spare
    return Plan(
        model=base.name,
        architecture=base.architecture,
        parameters=parameters,
        dtype=dtype,
        context=context,
        batch=settings.batch,
        adapters=settings.adapters,
        quantization=base.quantization,
        kv_cache_dtype=base.kv_cache_dtype,
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
        device_at_least_bytes=max(math.ceil(usual * 1.25), needed),
        device_recommended_bytes=max(math.ceil(usual * 1.5), math.ceil(needed * 1.2)),
        host_recommended_bytes=max(math.ceil(usual * 3), needed),
    )


def _fit(room: int, size: int, count: int) -> int:
    """Return how many things of a size fit; of things that take nothing, as many as wanted."""
    if room < 0:
        return 0
    return room // size if size else count


def as_json(result: Plan) -> str:
    """Render the plan as one JSON object."""
    return json.dumps(asdict(result))


def as_lines(result: Plan) -> str:
    """Render the plan for people: a name and a value a line."""
    verdict = "fits" if result.needed_bytes <= result.memory_bytes else "does not fit"
    missing = result.needed_bytes - result.memory_bytes
    rows = {
        "model": f"{result.model} ({result.architecture}), {_parameters(result.parameters)} parameters, {result.dtype}",
        "weights": _shown(result.weight_bytes) + (f" in {result.quantization}" if result.quantization else ""),
        "KV per token": _shown(result.kv_bytes_per_token)
        + (f" in {result.kv_cache_dtype}" if result.kv_cache_dtype else ""),
        "KV per sequence": f"{_shown(result.kv_bytes_per_sequence)} for {result.context:,} tokens",
        "KV of the batch": f"{_shown(result.kv_bytes)} for {result.batch} sequences",
        "adapter": _shown(result.adapter_bytes),
        "adapter slots": f"{_shown(result.adapter_slots_bytes)} for {result.adapters} adapters",
        "spare": f"{_shown(result.spare_bytes)} for activations and everything else",
        "needed": f"{_shown(result.needed_bytes)}: weights, batch, slots and spare",
        "memory": f"{_shown(result.memory_bytes)}: {verdict}" + (f", {_shown(missing)} missing" if missing > 0 else ""),
        "sequences that fit": f"{result.sequences_fit}, beside {result.adapters} adapters",
        "adapters that fit": f"{result.adapters_fit}, beside {result.batch} sequences",
        "rule of thumb": f"a device of {_shown(result.device_at_least_bytes)}, better "
        f"{_shown(result.device_recommended_bytes)}; {_shown(result.host_recommended_bytes)} of host memory",
    }
    return "\n".join(f"{name:20}{value}" for name, value in rows.items())


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _features(base: BaseModel) -> int:
    """Return how many numbers one rank of an adapter on every linear layer has."""
    linears = (module for module in base.modules if is_inner(module.name) and not module.experts)
    return sum(module.in_features + module.out_features for module in linears)


def _dtype(settings: PlanSettings, config: Mapping[str, Any], stored: str) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    own = own_dtype(config, stored)
    if own not in DTYPE_BYTES:
        raise ArtifactError("config.json", f"dtype {own!r} is not supported; say --dtype {', '.join(DTYPE_BYTES)}")
    # Without a device's memory the plan is for this machine's CPU.
    return own if settings.memory else cpu_dtype(own)


def _parse_bytes(text: str) -> int:
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


def _shown(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
