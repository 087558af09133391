"""A quantized weight, the linear layer that has one, and the plain rounding that makes one of a float weight.

    weight [out, in] ≈ (codes - zeros) * scales          scales, zeros: one for each output and group of columns

The layer computes with the dequantized weight, the definition that kernels are compared with; on CUDA by its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from artifacts.base_modules import LinearWeight
from artifacts.quantization import Quantization

# Zero point of symmetric codes of 4 bits, which are 0 to 15.
SYMMETRIC_ZERO = 8
# Lowest and highest code by the number of bits.
_CODES = {4: (0, 15), 8: (-128, 127)}
# Number of times that scales of 4 bits are fitted to their codes; after these hardly a code changes.
_FITS = 5


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as codes.

    `codes` are int8 [out, in] for 8 bits (float8_e4m3fn for fp8) and uint8 [out, in // 2] for 4 bits: 0 to 15, an even
    column in the low nibble. `scales` are float32 or bfloat16 [out, groups], where a group is `group` consecutive
    columns, the last one may be shorter; one group is per output channel. `zeros` are float32 or uint8 [out, groups] in
    code units; None is symmetric: 0 for 8 bits, SYMMETRIC_ZERO for 4 bits.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int

    @property
    def out_features(self) -> int:
        """Return the number of outputs."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Return the number of columns."""
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    def unpacked(self) -> Tensor:
        """Return the codes one by one, [out, in]: int8 or float8 for 8 bits, uint8 for 4."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (codes - zeros) * scales, computed in float32: [out, in]."""
        numbers = self.unpacked().float()
        if self.zeros is not None:
            numbers = numbers - self._columns(self.zeros)
        elif self.bits == 4:
            numbers = numbers - SYMMETRIC_ZERO
        return (numbers * self._columns(self.scales)).to(dtype)

    def to(self, device: torch.device) -> Self:
        """Return the weight on a device; the same one where it is there."""
        if device == self.codes.device:
            return self
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)

    def rows(self, index: Tensor | slice) -> Self:
        """Return the weight of some outputs."""
        zeros = None if self.zeros is None else self.zeros[index]
        # Bytes, because torch indexes and joins float8 on some devices alone.
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[index], zeros=zeros)

    def columns(self, first: int, stop: int) -> Self:
        """Return the weight of the columns from `first` to `stop`, for 4 bits both even; a border inside a group cuts
        all groups.
        """
        packed = 2 if self.bits == 4 else 1
        codes = self.codes[:, first // packed : stop // packed].contiguous()
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group=stop - first)
        group = gcd(self.group, first) if stop == self.in_features else gcd(self.group, first, stop)

        def part(of_groups: Tensor) -> Tensor:
            cut = of_groups.repeat_interleave(self.group // group, 1)
            return cut[:, first // group : -(-stop // group)].contiguous()

        zeros = None if self.zeros is None else part(self.zeros)
        return replace(self, codes=codes, scales=part(self.scales), zeros=zeros, group=group)

    def _columns(self, of_groups: Tensor) -> Tensor:
        if of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group, dim=1)[:, : self.in_features]


class QuantizedModule(nn.Module):
    """A module with a quantized weight, which moves with the module; casts do not concern it."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.weight = weight

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Move the weight where `fn` moves an integer tensor, which it does not cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = self.weight.to(fn(torch.empty(0, dtype=torch.int8, device=self.weight.codes.device)).device)
        return self


class QuantizedLinear(QuantizedModule):
    """A linear layer over a quantized weight: [..., in_features] to [..., out_features], in the dtype of its input."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the transposed dequantized weight, and add the bias where there is one."""
        if self.weight.codes.is_cuda and (cuda := _cuda()).can_multiply(self.weight):
            y: Tensor = cuda.multiply(x, self.weight, self.bias)
            return y
        return linear(x, self.weight.dequantize(x.dtype), self.bias)


@cache
def _cuda() -> Any:
    from worker.engine.quantized import cuda  # Triton is there only with CUDA

    return cuda


# The layers that adapters change, that are fused and packed.
AnyLinear = nn.Linear | QuantizedLinear


def is_linear(module: object) -> TypeGuard[AnyLinear]:
    """Tell whether a module is a linear layer, quantized or not; subclasses compute something else."""
    return type(module) in (nn.Linear, QuantizedLinear)


def quantize(weight: Tensor, bits: int, group: int | None = None, *, symmetric: bool = True) -> QuantizedWeight:
    """Round a weight [out, in] to the nearest codes, over the range of each group; None is one group per output.

    Scales of 4 bits are then fitted to their codes, by least squares.
    """
    columns = weight.shape[1]
    group = group or columns
    lowest, highest = _CODES[bits]
    middle = SYMMETRIC_ZERO if bits == 4 else 0
    wide = weight.detach().float()
    codes, scales, zeros = [], [], []
    for part in torch.split(wide, group, 1):
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        if symmetric:
            low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
        scale = ((high - low) / (highest - lowest)).clamp(min=torch.finfo(torch.float32).tiny)
        zero = torch.full_like(scale, middle) if symmetric else (lowest - low / scale).round()
        rounded = (part / scale + zero).round().clamp(lowest, highest)
        if bits == 4:
            rounded, scale = _fitted(part, rounded, scale, zero)
        codes.append(rounded)
        scales.append(scale)
        zeros.append(zero)
    flat = torch.cat(codes, 1)
    return QuantizedWeight(
        pack_codes(flat) if bits == 4 else flat.to(torch.int8),
        torch.cat(scales, 1),
        None if symmetric else torch.cat(zeros, 1),
        bits,
        group,
    )


def _fitted(part: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and the scale of each output with the smallest squared error that turns of fitting found.

    A turn takes the scale that fits the codes best, then rounds again. Sums are float64, so that their order, which
    differs between processors, does not change codes.
    """
    wide = part.double()
    best = ((codes - zero) * scale - wide).square().sum(1, keepdim=True)
    result, turn = (codes, scale), codes
    for _ in range(_FITS):
        steps = (turn - zero).double()
        fit = (steps * wide).sum(1, keepdim=True) / steps.square().sum(1, keepdim=True).clamp(min=1)
        fitted = fit.float().clamp(min=torch.finfo(torch.float32).tiny)
        turn = (part / fitted + zero).round().clamp(*_CODES[4])
        error = ((turn - zero) * fitted - wide).square().sum(1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        result = torch.where(better, turn, result[0]), torch.where(better, fitted, result[1])
    return result


def equal(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Tell whether two weights are the same, bit by bit."""
    if (one.bits, one.group, one.zeros is None) != (other.bits, other.group, other.zeros is None):
        return False
    if one.codes.dtype != other.codes.dtype:
        return False
    pairs = [(one.codes.view(torch.uint8), other.codes.view(torch.uint8)), (one.scales, other.scales)]
    if one.zeros is not None and other.zeros is not None:
        pairs.append((one.zeros, other.zeros))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Put the outputs of weights of one scheme under each other; a single weight is returned unchanged."""
    if len(weights) == 1:
        return weights[0]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        weights[0],
        codes=torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(weights[0].codes.dtype),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes 0 to 15 [out, in] in pairs: uint8 [out, in // 2]."""
    pairs = codes.to(torch.uint8)
    return pairs[:, ::2] | pairs[:, 1::2] << 4


class QuantizedEmbedding(QuantizedModule):
    """Token embeddings [num_embeddings, embedding_dim]: looks up ids [...] to [..., embedding_dim].

    Some models multiply by `embed_scale`, which is then an attribute as on their own layer.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, embed_scale: float | None = None) -> None:
        super().__init__(weight)
        self.num_embeddings = weight.out_features
        self.embedding_dim = weight.in_features
        self.dtype = dtype
        if embed_scale is not None:
            self.embed_scale = embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Dequantize the rows of ids [...]: [..., embedding_dim]."""
        y = self.weight.rows(ids.reshape(-1)).dequantize(self.dtype)
        if hasattr(self, "embed_scale"):
            y *= torch.tensor(self.embed_scale, dtype=self.dtype)
        return y.view(*ids.shape, self.embedding_dim)


# Number of rows that are quantized at once: rounding makes several float32 copies.
_PIECE_ROWS = 4096
_FLOAT8 = torch.float8_e4m3fn


def quantize_tensor(tensor: Tensor, weight: LinearWeight, scheme: Quantization) -> QuantizedWeight:
    """Quantize a checkpoint's tensor of a weight; rows of embeddings are tokens, of other weights outputs."""
    return quantize_weight(tensor.t() if weight.input_first and not weight.is_embedding else tensor, scheme)


def quantize_weight(weight: Tensor, scheme: Quantization) -> QuantizedWeight:
    """Quantize a weight [out_features, in_features]; the same weight always gives the same codes."""
    return concatenate([_quantize(piece, scheme) for piece in torch.split(weight, _PIECE_ROWS)])


def _quantize(weight: Tensor, scheme: Quantization) -> QuantizedWeight:
    if not scheme.floating:
        rounded = quantize(weight, scheme.bits, scheme.group or None, symmetric=scheme.symmetric)
        if rounded.bits == 8 or rounded.zeros is None:
            return rounded
        # There are many of them. A scale of 8 bits shifts the largest code by a thirtieth of a step.
        return replace(rounded, scales=rounded.scales.bfloat16(), zeros=rounded.zeros.to(torch.uint8))
    wide = weight.detach().float()
    scales = (wide.abs().amax(1, keepdim=True) / torch.finfo(_FLOAT8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return QuantizedWeight((wide / scales).to(_FLOAT8), scales, None, scheme.bits, weight.shape[1])
