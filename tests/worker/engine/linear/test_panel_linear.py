"""Linear layers over panels, each against float64 products with the very weights that they stand for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from loraplex.kernels.linear import compile_linear
from loraplex.kernels.tiles import bfloat16_products
from loraplex.kernels.weight_vectors import EMULATED, HAS_BYTES, PAIRS, TILES, V
from loraplex.worker.engine.linear import layer as panel_layer
from loraplex.worker.engine.linear.layer import FixedLinear, PanelLayer, PanelLinear
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedLinear
from loraplex.worker.engine.quantized.weight import QuantizedWeight, quantize, round_inputs

# Outputs and columns: less than a panel and a vector, whole ones, and more with a rest.
SHAPES = [(5, 16), (33, 86), (100, 290)]
MAX_ROWS = 40
NO_BYTES = pytest.mark.skipif(not HAS_BYTES, reason="no products of bytes on this processor")
# Kinds of weights with a kernel each, which is compiled for seconds.
AT_NIGHT = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("int8 zeros", "int4")]
QUANTIZED = ["int8", "int4 zeros", *AT_NIGHT]
BFLOAT16, INT8 = (pytest.param(kind, marks=pytest.mark.nightly) for kind in ("bfloat16", "int8"))
# Of products of bfloat16 by tiles, for which codes are unpacked.
IN_TILES = ["int4 zeros", BFLOAT16, INT8, *AT_NIGHT]


def _linear(outputs: int, columns: int, kind: str, seed: int = 0) -> AnyLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, columns, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    match kind.split():
        case ["int8"]:
            return QuantizedLinear(quantize(weight, 8), bias)
        case ["int8", "zeros"]:
            return QuantizedLinear(quantize(weight + 0.5, 8, symmetric=False), bias)
        case ["int4"]:
            return QuantizedLinear(quantize(weight, 4, 32))
        case ["int4", "zeros"]:
            return QuantizedLinear(quantize(weight + 0.5, 4, 64, symmetric=False), bias)
    linear = nn.Linear(columns, outputs).requires_grad_(False)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear.to(getattr(torch, kind))


def _expected(linear: AnyLinear, x: Tensor) -> Tensor:
    weight = linear.weight.dequantize() if isinstance(linear, QuantizedLinear) else linear.weight
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ weight.double().t() + bias


def _check(layer: PanelLayer, linear: AnyLinear, tolerance: float, dtype: torch.dtype) -> None:
    """Check the outputs, and that a row's bits are the same beside any other rows."""
    x = torch.randn(MAX_ROWS, linear.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, y = _expected(linear, x), layer(x)
    assert y.dtype == dtype
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17):
        assert torch.equal(layer(x[-rows:]), y[-rows:]), f"{rows} rows"
    assert layer(x[:0]).shape == (0, linear.out_features)
    assert torch.equal(layer(x[:6].view(2, 3, -1)), y[:6].view(2, 3, -1))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *QUANTIZED])
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_products_are_those_of_the_weight(outputs: int, columns: int, kind: str) -> None:
    linear = _linear(outputs, columns, kind)
    _check(PanelLinear(linear, torch.float32), linear, 1e-6, torch.float32)


@pytest.mark.skipif(V != 16, reason="tiles have panels of 32 outputs")
@pytest.mark.parametrize("kind", IN_TILES)
@pytest.mark.parametrize(("outputs", "columns"), [(33, 96), (100, 288), (5, 2304)])
def test_products_of_tiles_are_those_of_the_weight(outputs: int, columns: int, kind: str) -> None:
    """The code for AMX, over tiles in memory."""
    linear = _linear(outputs, columns, kind)
    _check(PanelLinear(linear, torch.bfloat16, EMULATED), linear, 5e-3, torch.bfloat16)


@pytest.mark.skipif(V != 16, reason="tiles have panels of 32 outputs")
@pytest.mark.parametrize("kind", [BFLOAT16, "int4 zeros"])
def test_many_rows_have_the_bits_that_each_has_alone(kind: str) -> None:
    """More than tiles keep the sums of, of columns that are multiplied in parts."""
    linear = _linear(40, 1088, kind)
    layer = PanelLinear(linear, torch.bfloat16, EMULATED)
    x = torch.randn(550, 1088, generator=torch.Generator().manual_seed(2)).bfloat16()
    y = layer(x)
    assert (y - _expected(linear, x)).abs().max() <= 5e-3 * y.abs().max()
    for row in (0, 31, 500, 511, 512, 549):
        assert torch.equal(layer(x[row : row + 1]), y[row : row + 1]), row


@pytest.mark.skipif(V != 16, reason="tiles have panels of 32 outputs")
def test_instructions_of_tiles_are_assembled() -> None:
    """They are compiled on every processor, but run only where there are any."""
    assert compile_linear("int4", "bfloat16", TILES, scales=True, zeros=True).address


@pytest.mark.skipif(bfloat16_products(16) != PAIRS, reason="no products of pairs of bfloat16 on this processor")
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_products_of_pairs_are_those_of_the_weight(outputs: int, columns: int) -> None:
    linear = _linear(outputs, columns, "bfloat16")
    _check(PanelLinear(linear, torch.bfloat16, PAIRS), linear, 5e-3, torch.bfloat16)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_rows_in_fixed_point_lose_less_than_bfloat16_does(outputs: int, columns: int, kind: str) -> None:
    linear = _linear(outputs, columns, kind)
    _check(FixedLinear(linear, torch.float32), linear, 1e-4, torch.float32)


@pytest.mark.parametrize("kind", ["int8", "int4", "int4 zeros"])
@pytest.mark.parametrize("products", [False, pytest.param(True, marks=NO_BYTES)])
@pytest.mark.parametrize(("outputs", "columns"), [*SHAPES, (40, 1088)])
def test_rows_rounded_to_8_bits_have_exact_sums(
    outputs: int, columns: int, products: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With products of bytes or without: the sums of codes are integers, and only their scales are float32."""
    monkeypatch.setattr(panel_layer, "HAS_BYTES", products)
    linear = _linear(outputs, columns, kind)
    rounded = FixedLinear(linear, torch.float32, 8)
    x = torch.randn(MAX_ROWS, columns, generator=torch.Generator().manual_seed(1))
    expected, y = _expected(linear, round_inputs(x)), rounded(x)
    assert (y - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert not torch.allclose(expected.float(), _expected(linear, x).float(), rtol=1e-4), "rounding changes nothing"
    for rows in (1, 3, 7, 12, 13, 25):
        assert torch.equal(rounded(x[-rows:]), y[-rows:]), f"{rows} rows"


@pytest.mark.parametrize("kind", ["int8", "int4 zeros"])
def test_a_segment_of_tiny_or_huge_numbers_is_rounded_beside_itself(kind: str) -> None:
    linear = _linear(33, 256, kind)
    rounded = FixedLinear(linear, torch.float32, 8)
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200], x[3, :128], x[3, 128:] = 1e30, 1e-34, 1e-3, 1e3
    y, expected = rounded(x), _expected(linear, round_inputs(x))
    assert linear.bias is not None
    assert torch.equal(y[0], linear.bias)
    assert ((y - expected).abs() <= 1e-6 * expected.abs().amax(1, keepdim=True)).all()
    x[1, 7] = float("nan")
    assert not rounded(x)[1].isfinite().any()
    assert torch.equal(rounded(x)[::2], y[::2])


def test_sums_of_the_largest_numbers_in_fixed_point_fit_their_integers() -> None:
    """Of codes and zero points at their ends, in groups as long as integer sums are."""
    codes = torch.tensor([255, 0, 255, 0], dtype=torch.uint8)[:, None].expand(4, 128).contiguous()
    zeros = torch.tensor([0, 128, 128, 0], dtype=torch.uint8)[:, None].expand(4, 2).contiguous()
    linear = QuantizedLinear(QuantizedWeight(codes, torch.ones(4, 2).bfloat16(), zeros, 4, 128))
    x = torch.full((1, 256), 3.0)
    torch.testing.assert_close(FixedLinear(linear, torch.float32)(x), x @ linear.weight.dequantize().t())


def test_products_of_bfloat16_are_rounded_once() -> None:
    linear = _linear(70, 130, "bfloat16")
    for layer in (PanelLinear(linear, torch.bfloat16), FixedLinear(_linear(70, 130, "int8"), torch.bfloat16)):
        of = linear if isinstance(layer, PanelLinear) else _linear(70, 130, "int8")
        _check(layer, of, 5e-3, torch.bfloat16)


def test_a_row_with_numbers_that_are_none_spoils_itself_alone() -> None:
    for layer in (
        PanelLinear(_linear(33, 80, "int8"), torch.float32),
        FixedLinear(_linear(33, 80, "int8"), torch.float32),
    ):
        x = torch.randn(3, 80)
        alone = layer(x)
        for bad in (float("nan"), float("inf")):
            x[1, 7] = bad
            assert not layer(x)[1].isfinite().any()
            assert torch.equal(layer(x)[::2], alone[::2])


def test_fixed_point_takes_the_largest_and_the_smallest_numbers() -> None:
    linear = _linear(16, 256, "int8")
    layer = FixedLinear(linear, torch.float32)
    x = torch.zeros(4, 256)
    x[1, 3], x[2, 200], x[3, :128], x[3, 128:] = 1e30, 1e-34, 1e-3, 1e3
    y = layer(x)
    assert linear.bias is not None
    assert torch.equal(y[0], linear.bias)
    expected = _expected(linear, x)
    assert ((y - expected).abs() <= 1e-4 * expected.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize(("bits", "group"), [(4, 512), (8, 1024), (8, 144)])
def test_sums_of_long_groups_fit_integers(bits: int, group: int) -> None:
    weight = torch.rand(16, 1296, generator=torch.Generator().manual_seed(3))
    linear = QuantizedLinear(quantize(weight, bits, group, symmetric=bits == 8))
    x = torch.tensor([[1.0], [-1.0]]).expand(2, 1296)
    expected = _expected(linear, x)
    assert ((FixedLinear(linear, torch.float32)(x) - expected).abs() <= 1e-4 * expected.abs().amax()).all()


def test_threads_call_a_layer_at_the_same_time() -> None:
    layers = [
        FixedLinear(_linear(100, 290, "int8"), torch.float32),
        PanelLinear(_linear(100, 290, "int8"), torch.float32),
    ]
    x = torch.randn(9, 290)
    expected = [layer(x) for layer in layers]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for layer, alone in zip(layers, expected, strict=True):
                assert all(torch.equal(y, alone) for y in pool.map(layer, [x] * 8))
