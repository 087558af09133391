"""The kernels between linear layers against their definitions in float64, for odd sizes and any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from loraplex.worker.engine.attention.paged import LayerCall
from loraplex.worker.engine.decoder.layer import Rotation, RowOperators, Slots
from loraplex.worker.engine.decoder.recognition import AttentionForm, Norm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
COLUMNS = [1, 5, 16, 54, 131]
MAX_ROWS = 33

pytestmark = pytest.mark.parametrize("dtype", TOLERANCE)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _check(compute: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> None:
    """Check the results, and that a row's bits are the same beside any other rows."""
    whole = compute(x)
    assert whole.dtype == x.dtype
    bound = TOLERANCE[x.dtype] * expected.abs().amax(-1, keepdim=True) + 1e-30
    assert ((whole - expected).abs() <= bound).all()
    for rows in (1, 2, 3, 7, 8, 32):
        assert torch.equal(compute(x[-rows:]), whole[-rows:]), f"{rows} rows"


def _normalized(x: Tensor, norm: Norm) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight.double()


@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_are_normalized(columns: int, dtype: torch.dtype) -> None:
    operators, norm = RowOperators(dtype), Norm(_normal(columns, seed=1), 1e-5)
    # Of every size: beside the smallest, epsilon is large.
    x = (_normal(MAX_ROWS, columns) * torch.logspace(-5, 4, MAX_ROWS)[:, None]).to(dtype)
    other = _normal(MAX_ROWS, columns, seed=2).to(dtype)

    def normed(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        operators.norm(x, norm, out)
        return out

    def added(x: Tensor) -> Tensor:
        sums, out = torch.empty_like(x), torch.empty_like(x)
        operators.add_norm(x, other[-len(x) :], sums, norm, out)
        assert torch.equal(sums, x + other[-len(x) :])
        operators.add(x, other[-len(x) :], out_of_sums := torch.empty_like(x))
        assert torch.equal(sums, out_of_sums)
        return out

    _check(normed, x, _normalized(x, norm))
    _check(added, x, _normalized(x + other, norm))


@pytest.mark.parametrize("columns", COLUMNS)
def test_gates_are_silu(columns: int, dtype: torch.dtype) -> None:
    operators = RowOperators(dtype)
    x = (_normal(MAX_ROWS, 2 * columns) * 20).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = -200, 200, 0

    def gated(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), columns)
        operators.gate(x, out)
        return out

    _check(gated, x, silu(x[:, :columns].double()) * x[:, columns:].double())


@pytest.mark.parametrize("shared", [0, 1 << 30], ids=["all threads", "one thread"])
def test_heads_are_normalized_rotated_and_kept(shared: int, dtype: torch.dtype) -> None:
    norms, nothing = (Norm(_normal(10, seed=1), 1e-6), Norm(_normal(10, seed=2), 1e-6)), torch.empty(0)
    call = LayerCall(0, nothing, nothing, nothing, 1.0)
    for heads in (
        AttentionForm(4, 2, 10, 6, 10, call),
        AttentionForm(3, 1, 10, 10, 6, call, norms),
        AttentionForm(2, 2, 10, 4, 0, call, norms),
    ):
        _check_heads(RowOperators(dtype, shared), heads)


def _check_heads(operators: RowOperators, heads: AttentionForm) -> None:
    dtype, dims, columns = operators.dtype, (heads.heads + heads.kv_heads) * heads.key_dim, heads.columns
    x = _normal(MAX_ROWS, dims + heads.kv_heads * heads.value_dim).to(dtype)
    cos, sin = (_normal(MAX_ROWS, columns, seed=seed).to(dtype) for seed in (3, 4))
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:MAX_ROWS]
    keys, values = (torch.zeros(50, heads.kv_heads, dim).to(dtype) for dim in (heads.key_dim, heads.value_dim))

    def turned(x: Tensor) -> Tensor:
        out, rotation = x.clone(), Rotation(cos[-len(x) :], sin[-len(x) :]) if columns else None
        operators.rotate(out, heads, rotation, Slots(slots[-len(x) :], keys, values))
        return out

    parts = [
        part.reshape(len(x), -1, heads.key_dim) for part in x[:, :dims].tensor_split([heads.heads * heads.key_dim], 1)
    ]
    for index, norm in enumerate(heads.norms or (None, None)):
        part = parts[index].double() if norm is None else _normalized(parts[index], norm).to(dtype).double()
        if columns:
            first, half = part[..., :columns], columns // 2
            across = torch.cat((-first[..., half:], first[..., :half]), -1)
            part = torch.cat((first * cos[:, None] + across * sin[:, None], part[..., columns:]), -1)
        parts[index] = part.flatten(1)
    _check(turned, x, torch.cat((*parts, x[:, dims:].double()), 1))
    whole = turned(x)
    assert torch.equal(keys[slots].flatten(1), whole[:, heads.heads * heads.key_dim : dims])
    assert torch.equal(values[slots].flatten(1), whole[:, dims:])


def test_numbers_that_are_none_spoil_their_row_alone(dtype: torch.dtype) -> None:
    operators, norm = RowOperators(dtype), Norm(torch.ones(40), 1e-6)
    x = _normal(3, 40).to(dtype)
    alone, gated = torch.empty_like(x), x.new_empty(3, 20)
    operators.norm(x, norm, alone)
    operators.gate(x, gated)
    for bad in (float("nan"), float("inf")):
        x[1, 3], x[1, 23] = bad, float("nan")
        out, gates = torch.empty_like(x), torch.empty_like(gated)
        operators.norm(x, norm, out)
        operators.gate(x, gates)
        assert not out[1].isfinite().any()
        assert not gates[1, 3].isfinite()
        assert torch.equal(out[::2], alone[::2])
        assert torch.equal(gates[::2], gated[::2])
