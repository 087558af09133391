"""Normalizations of decoder layers on CUDA, each in one launch with the addition before it.

    x ─▶ norm ─▶ attention ─▶ + x, norm ─▶ MLP ─▶ +, norm of the next layer ─▶

Families that normalize before they add (Gemma 2 and 3, OLMo 2) do that in the same launch. A layer is replaced where a
copy of it, with simple functions in place of its modules, adds in one of these ways; a normalization where a copy of it
gives the numbers of one of FORMS. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from loraplex.worker.engine.device import KernelCall

# Maximum number of columns that a program normalizes at once.
_MOST_COLUMNS = 16_384
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@triton.jit
def weighted(normed, factors, dtype: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply normalized numbers by OFFSET + weight; LATE: round once, at the end."""
    if not LATE:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * (OFFSET + factors.to(tl.float32))).to(dtype)


@triton.jit
def norm_rows(  # type: ignore[no-untyped-def]
    out, x, added, sums, weight, inner, columns, x_stride, epsilon, inner_epsilon,
    OFFSET: tl.constexpr, LATE: tl.constexpr, INNER_OFFSET: tl.constexpr, INNER_LATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write x / sqrt(mean of x ** 2 + epsilon) * (OFFSET + weight). Grid: row.

    With `added` that of x + added, which go to `sums`; with `inner`, a weight, `added` is normalized first. Without
    `weight` the sums are all.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < columns
    dtype: tl.constexpr = x.dtype.element_ty
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        more = tl.load(added + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if inner is not None:
            scale = tl.rsqrt(tl.sum(more * more, 0) / columns + inner_epsilon)
            factors = tl.load(inner + column, mask=inside, other=0.0)
            more = weighted(more * scale, factors, dtype, INNER_OFFSET, INNER_LATE).to(tl.float32)
        numbers = (numbers + more).to(dtype).to(tl.float32)
        tl.store(sums + row * columns + column, numbers.to(dtype), mask=inside)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / columns + epsilon)
        factors = tl.load(weight + column, mask=inside, other=0.0)
        tl.store(out + row * columns + column, weighted(numbers * scale, factors, dtype, OFFSET, LATE), mask=inside)


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


# The offsets of normalizations, and whether they round late: Llama's, OLMo 2's and Gemma's.
FORMS = ((0.0, False), (0.0, True), (1.0, True))
_NO_FORM = NormForm(0.0, 0.0, late=False)


class NormKernel:
    """A normalization by its kernel. What was normalized together with an addition waits here for the module's call."""

    def __init__(self, form: NormForm, weight: Tensor) -> None:
        self.form = form
        self.weight = weight
        self.waiting: tuple[Tensor, Tensor] | None = None

    def compute(self, hidden_states: Tensor) -> Tensor:
        """Normalize hidden states [..., columns]."""
        waiting, self.waiting = self.waiting, None
        # Compared by identity, so that any other tensor gets its own numbers.
        if waiting is not None and waiting[0] is hidden_states:
            return waiting[1]
        x = hidden_states.reshape(-1, len(self.weight))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm_call(self, x, out).launch()
        return out.view(hidden_states.shape)


def norm_call(
    norm: NormKernel | None, x: Tensor, out: Tensor | None, added: Tensor | None = None, sums: Tensor | None = None,
    inner: NormKernel | None = None,
) -> KernelCall:  # fmt: skip
    """Return the launch that fills out [rows, columns], contiguous, of rows x, or of sums = x + added.

    These two are contiguous as well. `inner` normalizes `added` first; without `norm` there is no out.
    """
    columns = x.shape[1]
    form, inner_form = (one.form if one is not None else _NO_FORM for one in (norm, inner))
    return KernelCall(
        norm_rows,
        (len(x),),
        {
            "out": out, "x": x, "added": added, "sums": sums, "weight": norm and norm.weight,
            "inner": inner and inner.weight, "columns": columns, "x_stride": x.stride(0), "epsilon": form.epsilon,
            "inner_epsilon": inner_form.epsilon,
        },
        {
            "OFFSET": form.offset, "LATE": form.late, "INNER_OFFSET": inner_form.offset, "INNER_LATE": inner_form.late,
            "TILE": triton.next_power_of_2(columns),
        },
        warps=4 if columns <= 2048 else 8,
        stages=1,
    )  # fmt: skip


def add_rows(x: Tensor, added: Tensor, inner: NormKernel | None, following: NormKernel | None) -> Tensor:
    """Return x + added [..., columns]; `inner` normalizes what is added, `following` the sum for its next call."""
    rows, others = (part.reshape(-1, x.shape[-1]).contiguous() for part in (x, added))
    sums = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    out = None if following is None else torch.empty_like(sums)
    norm_call(following, rows, out, others, sums, inner).launch()
    result = sums.view(x.shape)
    if following is not None and out is not None:
        following.waiting = result, out.view(x.shape)
    return result


@torch.inference_mode()
def norm_form(module: nn.Module, dtype: torch.dtype) -> NormForm | None:
    """Return the form of a normalization; None where a module is none that the kernel computes."""
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    weight = dict(module.named_parameters()).get("weight")
    if not isinstance(epsilon, float) or weight is None or weight.ndim != 1 or len(weight) > _MOST_COLUMNS:
        return None
    if len(list(module.parameters())) != 1 or weight.dtype != dtype or isinstance(module, nn.LayerNorm):
        return None
    probe, numbers = with_random_weight(module)
    # Rows of many sizes: in the smallest epsilon matters.
    x = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 3, 8)[:, None]
    x = x.to(dtype)
    try:
        expected = probe(x)
    except (RuntimeError, TypeError):  # it takes something else
        return None
    forms = (NormForm(epsilon, *form) for form in FORMS)
    return next((form for form in forms if equal(form.compute(x, numbers), expected)), None)


def with_random_weight(norm: Any) -> tuple[nn.Module, Tensor]:
    """Return a copy of a normalization on the CPU with a random weight, and the weight."""
    probe = copy.copy(norm)
    numbers = torch.randn(len(norm.weight), generator=torch.Generator().manual_seed(0)).to(norm.weight.dtype)
    probe._parameters = {"weight": nn.Parameter(numbers, requires_grad=False)}
    return probe, numbers


def equal(actual: Any, expected: Tensor) -> bool:
    """Tell whether a result is this tensor, to the bit."""
    return isinstance(actual, Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The names of a layer's normalizations: of what attention and MLP get, and of what they give; None for none."""

    before: str | None
    attended: str | None
    between: str | None
    computed: str | None

    @property
    def modules(self) -> set[str]:
        """Return the names of all modules."""
        names = {self.before, self.attended, self.between, self.computed}
        return {"self_attn", "mlp"} | {name for name in names if name is not None}


LAYER_FORMS = (
    LayerForm("input_layernorm", None, "post_attention_layernorm", None),
    LayerForm(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    LayerForm("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


def use_layers(model: Any, norms: Mapping[nn.Module, NormKernel]) -> None:
    """Replace the layers that add in one of these ways, with normalizations that are in `norms`."""
    for form in LAYER_FORMS:
        layers: list[Any] = [module for module in model.modules() if set(module._modules) == form.modules]
        for index, layer in enumerate(layers):
            following: Any = getattr(model.base_model, "norm", None)
            if index + 1 < len(layers) and form.before is not None:
                following = getattr(layers[index + 1], form.before)
            own = [getattr(layer, name) for name in form.modules - {"self_attn", "mlp"}]
            if all(norm in norms for norm in (*own, following)) and adds_residuals(layer, form):
                layer.forward = _layer_forward(layer, form, norms, norms[following] if form.before else None)


class _Simple(nn.Module):
    """A function in place of a module, which keeps the named arguments."""

    def __init__(self, factor: float, *, pair: bool = False) -> None:
        super().__init__()
        self.named: dict[str, Any] = {}
        self._factor, self._pair = factor, pair

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        """Return the numbers' sines by a factor; an attention returns a pair."""
        self.named = named
        result = (hidden_states * self._factor).sin()
        return (result, None) if self._pair else result


@torch.inference_mode()
def adds_residuals(layer: nn.Module, form: LayerForm) -> bool:
    """Tell whether a layer adds its attention and its MLP to its input, and passes its arguments on as they are."""
    probe = copy.copy(layer)
    modules: dict[str, Any] = {name: _Simple(2.0 + index) for index, name in enumerate(sorted(form.modules))}
    modules["self_attn"] = attention = _Simple(17.0, pair=True)
    probe._modules = dict(modules)

    def by(name: str | None, x: Tensor) -> Tensor:
        return x if name is None else modules[name](x)

    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    named = {"position_embeddings": (x, x), "attention_mask": None, "position_ids": torch.zeros(1, 5)}
    try:
        computed = probe(x, **named)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it takes something else
        return False
    same = all(attention.named.get(name) is value for name, value in named.items())
    others = [value for name, value in attention.named.items() if name not in named]
    sums = x + by(form.attended, attention(by(form.before, x))[0])
    expected = sums + by(form.computed, modules["mlp"](by(form.between, sums)))
    return same and not any(others) and equal(computed, expected)


def _layer_forward(
    layer: Any, form: LayerForm, norms: Mapping[nn.Module, NormKernel], following: NormKernel | None
) -> Callable[..., Tensor]:
    def module(name: str | None) -> Any:
        return None if name is None else getattr(layer, name)

    before, between, attention, mlp = module(form.before), module(form.between), layer.self_attn, layer.mlp
    attended_norm, between_norm, computed_norm = (
        norms.get(module(name)) for name in (form.attended, form.between, form.computed)
    )

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        x = hidden_states if before is None else before(hidden_states)
        attended, _ = attention(x, *arguments, **named)
        sums = add_rows(hidden_states, attended, attended_norm, between_norm)
        return add_rows(sums, mlp(sums if between is None else between(sums)), computed_norm, following)

    return forward
