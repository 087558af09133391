"""Rows of a decoder layer on CUDA: Triton kernels in place of the many small operators of transformers' modules.

A normalization takes eight launches by torch's operators and one by its kernel; the gate of an MLP two and one. A
module is replaced where it has the form of one of them, which a pass of a few random numbers through a copy of it on
the CPU decides, to the bit: the kernels round where it does. What has another form stays as it is. Imported only where
there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import silu

from worker.engine.device import KernelCall
from worker.engine.lora.base_layers import FusedPart, FusedProduct

# Maximum number of columns that a program normalizes at once.
_MOST_COLUMNS = 16_384
# Columns of a program of the gate.
_GATE_COLUMNS = 1024
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@triton.jit
def norm_rows(  # type: ignore[no-untyped-def]
    out, x, weight, columns, x_stride, epsilon, OFFSET: tl.constexpr, LATE: tl.constexpr, TILE: tl.constexpr
):
    """Write x / sqrt(mean of x ** 2 + epsilon) * (OFFSET + weight); LATE: round once, at the end. Grid: row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < columns
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / columns + epsilon)
    if not LATE:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + column, (normed * (OFFSET + factors)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(out, both, columns, stride, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write silu of a row's first half, times its second half. Grid: row, block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    gate = tl.load(both + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded as torch's operators do it one after the other.
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + column, (gated * up).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class NormForm:
    """The form of a normalization: `offset` is added to the weight; with `late` its product is rounded, and not before.

    The numbers are rounded to the dtype of x.
    """

    epsilon: float
    offset: float
    late: bool

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute it by torch's operators."""
        numbers = x.float()
        normed = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.late:
            return (normed * (self.offset + weight.float())).to(x.dtype)
        return normed.to(x.dtype) * (self.offset + weight)

    def call(self, x: Tensor, weight: Tensor, out: Tensor) -> KernelCall:
        """Return the launch that fills out [rows, columns], contiguous, of rows x."""
        columns = x.shape[1]
        return KernelCall(
            norm_rows,
            (len(x),),
            {
                "out": out, "x": x, "weight": weight, "columns": columns, "x_stride": x.stride(0),
                "epsilon": self.epsilon,
            },
            {"OFFSET": self.offset, "LATE": self.late, "TILE": triton.next_power_of_2(columns)},
            warps=4 if columns <= 2048 else 8,
            stages=1,
        )  # fmt: skip


# The offsets of normalizations, and whether they round late: Llama's, OLMo 2's and Gemma's.
FORMS = ((0.0, False), (0.0, True), (1.0, True))


def gate_call(both: Tensor, out: Tensor) -> KernelCall:
    """Return the launch that fills out [rows, columns], contiguous, of rows both [rows, 2 * columns]."""
    rows, columns = out.shape
    return KernelCall(
        gate_rows,
        (rows, triton.cdiv(columns, _GATE_COLUMNS)),
        {"out": out, "both": both, "columns": columns, "stride": both.stride(0)},
        {"TILE": _GATE_COLUMNS},
        warps=4,
        stages=1,
    )


def use_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the kernels compute the normalizations and gates of a model whose linear layers are in place."""
    for module in model.modules():
        # Of an earlier call, whose linear layers are not these.
        if getattr(vars(module).get("forward"), "__module__", "") == __name__:
            del module.forward
        form = norm_form(module, dtype)
        if form is not None:
            module.forward = _norm_forward(form, module.weight)  # type: ignore[arg-type]
        product = _gate_product(module)
        if product is not None and is_gated(module, dtype):
            module.forward = _gated_forward(product, module.down_proj)  # type: ignore[arg-type]


@torch.inference_mode()
def norm_form(module: nn.Module, dtype: torch.dtype) -> NormForm | None:
    """Return the form of a normalization; None where a module is none that the kernel computes."""
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    weight = dict(module.named_parameters()).get("weight")
    if not isinstance(epsilon, float) or weight is None or weight.ndim != 1 or len(weight) > _MOST_COLUMNS:
        return None
    if len(list(module.parameters())) != 1 or weight.dtype != dtype or isinstance(module, nn.LayerNorm):
        return None
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(weight), generator=generator).to(dtype)
    # Rows of many sizes: in the smallest epsilon matters.
    x = torch.randn(8, len(weight), generator=generator) * torch.logspace(-4, 3, 8)[:, None]
    x, probe = x.to(dtype), copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(numbers, requires_grad=False)}
    try:
        expected = probe(x)
    except (RuntimeError, TypeError):  # it takes something else
        return None
    forms = (NormForm(epsilon, *form) for form in FORMS)
    return next((form for form in forms if _equal(form.compute(x, numbers), expected)), None)


def _gate_product(module: nn.Module) -> FusedProduct | None:
    """Return the product of an MLP's gate and up; None where it is no product of the two, in this order."""
    gate, up = (getattr(module, name, None) for name in ("gate_proj", "up_proj"))
    if not isinstance(gate, FusedPart) or not isinstance(up, FusedPart) or not hasattr(module, "down_proj"):
        return None
    widths = gate.product.widths
    whole = gate.product is up.product and (gate.index, up.index, len(widths)) == (0, 1, 2)
    return gate.product if whole and widths[0] == widths[1] else None


@torch.inference_mode()
def is_gated(module: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether an MLP computes down(silu(gate(x)) * up(x)): with other, small layers it is tried."""
    probe, generator = copy.copy(module), torch.Generator().manual_seed(0)
    layers = {}
    for name, (inputs, outputs) in {"gate_proj": (16, 24), "up_proj": (16, 24), "down_proj": (24, 16)}.items():
        layers[name] = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        layers[name].weight = nn.Parameter(torch.randn(outputs, inputs, generator=generator).to(dtype), False)
    probe._modules = {**module._modules, **layers}
    x = torch.randn(5, 16, generator=generator).to(dtype)
    try:
        computed = probe(x)
    except (RuntimeError, TypeError):  # it takes something else
        return False
    return _equal(computed, layers["down_proj"](silu(layers["gate_proj"](x)) * layers["up_proj"](x)))


def _equal(actual: Any, expected: Tensor) -> bool:
    return isinstance(actual, Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)


def _norm_forward(form: NormForm, weight: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, len(weight))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        form.call(x, weight, out).launch()
        return out.view(hidden_states.shape)

    return forward


def _gated_forward(product: FusedProduct, down: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        both = product.compute(x)
        out = torch.empty(*x.shape[:-1], product.widths[0], dtype=x.dtype, device=x.device)
        gate_call(both.view(-1, both.shape[-1]), out.view(-1, out.shape[-1])).launch()
        result: Tensor = down(out)
        return result

    return forward
