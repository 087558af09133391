"""The schemes of quantized weights: their names on command lines, their sizes, and the digest of a quantized base.

    int8              a scale for each output          int4, int4-64, int4-128  scale and zero for 32, 64 or 128 columns
    int8-zero-point   a scale and a zero for each      fp8                      8 bits of floating point, on CUDA

The inner linear layers are quantized; with `+embeddings`, as in `int8+embeddings`, so are token embeddings and output
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from artifacts.digests import sha256_json
from artifacts.errors import ArtifactError

FLAG_HELP = (
    "int8, int8-zero-point, int4, int4-64, int4-128 or fp8 (CUDA); +embeddings: these too; empty: as the files are"
)
_EMBEDDINGS = "+embeddings"
# Columns of a group of `int4`: with more the shipped model loses over 3% of perplexity: docs/results/quantization.md.
_INT4_GROUP = 32
# Bytes of a scale, and of a zero point.
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Quantization:
    """A scheme of weights. `group` is the number of columns that share a scale; 0: all columns of an output do."""

    bits: int
    symmetric: bool
    group: int = 0
    floating: bool = False
    embeddings: bool = False

    def __str__(self) -> str:
        """Return the scheme's name, as on command lines; a checkpoint may have one that has no name there."""
        name = "fp8" if self.floating else f"int{self.bits}"
        if self.bits == 8 and not self.symmetric:
            name += "-zero-point"
        if self.bits == 4 and self.symmetric:
            name += "-symmetric"
        if self.group != (_INT4_GROUP if self.bits == 4 else 0):
            name += f"-{self.group or 'channel'}"
        return name + (_EMBEDDINGS if self.embeddings else "")

    def canonical(self) -> dict[str, Any]:
        """Return the scheme as JSON for digests."""
        return {
            "bits": self.bits,
            "symmetric": self.symmetric,
            "group": self.group,
            "floating": self.floating,
            "embeddings": self.embeddings,
        }

    def groups(self, in_features: int) -> int:
        """Return the number of scales of an output; the last group may be shorter."""
        return -(-in_features // self.group) if self.group else 1

    def weight_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes that a weight takes in memory."""
        scales = out_features * self.groups(in_features) * _SCALE_BYTES
        return out_features * in_features * self.bits // 8 + scales * (1 if self.symmetric else 2)


_SCHEMES = {
    "int8": Quantization(8, symmetric=True),
    "int8-zero-point": Quantization(8, symmetric=False),
    "int4": Quantization(4, symmetric=False, group=_INT4_GROUP),
    "int4-64": Quantization(4, symmetric=False, group=64),
    "int4-128": Quantization(4, symmetric=False, group=128),
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
    if scheme is not None and scheme.floating and device.partition(":")[0] != "cuda":
        raise ArtifactError("--quantize", f"{scheme} needs a CUDA device (--device cuda); on the CPU use int8")


def quantized_digest(original: str, scheme: Quantization | None, kv_cache_dtype: str = "") -> str:
    """Return the digest of the base model that quantizing the original's weights makes, its KV cache, or both."""
    weights = {"quantization": scheme.canonical()} if scheme else {}
    return sha256_json({"original": original} | weights | ({"kv_cache": kv_cache_dtype} if kv_cache_dtype else {}))
