"""A quantized weight, and the plain rounding that makes one of a float weight.

    weight [out, in] ≈ (codes - zeros) * scales          scales, zeros: one for each output and group of columns

Zero points of 4 bits are counted in eighths of a code: weights lie on a grid that need not hold zero itself. Codes in
eighths less such a zero point are whole numbers of -128 to 120, which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from loraplex.contracts.artifacts.base_modules import LinearWeight
from loraplex.contracts.artifacts.quantization import Quantization

# Zero points of 4 bits are counted in such parts of a code.
ZERO_PARTS = 8
# Zero point of symmetric codes of 4 bits, which are 0 to 15: in parts.
SYMMETRIC_ZERO = 8 * ZERO_PARTS
_LARGEST_CODE = 15
# Columns of inputs that share a scale where they are rounded, and their largest code.
INPUT_GROUP, _INPUT_CODE = 128, torch.tensor(127.0)
# Number of times that scales and zero points of 4 bits are fitted to their codes; after these few codes change.
_FITS = 3
# Weights that are fitted at once: their float64 stay in the cache.
_FITTED_NUMBERS = 2**16
_TINY = torch.finfo(torch.bfloat16).tiny


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as codes.

    `codes` are int8 [out, in] for 8 bits (float8_e4m3fn for fp8) and uint8 [out, in // 2] for 4 bits: 0 to 15, an even
    column in the low nibble. `scales` are float32 or bfloat16 [out, groups], where a group is `group` consecutive
    columns, the last one may be shorter; one group is per output channel. `zeros` are [out, groups]: float32 codes for
    8 bits, uint8 in ZERO_PARTS of a code for 4 bits; None is symmetric: 0 for 8 bits, SYMMETRIC_ZERO for 4 bits.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    # Whether inputs are rounded: see round_inputs.
    dynamic: bool = False

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
        if (zeros := self.zero_points()) is not None:
            numbers = numbers - self._columns(zeros)
        return (numbers * self._columns(self.scales)).to(dtype)

    def zero_points(self) -> Tensor | None:
        """Return the zero points in codes, float32 [out, groups]; None where they all are 0."""
        if self.bits == 8:
            return self.zeros
        zeros = torch.full_like(self.scales, SYMMETRIC_ZERO) if self.zeros is None else self.zeros
        return zeros.float() / ZERO_PARTS

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


def quantize(weight: Tensor, bits: int, group: int | None = None, *, symmetric: bool = True) -> QuantizedWeight:
    """Round a weight [out, in] to the nearest codes, over the range of each group; None is one group per output.

    Scales and zero points of 4 bits are those of fit_groups.
    """
    columns = weight.shape[1]
    group = group or columns
    if bits == 4:
        scale, zero = fit_groups(weight, group, symmetric=symmetric)
        parts = nearest_codes(in_groups(weight.detach().float(), group), scale.float(), zero.float() / ZERO_PARTS)
        packed = pack_codes(parts.flatten(1)[:, :columns])
        return QuantizedWeight(packed, scale, None if symmetric else zero, bits, group)
    codes, scales, zeros = [], [], []
    for part in torch.split(weight.detach().float(), group, 1):
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        if symmetric:
            low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
        zero = torch.zeros_like(scale) if symmetric else (-128 - low / scale).round()
        codes.append((part / scale + zero).round().clamp(-128, 127))
        scales.append(scale)
        zeros.append(zero)
    return QuantizedWeight(
        torch.cat(codes, 1).to(torch.int8),
        torch.cat(scales, 1),
        None if symmetric else torch.cat(zeros, 1),
        bits,
        group,
    )


def fit_groups(
    weight: Tensor, group: int, importance: Tensor | None = None, *, symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """Return bfloat16 scales and uint8 zero points, in ZERO_PARTS, for 4 bits of a weight [out, in]: [out, groups].

    They minimize the squared error, weighted by `importance` [in] if it is given, as far as turns of fitting find.
    """
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    weights = in_groups(importance.double()[None], group)
    pieces = torch.split(in_groups(weight.detach().float(), group), max(1, _FITTED_NUMBERS // weight.shape[1]))
    fitted = [_fitted(piece, weights, symmetric) for piece in pieces]
    scales, zeros = (torch.cat(part) for part in zip(*fitted, strict=True))
    return scales.bfloat16(), (zeros * ZERO_PARTS).to(torch.uint8)


def in_groups(rows: Tensor, group: int) -> Tensor:
    """View rows [rows, columns] as [rows, groups, group]; a shorter last group is filled with zeros."""
    return pad(rows, (0, -rows.shape[1] % group)).view(len(rows), -1, group)


def nearest_codes(parts: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the codes of 4 bits nearest to weights [out, groups, group]; zero points are in codes."""
    return (parts / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, _LARGEST_CODE)


def _fitted(parts: Tensor, weights: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points, in codes, of groups [out, groups, group]; float32.

    A turn takes the line through the codes that fits the weights best, rounds its zero and its slope, then the codes
    again. Sums are float64, so that their order, which differs between processors, does not change codes.
    """
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    # Where all weights are 0, any scale is right.
    full, wide = ((high - low) / _LARGEST_CODE).clamp(min=_TINY), parts.double()
    best, scales, zeros = torch.full_like(full, torch.inf, dtype=torch.float64), full, torch.zeros_like(full)
    zero = torch.full_like(full, SYMMETRIC_ZERO / ZERO_PARTS) if symmetric else _in_parts(-low / full)
    codes = nearest_codes(parts, full, zero).double()
    for turn in range(_FITS):
        if turn and not symmetric:
            zero = _fitted_zero(codes, wide, weights, zero)
        steps = codes - zero[..., None]
        of_steps = weights * steps
        slope = (of_steps * wide).sum(2) / (of_steps * steps).sum(2).clamp(min=_TINY)
        scale = slope.clamp(min=_TINY).bfloat16().float()
        codes = nearest_codes(parts, scale, zero).double()
        numbers = (codes - zero[..., None]) * scale[..., None]
        error = (weights * (numbers - wide).square_()).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return scales, zeros


def _fitted_zero(codes: Tensor, wide: Tensor, weights: Tensor, zero: Tensor) -> Tensor:
    """Return the codes that the lines through [out, groups, group] codes and weights give 0; `zero` if none."""
    total = weights.sum(2).clamp(min=_TINY)
    center, middle = (weights * codes).sum(2) / total, (weights * wide).sum(2) / total
    distances = codes - center[..., None]
    of_distances = weights * distances
    slope = (of_distances * wide).sum(2) / (of_distances * distances).sum(2).clamp(min=_TINY)
    return _in_parts(torch.where(slope > _TINY, center - middle / slope.clamp(min=_TINY), zero).float())


def _in_parts(zero: Tensor) -> Tensor:
    """Round zero points, in codes, to ZERO_PARTS of 0 to 15 codes."""
    return (zero * ZERO_PARTS).round_().clamp_(0, _LARGEST_CODE * ZERO_PARTS) / ZERO_PARTS


def round_inputs(x: Tensor) -> Tensor:
    """Round inputs [..., columns] to 8 bits beside the largest of 128 columns of a row; float32."""
    parts = in_groups(x.reshape(-1, x.shape[-1]).float(), INPUT_GROUP)
    largest = parts.abs().amax(2, keepdim=True)
    codes = (parts * (_INPUT_CODE / largest.clamp(min=1e-30))).round_()
    return (codes * (largest / _INPUT_CODE)).flatten(1)[:, : x.shape[-1]].view(x.shape)


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
        codes = quantize(weight, scheme.bits, scheme.group or None, symmetric=scheme.symmetric)
        return replace(codes, dynamic=scheme.dynamic)
    wide = weight.detach().float()
    scales = (wide.abs().amax(1, keepdim=True) / torch.finfo(_FLOAT8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return QuantizedWeight((wide / scales).to(_FLOAT8), scales, None, scheme.bits, weight.shape[1])
