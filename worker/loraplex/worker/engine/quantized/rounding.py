"""Rounding to 4 bits with codes that make up for each other's errors (GPTQ).

    error of a weight = sum over outputs of (w - ŵ) H (w - ŵ)'       H = sum of x' x over the inputs x of the layer

Scales and zero points minimize the error by the diagonal of H; codes are then chosen column by column, those with the
largest inputs first, and the error of each is made up for in the columns that follow: Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", 2022. Groups are neighbouring columns, whatever the
order, so the codes have the layout of plain rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.worker.engine.quantized.weight import ZERO_PARTS, QuantizedWeight, fit_groups, pack_codes

_LARGEST_CODE = 15
# The share of the mean of H's diagonal that is added to it, so that it can be inverted.
_DAMPING = 0.01
# Columns whose errors are passed on together, by one product.
_BLOCK = 128


def round_weight(weight: Tensor, hessian: Tensor, group: int) -> QuantizedWeight:
    """Round a weight [out, in] to 4 bits for inputs whose sum of products is `hessian` [in, in].

    Raises torch.linalg.LinAlgError where the inputs are not numbers.
    """
    columns = weight.shape[1]
    diagonal = hessian.diagonal()
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    scales, zeros = fit_groups(weight, group, diagonal + _DAMPING * mean)
    order = diagonal.argsort(descending=True, stable=True)
    inverse = _inverse_root(hessian[order][:, order], float(_DAMPING * mean))
    of_columns = (order // group).to(weight.device)
    zero_points = zeros.float() / ZERO_PARTS
    codes = _rounded(weight.float()[:, order], inverse, scales.float()[:, of_columns], zero_points[:, of_columns])
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
