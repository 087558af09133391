"""Compares the product with quantized weights with its definition, case by case: python product_cases.py cpu|cuda.

Prints {dtype: {case: difference}} as JSON: the largest difference from the product in float64 of the inputs and the
weight (codes - zeros) * scales, over the largest number. "alone": the same of rows that are computed alone and beside
others, in one tile and in another; "same tile": of any numbers, in tiles of one height. See triton_runs.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.contracts.artifacts.quantization import parse_quantization
from loraplex.worker.engine.quantized import cuda
from loraplex.worker.engine.quantized.cuda import can_multiply, multiply
from loraplex.worker.engine.quantized.weight import QuantizedWeight, quantize, quantize_weight
from tests.worker.engine.interpreted import interpret_quickly

SCHEMES = ("int8", "int8-zero-point", "int4", "int4-64", "fp8")
# Rows of each height of a tile; outputs and columns, of which the last have a short group, no whole tile, and splits.
ROWS, SHAPES = (1, 17, 70), ((32, 128), (40, 592))


def weights(outputs: int, columns: int) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield a weight in every scheme that a model is loaded in, and in two that checkpoints have."""
    numbers = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(1)) + 0.3
    for name in SCHEMES:
        scheme = parse_quantization(name)
        assert scheme is not None
        yield name, quantize_weight(numbers, scheme)
    yield "int4, symmetric", quantize(numbers, 4, 32)
    yield "int8, groups of 48", quantize(numbers, 8, 48, symmetric=False)


def difference(rows: int, weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> float:
    """Compare the product of random rows, with a bias."""
    generator = torch.Generator().manual_seed(2)
    x, bias = torch.randn(rows, weight.in_features, generator=generator), torch.randn(weight.out_features)
    x, bias = x.to(device, dtype), bias.to(device, dtype)
    # A view into wider rows, of three dimensions.
    wide = torch.cat([x, x], 1)[None, :, : weight.in_features]
    y = multiply(wide, weight.to(device), bias)
    expected = x.double().cpu() @ weight.dequantize().double().t() + bias.double().cpu()
    return relative(y[0].double().cpu(), expected)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest number, infinite where one is not finite."""
    return float(((actual - expected).abs().max() / expected.abs().max()).nan_to_num(float("inf")))


def same_tile(device: torch.device, dtype: torch.dtype) -> float:
    """Compare a row by itself with the same beside others, in splits, of which nothing may depend on the rows."""
    generator = torch.Generator().manual_seed(5)
    weight = quantize(torch.randn(24, 592, generator=generator), 8).to(device)
    x = torch.randn(16, 592, generator=generator).to(device, dtype)
    assert len(cuda.product_calls(x, weight, None, x.new_empty(16, 24))) == 2
    return relative(multiply(x[7:8], weight, None), multiply(x, weight, None)[7:8])


def alone(device: torch.device, dtype: torch.dtype) -> float:
    """Compare rows by themselves with the same beside others; products of whole numbers are exact in any order."""
    weight = quantize(torch.randn(24, 96, generator=torch.Generator().manual_seed(3)), 4, 32)
    weight = replace(weight, scales=torch.full_like(weight.scales, 0.5)).to(device)
    x = torch.randint(-8, 9, (70, 96), generator=torch.Generator().manual_seed(4)).to(device, dtype)
    together = multiply(x, weight, None)
    parts = [multiply(x[at : at + count], weight, None) for at, count in ((0, 1), (3, 20), (69, 1))]
    return max(relative(part, together[at : at + len(part)]) for part, at in zip(parts, (0, 3, 69), strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = torch.device(sys.argv[1])
    if place.type == "cpu":
        interpret_quickly()
    cuda._LEAST_SPLIT = 256
    assert not can_multiply(quantize(torch.ones(4, 48), 8, 24))
    results = {}
    # bfloat16 is wrong in the interpreter.
    for kind in ("float32", "float16") if place.type == "cpu" else ("float32", "float16", "bfloat16"):
        number = getattr(torch, kind)
        results[kind] = {
            f"{name}, {rows} rows, {shape}": difference(rows, one, place, number)
            for shape in SHAPES
            for name, one in weights(*shape)
            for rows in ROWS
        } | {"alone": alone(place, number), "same tile": same_tile(place, number)}
    print(json.dumps(results))
