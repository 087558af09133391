from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from loraplex.contracts.artifacts.quantization import parse_quantization
from loraplex.worker.engine.quantized.layers import QuantizedLinear
from loraplex.worker.engine.quantized.weight import QuantizedWeight, quantize, quantize_weight, round_inputs
from tests.worker.engine.triton_runs import compiled_for

SCHEMES = [(8, None, True), (8, None, False), (8, 32, True), (4, 32, True), (4, 32, False), (4, None, True)]

AT_NIGHT = [pytest.param(*case, marks=pytest.mark.nightly) for case in ((80, "fp8", 40), (100, "int8", 200))]


@pytest.mark.parametrize(("bits", "group", "symmetric"), SCHEMES)
def test_codes_are_about_half_a_step_from_the_weight(bits: int, group: int | None, symmetric: bool) -> None:
    weight = torch.randn(5, 80, generator=torch.Generator().manual_seed(1)) + (0 if symmetric else 0.5)
    quantized = quantize(weight, bits, group, symmetric=symmetric)
    groups = 1 if group is None else 3
    assert (quantized.out_features, quantized.in_features, quantized.scales.shape) == (5, 80, (5, groups))
    assert (quantized.zeros is None) == symmetric
    assert quantized.codes.dtype == (torch.int8 if bits == 8 else torch.uint8)
    steps = quantized.scales.repeat_interleave(quantized.group, 1)[:, :80]
    errors = (quantized.dequantize() - weight) / steps
    # Errors within half a step have a mean square of 1/12. Ranges of 4 bits may leave out extremes.
    assert errors.square().mean() <= 1.2 / 12
    assert (errors.abs() <= (2 if bits == 4 else 1.001)).all()


def test_weights_on_a_grid_without_zero_lose_little_in_4_bits() -> None:
    """Weights of 16 levels from any first one on, like those of GGUF's Q4_1."""
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(16, (40, 3, 32), generator=generator).float()
    levels[..., :2] = torch.tensor([0.0, 15.0])
    scales, first = torch.rand(2, 40, 3, 1, generator=generator)
    weight = ((levels - 4 - 8 * first) * (0.01 + scales)).flatten(1)
    quantized = quantize(weight, 4, 32, symmetric=False)
    assert torch.equal(quantized.unpacked(), levels.flatten(1).byte())
    # A zero point is off by a sixteenth of a step at most, a bfloat16 scale by less at the last level.
    assert ((quantized.dequantize() - weight).abs() <= quantized.scales.repeat_interleave(32, 1) / 8).all()


def test_4_bits_of_normal_weights_have_less_error_than_the_range_of_each_group_has() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    groups = weight.view(64, 8, 32)
    scales = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    plain = (groups - groups.amin(2, keepdim=True)) / scales
    error = ((plain.round() - plain) * scales).norm()
    assert (quantize(weight, 4, 32, symmetric=False).dequantize() - weight).norm() < 0.97 * error


def test_the_definition_of_codes() -> None:
    eight = QuantizedWeight(torch.tensor([[-3, 4]], dtype=torch.int8), torch.tensor([[0.5]]), None, 8, 2)
    assert eight.dequantize().tolist() == [[-1.5, 2.0]]
    shifted = QuantizedWeight(eight.codes, eight.scales, torch.tensor([[1.0]]), 8, 2)
    assert shifted.dequantize(torch.bfloat16).tolist() == [[-2.0, 1.5]]
    # Columns 0 and 1 are codes 9 and 2, columns 2 and 3 codes 15 and 0, in groups of two.
    codes = torch.tensor([[9 | 2 << 4, 15]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0]])
    assert QuantizedWeight(codes, scales, None, 4, 2).dequantize().tolist() == [[0.5, -3.0, 14.0, -16.0]]
    # Zero points of 1 1/8 and 15 codes.
    zeros = torch.tensor([[9, 120]], dtype=torch.uint8)
    assert QuantizedWeight(codes, scales, zeros, 4, 2).dequantize().tolist() == [[3.9375, 0.4375, 0.0, -30.0]]


def test_the_layer_computes_with_the_dequantized_weight_and_moves_without_a_cast() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((6, 16), (6,), (2, 3, 16)))
    layer = QuantizedLinear(quantize(weight, 8), bias)
    assert torch.equal(layer(x), linear(x, layer.weight.dequantize(), bias))
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert layer.weight.scales.dtype == torch.float32
    assert layer.to("meta").weight.codes.device.type == "meta"


def test_inputs_are_rounded_beside_the_largest_of_their_128_columns() -> None:
    x = torch.zeros(2, 130)
    x[0, :4], x[0, 128:] = torch.tensor([127.0, 1.4, -1.6, 0.5]), torch.tensor([-0.0127, 0.0002])
    expected = torch.zeros(2, 130)
    expected[0, :4], expected[0, 128:] = torch.tensor([127.0, 1.0, -2.0, 0.0]), torch.tensor([-0.0127, 0.0002])
    torch.testing.assert_close(round_inputs(x), expected)
    layer = QuantizedLinear(replace(quantize(torch.randn(6, 130), 8), dynamic=True))
    assert torch.equal(layer(x), linear(round_inputs(x), layer.weight.dequantize()))
    assert not torch.equal(layer(x), linear(x, layer.weight.dequantize()))


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize(("capability", "name", "rows"), [(90, "int4", 1), *AT_NIGHT])
def test_the_product_with_codes_compiles(capability: int, name: str, rows: int) -> None:
    """In tiles of every height; int4 has groups with zero points, fp8's numbers no device must know."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    from loraplex.worker.engine.quantized.cuda import product_calls

    scheme = parse_quantization(name)
    assert scheme is not None
    weight, x = quantize_weight(torch.ones(512, 2048), scheme), torch.zeros(rows, 2048, dtype=torch.bfloat16)
    y = torch.zeros(rows, 512, dtype=torch.bfloat16)
    product, *adding = product_calls(x, weight, y[0], y)
    assert len(adding) == (rows <= 64), "few outputs are in splits where rows are few"
    assert product.grid[2] == (2 if adding else 1)
    ptx = compiled_for(capability, product).asm["ptx"]
    for call in adding:
        compiled_for(capability, call)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]+\], \[[^]]+\], (0x\w+)", ptx)

    assert copies.count("0x10") + len(re.findall(r"ld\.global\.v4", ptx)) >= 4, "reads are 16 bytes wide"
