"""Rounding to 4 bits: scales and zero points that are searched, and codes that make up for each other's errors (GPTQ).

    error of a weight = sum over outputs of (w - ŵ) H (w - ŵ)'       H = sum of x' x over the inputs x of the layer

Scales and zero points minimize the error by the diagonal of H; codes are then chosen column by column, those with the
largest inputs first, and the error of each is made up for in the columns that follow: Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", 2022. Groups are neighbouring columns, whatever the
order, so the codes have the layout of plain rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.engine.quantized.weight import QuantizedWeight, pack_codes

_LARGEST_CODE = 15
# Parts of a group's range that its codes are tried on, and distances from the nearest zero point.
_SHRUNK = (1.0, 0.92, 0.84, 0.76)
_ZEROS = (0, -1, 1)
# The share of the mean of H's diagonal that is added to it, so that it can be inverted.
_DAMPING = 0.01
# Columns whose errors are passed on together, by one product.
_BLOCK = 128


def search_scales(weight: Tensor, importance: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return bfloat16 scales and uint8 zero points [out, groups] for 4 bits of a weight [out, in].

    They minimize the squared error weighted by `importance` [in].
    """
    parts, weights = _in_groups(weight.float(), group), _in_groups(importance.float()[None], group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    # Where all weights are 0, any scale is right.
    full = ((high - low) / _LARGEST_CODE).clamp(min=torch.finfo(torch.bfloat16).tiny)
    nearest = (-low / full).round()
    best = torch.full_like(full, torch.inf)
    scales, zeros = full.bfloat16(), nearest
    for distance in _ZEROS:
        zero = (nearest + distance).clamp(0, _LARGEST_CODE)
        for shrunk in _SHRUNK:
            codes = _codes(parts, full * shrunk, zero)
            steps = codes - zero[..., None]
            of_steps = weights * steps
            fit = (of_steps * parts).sum(2) / (of_steps * steps).sum(2).clamp(min=torch.finfo(torch.float32).tiny)
            scale = fit.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
            wide = scale.float()
            error = (weights * ((_codes(parts, wide, zero) - zero[..., None]) * wide[..., None] - parts).square_()).sum(
                2
            )
            better = error < best
            best = torch.where(better, error, best)
            scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return scales, zeros.to(torch.uint8)


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """View rows [rows, columns] as [rows, groups, group]; a shorter last group is filled with zeros."""
    return pad(rows, (0, -rows.shape[1] % group)).view(len(rows), -1, group)


def _codes(parts: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (parts / scale[..., None]).add_(zero[..., None]).round_().clamp_(0, _LARGEST_CODE)


def round_weight(weight: Tensor, hessian: Tensor, group: int) -> QuantizedWeight:
    """Round a weight [out, in] to 4 bits for inputs whose sum of products is `hessian` [in, in].

    Raises torch.linalg.LinAlgError where the inputs are not numbers.
    """
    columns = weight.shape[1]
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    scales, zeros = search_scales(weight, diagonal + _DAMPING * mean, group)
    order = diagonal.argsort(descending=True, stable=True)
    inverse = _inverse_root(hessian[order][:, order], float(_DAMPING * mean))
    of_columns = (order // group).to(weight.device)
    codes = _rounded(weight.float()[:, order], inverse, scales.float()[:, of_columns], zeros.float()[:, of_columns])
    plain = torch.empty_like(codes)
    plain[:, order] = codes
    return QuantizedWeight(pack_codes(plain), scales, zeros, 4, min(group, columns))


def _inverse_root(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky root of the inverse of a damped matrix, which GPTQ takes its factors from."""
    damped = hessian.clone()
    damped.diagonal().add_(damping)
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return root


def _rounded(rest: Tensor, root: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the codes [out, in] of the columns in this order, where `rest` becomes what is left of them."""
    codes = torch.empty_like(rest)
    for start in range(0, rest.shape[1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[1])
        # Columns as rows: these are contiguous.
        block, errors = rest[:, start:stop].t().contiguous(), torch.empty(stop - start, len(rest))
        factors, scale, zero = root[start:stop, start:stop], scales[:, start:stop].t(), zeros[:, start:stop].t()
        for index in range(stop - start):
            column = block[index]
            code = (column / scale[index] + zero[index]).round_().clamp_(0, _LARGEST_CODE)
            errors[index] = (column - (code - zero[index]) * scale[index]) / factors[index, index]
            block[index:] -= factors[index, index:, None] * errors[index]
            codes[:, start + index] = code
        rest[:, stop:] -= errors.t() @ root[start:stop, stop:]
    return codes
