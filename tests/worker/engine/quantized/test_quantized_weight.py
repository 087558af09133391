from __future__ import annotations

import re

import pytest
import torch
from torch.nn.functional import linear

from artifacts.quantization import parse_quantization
from tests.worker.engine.triton_runs import compiled_for
from worker.engine.quantized.weight import QuantizedLinear, QuantizedWeight, quantize, quantize_weight

SCHEMES = [(8, None, True), (8, None, False), (8, 32, True), (4, 32, True), (4, 32, False), (4, None, True)]


@pytest.mark.parametrize(("bits", "group", "symmetric"), SCHEMES)
def test_codes_are_within_half_a_step_of_the_weight(bits: int, group: int | None, symmetric: bool) -> None:
    weight = torch.randn(5, 80, generator=torch.Generator().manual_seed(1)) + (0 if symmetric else 0.5)
    quantized = quantize(weight, bits, group, symmetric=symmetric)
    groups = 1 if group is None else 3
    assert (quantized.out_features, quantized.in_features, quantized.scales.shape) == (5, 80, (5, groups))
    assert (quantized.zeros is None) == symmetric
    assert quantized.codes.dtype == (torch.int8 if bits == 8 else torch.uint8)
    steps = quantized.scales.repeat_interleave(quantized.group, 1)[:, :80]
    # The highest code of a symmetric range is half a step below its end, and a zero point is rounded.
    assert ((quantized.dequantize() - weight).abs() <= steps * 1.001).all()


def test_the_definition_of_codes() -> None:
    eight = QuantizedWeight(torch.tensor([[-3, 4]], dtype=torch.int8), torch.tensor([[0.5]]), None, 8, 2)
    assert eight.dequantize().tolist() == [[-1.5, 2.0]]
    shifted = QuantizedWeight(eight.codes, eight.scales, torch.tensor([[1.0]]), 8, 2)
    assert shifted.dequantize(torch.bfloat16).tolist() == [[-2.0, 1.5]]
    # Columns 0 and 1 are codes 9 and 2, columns 2 and 3 codes 15 and 0, in groups of two.
    codes = torch.tensor([[9 | 2 << 4, 15]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0]])
    assert QuantizedWeight(codes, scales, None, 4, 2).dequantize().tolist() == [[0.5, -3.0, 14.0, -16.0]]
    zeros = torch.tensor([[1.0, 15.0]])
    assert QuantizedWeight(codes, scales, zeros, 4, 2).dequantize().tolist() == [[4.0, 0.5, 0.0, -30.0]]


def test_the_layer_computes_with_the_dequantized_weight_and_moves_without_a_cast() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((6, 16), (6,), (2, 3, 16)))
    layer = QuantizedLinear(quantize(weight, 8), bias)
    assert torch.equal(layer(x), linear(x, layer.weight.dequantize(), bias))
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert layer.weight.scales.dtype == torch.float32
    assert layer.to("meta").weight.codes.device.type == "meta"


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize(("capability", "name", "rows"), [(80, "fp8", 40), (90, "int4", 1), (100, "int8", 200)])
def test_the_product_with_codes_compiles(capability: int, name: str, rows: int) -> None:
    """In tiles of every height; int4 has groups with zero points, fp8's numbers no device must know."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    from worker.engine.quantized.cuda import product_call

    scheme = parse_quantization(name)
    assert scheme is not None
    weight, x = quantize_weight(torch.ones(512, 512), scheme), torch.zeros(rows, 512, dtype=torch.bfloat16)
    ptx = compiled_for(capability, product_call(x, weight, x[0], torch.zeros_like(x))).asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]+\], \[[^]]+\], (0x\w+)", ptx)

    assert copies.count("0x10") + len(re.findall(r"ld\.global\.v4", ptx)) >= 4, "reads are 16 bytes wide"
