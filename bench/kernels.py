"""Linear layers by rows, against what the processor can do: `python -m bench.kernels [--quick] [--json FILE]`.

One layer of qwen2-0.4b's MLP, over more weights than a cache holds, in float32, in the dtype that is picked for
bfloat16 (auto), over int8 and int4, with inputs rounded to 8 bits or not, in turn with the ceilings. The least time of
a layer is that of reading its weights or that of its products by the widest instruction of their dtype: of codes, whose
inputs are not rounded to 8 bits, that of bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor, nn

from bench.ceilings import CeilingMeter, CeilingSize, arithmetic_per_s
from bench.command import run_command
from bench.report import Aim, Report, progress
from loraplex.contracts.artifacts.quantization import parse_quantization
from loraplex.worker.engine.device import dtype_name
from loraplex.worker.engine.linear.layouts import laid_out
from loraplex.worker.engine.quantized.layers import QuantizedLinear
from loraplex.worker.engine.quantized.weight import quantize_weight

_AIMED, _SCHEMES = (1, 8, 32, 512), ("int8", "int8-dynamic", "int4", "int4-dynamic")
AIMS = {
    **{f"{name}_over_bfloat16_{rows}": Aim(at_least=1.2) for name in ("int8", "int8_dynamic") for rows in _AIMED},
    **{f"{name}_over_bfloat16_{rows}": Aim() for name in ("int4", "int4_dynamic") for rows in _AIMED},
    **{f"auto_of_ceiling_{rows}": Aim() for rows in _AIMED},
    "int8_instruction_over_bfloat16": Aim(),
}


@dataclass(frozen=True)
class Setup:
    """The layer, the rows that it is given, the bytes of bfloat16 weights that a pass reads, and the rounds of all."""

    outputs: int = 4864
    columns: int = 896
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 512)
    weights_bytes: int = 192 * 2**20
    rounds: int = 15


QUICK = Setup(outputs=1024, weights_bytes=8 * 2**20, rounds=2)


@dataclass(frozen=True)
class Form:
    """A form of the layer: the dtypes of inputs and of products, the layers of a pass, the bytes of one weight."""

    dtype: torch.dtype
    products: str
    layers: Sequence[Callable[[Tensor], Tensor]]
    weight_bytes: int

    def layer_s(self, x: Tensor, passes: int) -> float:
        """Return the mean seconds of a layer over the first `passes` of them."""
        x = x.to(self.dtype)
        start = time.perf_counter()
        for layer in self.layers[:passes]:
            layer(x)
        return (time.perf_counter() - start) / passes


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("kernels", __doc__ or "", lambda quick: measure(QUICK if quick else Setup(), quick))


@torch.inference_mode()
def measure(setup: Setup, quick: bool) -> Report:
    """Make the layers, and measure all forms with all rows, in turn."""
    progress("laying out the weights")
    forms = _forms(setup)
    meter = CeilingMeter(CeilingSize(setup.weights_bytes))
    wide: dict[str, float] = dict.fromkeys(("float32", "bfloat16", "int8"), 0.0)
    taken: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in forms for rows in setup.rows}
    for turn in range(setup.rounds + 1):
        progress(f"round {turn} of {setup.rounds}" if turn else "warming up")
        meter.measure()
        wide = {dtype: max(rate, arithmetic_per_s(dtype)) for dtype, rate in wide.items()}
        for rows in setup.rows:
            x = torch.randn(rows, setup.columns)
            passes = max(1, len(forms["auto"].layers) // max(1, rows // 16))
            for name, form in forms.items():
                seconds = form.layer_s(x, passes)
                if turn:
                    taken[name, rows].append(seconds)
    bytes_per_s = max(ceilings.bytes_per_s for ceilings in meter.measured)
    return _report(setup, quick, forms, taken, wide, bytes_per_s)


def _forms(setup: Setup) -> Mapping[str, Form]:
    """Lay out one weight in all forms; each layer of a pass has its own memory."""
    outputs, columns = setup.outputs, setup.columns
    count = max(1, setup.weights_bytes // (2 * outputs * columns))
    weight = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(0))
    plain = nn.Linear(columns, outputs, bias=False).requires_grad_(False)
    plain.weight.copy_(weight)
    forms = {}
    for name, dtype in (("float32", torch.float32), ("auto", torch.bfloat16)):
        linear = plain.to(dtype)
        layers = [_layer(linear, dtype) for _ in range(count)]
        forms[name] = Form(dtype, dtype_name(dtype), layers, linear.weight.nbytes)
    for name in _SCHEMES:
        scheme = parse_quantization(name)
        assert scheme is not None, "the name of a scheme"
        codes = QuantizedLinear(quantize_weight(weight, scheme))
        layers = [_layer(codes, torch.bfloat16) for _ in range(count)]
        products = "int8" if scheme.dynamic else "bfloat16"
        forms[name] = Form(torch.bfloat16, products, layers, scheme.weight_bytes(outputs, columns))
    return forms


def _layer(linear: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    layer = laid_out(linear, dtype)
    assert layer is not None, "a processor with a kernel for the codes"
    return layer


def _report(
    setup: Setup,
    quick: bool,
    forms: Mapping[str, Form],
    taken: Mapping[tuple[str, int], Sequence[float]],
    wide: Mapping[str, float],
    bytes_per_s: float,
) -> Report:
    operations = {rows: 2 * rows * setup.outputs * setup.columns for rows in setup.rows}

    def of_ceiling(name: str, rows: int) -> float:
        form = forms[name]
        least_s = max(form.weight_bytes / bytes_per_s, operations[rows] / wide[form.products])
        return least_s / min(taken[name, rows])

    table = [
        {"rows": str(rows)}
        | {
            name: f"{operations[rows] / min(taken[name, rows]) / 1e9:.0f} ({of_ceiling(name, rows):.2f})"
            for name in forms
        }
        for rows in setup.rows
    ]
    ceilings = {"memory, GB/s": bytes_per_s / 1e9} | {f"{dtype}, GFLOP/s": rate / 1e9 for dtype, rate in wide.items()}
    aimed = [rows for rows in _AIMED if rows in setup.rows]
    ratios = {
        f"{name.replace('-', '_')}_over_bfloat16_{rows}": _ratio(taken["auto", rows], taken[name, rows])
        for name in _SCHEMES
        for rows in aimed
    }
    ratios |= {f"auto_of_ceiling_{rows}": of_ceiling("auto", rows) for rows in aimed}
    return Report(
        name="kernels",
        command="python -m bench.kernels" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=[*table, ceilings],
        ratios=ratios | {"int8_instruction_over_bfloat16": wide["int8"] / wide["bfloat16"]},
        aims=AIMS,
    )


def _ratio(other_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return median(other / ours for other, ours in zip(other_s, ours_s, strict=True))


if __name__ == "__main__":
    main()
