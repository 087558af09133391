"""The schemes of quantized weights, the digest of a quantized base, and checkpoints that come quantized.

    int8              a scale for each output          int4, int4-64, int4-128  scale and zero for 32, 64 or 128 columns
    int8-zero-point   a scale and a zero for each      fp8                      8 bits of floating point, on CUDA
    int8-dynamic, int4-dynamic   int8 and int4, inputs rounded to 8 bits, a scale for 128 columns of each row, on a CPU

The inner linear layers are quantized; with `+embeddings`, as in `int8+embeddings`, so are token embeddings and output
head. A weight X of a quantized checkpoint is made up of these tensors:

    compressed-tensors   X.weight_packed (int32 along the columns) or X.weight (int8, float8), X.weight_scale,
                         X.weight_zero_point
    awq, gptq            X.qweight, X.scales, X.qzeros: of the transposed weight

Copies of 4 bits that are written here are compressed-tensors whose `format` is EIGHTHS, which other programs refuse:
X.weight_zero_point is uint8 [out, groups], in eighths of a code.

Other layouts are refused by the name of the field or tensor. worker/engine/quantized/ reads the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.checkpoint import Checkpoint, TensorInfo
from loraplex.contracts.artifacts.names import is_digest, sha256_json

FLAG_HELP = (
    "int8, int8-zero-point, int4, int4-64, int4-128, int8-dynamic or int4-dynamic (CPU) or fp8 (CUDA); "
    "+embeddings: these too; empty: as the files are"
)
_EMBEDDINGS, _DYNAMIC = "+embeddings", "-dynamic"
# Columns of a group of `int4`: with more the shipped model loses over 3% of perplexity: docs/results/quantization.md.
_INT4_GROUP = 32
# Bytes of a scale and of a zero point: bfloat16 and a byte for 4 bits with zero points, else float32.
_SCALE_BYTES, _ZERO_BYTES = 4, 4
_GROUP_BYTES = 3
_FIELD = "quantization_config"
_CONFIG = "config.json"
_FLOATS = ("F32", "BF16", "F16")
# The format of this project's copies of 4 bits: that of "pack-quantized" but for zero points.
EIGHTHS = "pack-quantized-zeros-in-eighths"
# The formats of compressed-tensors that are read; without a word on its activations a layer computes in floats.
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", EIGHTHS)
# Targets of compressed-tensors that stand for all layers of a class.
_CLASSES = frozenset({"Linear", "Embedding"})
# A copy's own name for its scheme; empty: it has none.
_COPY_NAME = re.compile(r"[a-z0-9.+-]{0,60}")
# Fields of compressed-tensors that change what the weights mean, or the model.
_UNREAD_FIELDS = ("kv_cache_scheme", "sparsity_config", "transform_config")
# The last parts of the names of tensors that only quantized layers have: each is read, or the model is refused.
_PARTS = frozenset((
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale",
    "qweight", "qzeros", "scales", "g_idx",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantization:
    """A scheme of weights. `group` is the number of columns that share a scale; 0: all columns of an output do.

    `dynamic`: inputs are rounded too, to 8 bits.
    """

    bits: int
    symmetric: bool
    group: int = 0
    floating: bool = False
    embeddings: bool = False
    dynamic: bool = False

    def __str__(self) -> str:
        """Return the scheme's name, as on command lines; a checkpoint may have one that has no name there."""
        name = "fp8" if self.floating else f"int{self.bits}"
        if self.bits == 8 and not self.symmetric:
            name += "-zero-point"
        if self.dynamic:
            name += _DYNAMIC
        if self.bits == 4 and self.symmetric:
            name += "-symmetric"
        if self.group != (_INT4_GROUP if self.bits == 4 else 0):
            name += f"-{self.group or 'channel'}"
        return name + (_EMBEDDINGS if self.embeddings else "")

    def canonical(self) -> dict[str, Any]:
        """Return the scheme as JSON for digests."""
        fields = {
            "bits": self.bits,
            "symmetric": self.symmetric,
            "group": self.group,
            "floating": self.floating,
            "embeddings": self.embeddings,
        } | ({"inputs": "int8, groups of 128"} if self.dynamic else {})
        # Scales were float32 before, and zero points whole codes: other weights of the same scheme.
        return fields | {"scales": "bfloat16", "zeros": "eighths"} if self.bits == 4 else fields

    def groups(self, in_features: int) -> int:
        """Return the number of scales of an output; the last group may be shorter."""
        return -(-in_features // self.group) if self.group else 1

    def weight_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes that a weight takes in memory."""
        of_group = _SCALE_BYTES if self.symmetric else _GROUP_BYTES if self.bits == 4 else _SCALE_BYTES + _ZERO_BYTES
        return out_features * (in_features * self.bits // 8 + self.groups(in_features) * of_group)


_SCHEMES = {
    "int8": Quantization(8, symmetric=True),
    "int8-zero-point": Quantization(8, symmetric=False),
    "int8-dynamic": Quantization(8, symmetric=True, dynamic=True),
    "int4": Quantization(4, symmetric=False, group=_INT4_GROUP),
    "int4-64": Quantization(4, symmetric=False, group=64),
    "int4-128": Quantization(4, symmetric=False, group=128),
    "int4-dynamic": Quantization(4, symmetric=False, group=_INT4_GROUP, dynamic=True),
    "fp8": Quantization(8, symmetric=True, floating=True),
}
# Names that are read too, and never written.
_OTHER_NAMES = {f"int4-{_INT4_GROUP}": "int4"}


def parse_quantization(text: str, field: str = "--quantize") -> Quantization | None:
    """Parse a scheme's name; an empty one is None. Raises ArtifactError with the field."""
    if not text:
        return None
    name = text.removesuffix(_EMBEDDINGS)
    scheme = _SCHEMES.get(_OTHER_NAMES.get(name, name))
    if scheme is None:
        raise ArtifactError(field, f"{text!r} is not one of {', '.join(_SCHEMES)}, each also with {_EMBEDDINGS}")
    return replace(scheme, embeddings=text.endswith(_EMBEDDINGS))


def check_device(scheme: Quantization | None, device: str) -> None:
    """Check that a device computes with a scheme. Raises ArtifactError."""
    on_cuda = device.partition(":")[0] == "cuda"
    if scheme is not None and scheme.floating and not on_cuda:
        raise ArtifactError("--quantize", f"{scheme} needs a CUDA device (--device cuda); on the CPU use int8")
    if scheme is not None and scheme.dynamic and on_cuda:
        raise ArtifactError("--quantize", f"{scheme} needs a CPU (--device cpu); on CUDA use int{scheme.bits}")


def calibrated_name(scheme: Quantization, bits: float) -> str:
    """Return the name of a calibrated scheme that takes at most so many bits for a weight: int4-64-calibrated-4.75."""
    return f"{replace(scheme, embeddings=False)}-calibrated-{bits:g}{_EMBEDDINGS if scheme.embeddings else ''}"


def quantized_digest(original: str, scheme: Quantization | None, kv_cache_dtype: str = "") -> str:
    """Return the digest of the base model that quantizing the original's weights makes, its KV cache, or both."""
    weights = {"quantization": scheme.canonical()} if scheme else {}
    return sha256_json({"original": original} | weights | ({"kv_cache": kv_cache_dtype} if kv_cache_dtype else {}))


class Method(Enum):
    """The layouts that are read, by `quant_method`."""

    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """The content of a `quantization_config`. `original` is the digest of the model that it was made of, if known.

    `others` are the schemes of layers that do not have `quantization`, each with its targets: names of layers, or
    patterns behind `re:`; the first that matches counts. `name` is the scheme's on command lines, where it has its own.
    """

    method: Method
    quantization: Quantization
    original: str = ""
    # GPTQ's first version stores zero points minus one.
    zeros_less_one: bool = False
    # That of compressed-tensors.
    format: str = ""
    others: tuple[tuple[tuple[str, ...], Quantization], ...] = ()
    name: str = ""

    def __str__(self) -> str:
        """Return the name of the scheme."""
        return self.name or " and ".join(dict.fromkeys(map(str, (self.quantization, *(one for _, one in self.others)))))

    @property
    def zeros_in_eighths(self) -> bool:
        """Tell whether zero points are uint8 [out, groups], in eighths of a code."""
        return self.format == EIGHTHS and self.quantization.bits == 4

    def of(self, layer: str) -> StoredScheme:
        """Return the scheme of a layer alone."""
        found = (scheme for targets, scheme in self.others if any(_names(target, layer) for target in targets))
        return replace(self, quantization=next(found, self.quantization), others=())

    @property
    def schemes(self) -> tuple[Quantization, ...]:
        """Return the schemes of all layers."""
        return self.quantization, *(scheme for _, scheme in self.others)


def _names(target: str, layer: str) -> bool:
    pattern = target.removeprefix("re:")
    return target == layer if pattern == target else re.match(pattern, layer) is not None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight of a checkpoint: the names of the tensors that hold it, and its sizes."""

    scheme: StoredScheme
    out_features: int
    in_features: int
    codes: str
    scales: str
    zeros: str | None
    # All of its tensors.
    names: tuple[str, ...]
    packed: bool = True


def stored_scheme(config: Mapping[str, Any]) -> StoredScheme | None:
    """Read the `quantization_config` of a config.json; None without one. Raises ArtifactError naming the field."""
    fields = config.get(_FIELD)
    if not fields:
        return None
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if method not in [one.value for one in Method]:
        served = ", ".join(one.value for one in Method)
        raise _refused("quant_method", f"{method!r} is not read, only {served}; use the unquantized model")
    readers = {Method.COMPRESSED_TENSORS: _compressed_tensors, Method.AWQ: _awq, Method.GPTQ: _gptq}
    return readers[Method(method)](fields)


def stored_weights(scheme: StoredScheme | None, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """Return the quantized weights, by the name of the float tensor that each stands for, such as X.weight.

    Raises ArtifactError naming the tensor that is missing, or has another shape or dtype.
    """
    if scheme is None:
        return {}
    compressed = scheme.method is Method.COMPRESSED_TENSORS
    mark = ".weight_scale" if compressed else ".qweight"
    layers = [name.removesuffix(mark) for name in checkpoint.tensors if name.endswith(mark)]
    if not layers:
        raise ArtifactError("model", f"its config says {scheme.method.value}, and no tensor ends with {mark}")
    read = _compressed_weight if compressed else _transposed_weight
    stored = {f"{layer}.weight": read(scheme.of(layer), checkpoint, layer) for layer in layers}
    read_names = {name for weight in stored.values() for name in weight.names}
    for name in checkpoint.tensors:
        if name.rpartition(".")[2] in _PARTS and name not in read_names:
            raise ArtifactError("model", f"tensor {name} would change the model, and is not read")
    return stored


def _compressed_tensors(fields: Mapping[str, Any]) -> StoredScheme:
    if fields.get("format") not in _FORMATS:
        raise _refused("format", f"{fields.get('format')!r} is not read, only {', '.join(_FORMATS)}")
    for field in _UNREAD_FIELDS:
        if fields.get(field):
            raise _refused(field, "is not served")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise _refused("config_groups", "is not an object of schemes")
    for group in groups.values():
        inputs = group.get("input_activations") or {"dynamic": True}
        if group.get("output_activations") or inputs.get("dynamic") is not True:
            raise _refused("config_groups", "activations that are quantized by fixed scales are not served")
    named, original = _copy_of(fields)
    main, others = _schemes_of(groups)
    if named and not named.startswith(str(main)):
        raise _refused("loraplex.quantization", f"{named} is not the scheme of config_groups")
    if _DYNAMIC in named and named.removesuffix(_EMBEDDINGS) not in _SCHEMES:
        raise _refused("loraplex.quantization", f"{named}: inputs in 8 bits are served with other groups alone")
    copied = replace(main, embeddings=named.endswith(_EMBEDDINGS), dynamic=_DYNAMIC in named)
    return StoredScheme(
        Method.COMPRESSED_TENSORS,
        copied,
        original,
        others=others,
        name=named,
        format=fields["format"],
    )


def _copy_of(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Return a copy's name for its scheme, and the digest of its original; both are empty in other programs' copies."""
    copy = fields.get("loraplex") or {}
    if not isinstance(copy, dict) or (copy and not is_digest(str(copy.get("original")))):
        raise _refused("loraplex", "does not name the original's digest")
    name = copy.get("quantization") or ""
    if not isinstance(name, str) or not _COPY_NAME.fullmatch(name):
        raise _refused("loraplex.quantization", f"{name!r} is not the name of a scheme")
    return name, str(copy.get("original", ""))


def _schemes_of(groups: Mapping[str, Any]) -> tuple[Quantization, tuple[tuple[tuple[str, ...], Quantization], ...]]:
    """Return the scheme of layers outside all groups, and the schemes of the groups with their targets."""
    main: Quantization | None = None
    others = []
    for group in groups.values():
        targets, scheme = group.get("targets", ["Linear"]), _weights_of(group)
        if not isinstance(targets, list) or not targets or not all(map(_is_target, targets)):
            raise _refused("config_groups", f"targets {targets!r} are not names of layers or patterns behind re:")
        if not _CLASSES.isdisjoint(targets):
            if main not in (None, scheme):
                raise _refused("config_groups", "two schemes are both for all linear layers")
            main = scheme
        else:
            others.append((tuple(targets), scheme))
    if main is None:
        # Each quantized layer is then named.
        main = others[-1][1]
    return main, tuple((targets, scheme) for targets, scheme in others if scheme != main)


def _is_target(target: object) -> bool:
    try:
        return isinstance(target, str) and bool(re.compile(target.removeprefix("re:")) or target)
    except re.error:
        return False


def _weights_of(group: Mapping[str, Any]) -> Quantization:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _refused("config_groups", "a scheme without weights is not served")
    bits, strategy, kind = weights.get("num_bits"), weights.get("strategy"), weights.get("type")
    if not isinstance(bits, int) or (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise _refused("num_bits", f"{kind} of {bits} bits is not served, only int of 4 or 8 and float of 8")
    if strategy not in ("tensor", "channel", "group"):
        raise _refused("strategy", f"{strategy!r} is not served, only tensor, channel and group")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _refused("actorder", f"{weights['actorder']!r} is not served: groups must be neighbouring columns")
    group_size = _group_size(weights) if strategy == "group" else 0
    return Quantization(bits, bool(weights.get("symmetric", True)), group_size, floating=kind == "float")


def _awq(fields: Mapping[str, Any]) -> StoredScheme:
    version = str(fields.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refused("version", f"{version!r} is not read, only gemm")
    if fields.get("bits", fields.get("w_bit")) != 4:
        raise _refused("bits", f"{fields.get('bits')!r} is not read, only 4")
    return StoredScheme(Method.AWQ, Quantization(4, symmetric=False, group=_group_size(fields)))


def _gptq(fields: Mapping[str, Any]) -> StoredScheme:
    bits, version = fields.get("bits"), fields.get("checkpoint_format") or "gptq"
    if bits not in (4, 8):
        raise _refused("bits", f"{bits!r} is not read, only 4 and 8")
    if version not in ("gptq", "gptq_v2"):
        raise _refused("checkpoint_format", f"{version!r} is not read, only gptq and gptq_v2")
    for field in ("desc_act", "dynamic"):
        if fields.get(field):
            raise _refused(field, "is not served: all layers must have one scheme, in groups of neighbouring columns")
    scheme = Quantization(bits, symmetric=False, group=_group_size(fields))
    return StoredScheme(Method.GPTQ, scheme, zeros_less_one=version == "gptq")


def _group_size(fields: Mapping[str, Any]) -> int:
    """Read `group_size`; -1, which means one group for an output, is 0."""
    size = fields.get("group_size", fields.get("q_group_size"))
    if type(size) is not int or size == 0 or size < -1 or (size % 2 == 1 and size != -1):
        raise _refused("group_size", f"{size!r} is not an even number of columns, nor -1")
    return max(size, 0)


def _compressed_weight(scheme: StoredScheme, checkpoint: Checkpoint, layer: str) -> StoredWeight:
    quantization = scheme.quantization
    packed = f"{layer}.weight_packed" in checkpoint.tensors
    codes = f"{layer}.weight_packed" if packed else f"{layer}.weight"
    out_features, width = _matrix(checkpoint, codes, "I32" if packed else "F8_E4M3" if quantization.floating else "I8")
    in_features = width
    names = [codes, f"{layer}.weight_scale"]
    if packed:
        names.append(f"{layer}.weight_shape")
        shape = checkpoint.integers(names[-1])
        in_features = shape[-1] if len(shape) == 2 else 0
        if shape != (out_features, in_features) or -(-in_features * quantization.bits // 32) != width:
            raise ArtifactError("model", f"tensor {names[-1]} says {list(shape)}, which {codes} does not hold")
    elif quantization.bits == 4:
        raise ArtifactError("model", f"tensor {codes}: 4 bits must be packed")
    groups = quantization.groups(in_features)
    scale = _info(checkpoint, names[1])
    one_for_all = groups == 1 and math.prod(scale.shape) == 1
    _check(names[1], scale, scale.shape if one_for_all else (out_features, groups), _FLOATS)
    zeros = f"{layer}.weight_zero_point"
    if quantization.symmetric:
        zeros = zeros if zeros in checkpoint.tensors else ""  # all zero where a writer keeps it
    else:
        words = packed and not scheme.zeros_in_eighths
        shape_of_zeros = (-(-out_features * quantization.bits // 32), groups) if words else (out_features, groups)
        kind = "I32" if words else "U8" if scheme.zeros_in_eighths else "I8"
        _check(zeros, _info(checkpoint, zeros), shape_of_zeros, (kind,))
    names += [zeros] if zeros else []
    read_zeros = None if quantization.symmetric else zeros
    return StoredWeight(scheme, out_features, in_features, codes, names[1], read_zeros, tuple(names), packed)


def _transposed_weight(scheme: StoredScheme, checkpoint: Checkpoint, layer: str) -> StoredWeight:
    codes, scales, zeros, order = (f"{layer}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx"))
    rows, columns = _matrix(checkpoint, codes, "I32")
    per_word = 32 // scheme.quantization.bits
    awq = scheme.method is Method.AWQ
    in_features, out_features = (rows, columns * per_word) if awq else (rows * per_word, columns)
    groups = scheme.quantization.groups(in_features)
    _check(scales, _info(checkpoint, scales), (groups, out_features), _FLOATS)
    _check(zeros, _info(checkpoint, zeros), (groups, out_features // per_word), ("I32",))
    names = [codes, scales, zeros]
    if order in checkpoint.tensors:
        group = scheme.quantization.group or in_features
        if checkpoint.integers(order) != tuple(column // group for column in range(in_features)):
            raise ArtifactError("model", f"tensor {order} reorders columns, which is not served (desc_act)")
        names.append(order)
    return StoredWeight(scheme, out_features, in_features, codes, scales, zeros, tuple(names))


def _matrix(checkpoint: Checkpoint, name: str, dtype: str) -> tuple[int, int]:
    info = _info(checkpoint, name)
    if info.dtype != dtype or len(info.shape) != 2:
        raise ArtifactError("model", f"tensor {name} is {info.dtype} {list(info.shape)}, not {dtype} with two sizes")
    return info.shape[0], info.shape[1]


def _info(checkpoint: Checkpoint, name: str) -> TensorInfo:
    if name not in checkpoint.tensors:
        raise ArtifactError("model", f"tensor {name} is missing")
    return checkpoint.tensors[name][1]


def _check(name: str, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if info.shape != shape or info.dtype not in dtypes:
        expected = f"{' or '.join(dtypes)} {list(shape)}"
        raise ArtifactError("model", f"tensor {name} is {info.dtype} {list(info.shape)}, not {expected}")


def _refused(field: str, why: str) -> ArtifactError:
    return ArtifactError(_CONFIG, f"{_FIELD}.{field}: {why}")
