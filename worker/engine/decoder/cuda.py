"""Rows of a decoder layer on CUDA: Triton kernels in place of the many small operators of transformers' modules.

A normalization takes eight launches by torch's operators and one by its kernel; the gate of an MLP two and one; the
rotation of queries and keys, and their way into the cache, twelve and one. A module is replaced where it has the form
of one of them, which a pass of a few random numbers through a copy of it on the CPU decides, to the bit: the kernels
round where it does. What has another form stays as it is. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakMethod

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import silu

from worker.engine.attention.paged import AttentionContext, AttentionStep, LayerCall
from worker.engine.decoder.residuals import use_layers
from worker.engine.device import KernelCall
from worker.engine.lora.base_layers import FusedPart, FusedProduct

# Maximum number of columns that a program normalizes at once.
_MOST_COLUMNS = 16_384
# Columns of a program of the gate.
_GATE_COLUMNS = 1024
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@triton.jit
def norm_rows(  # type: ignore[no-untyped-def]
    out,
    x,
    added,
    sums,
    weight,
    columns,
    x_stride,
    epsilon,
    OFFSET: tl.constexpr,
    LATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write x / sqrt(mean of x ** 2 + epsilon) * (OFFSET + weight); LATE: round once, at the end. Grid: row.

    With `added` that of x + added, which go to `sums`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < columns
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        numbers += tl.load(added + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        numbers = numbers.to(out.dtype.element_ty).to(tl.float32)
        tl.store(sums + row * columns + column, numbers.to(out.dtype.element_ty), mask=inside)
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


@triton.jit
def rotate_heads(  # type: ignore[no-untyped-def]
    x, cos, sin, slots, keys, values, x_stride, cos_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries and keys in place, and write keys and values to its slot, unless that is in int8.

    x are the rows of queries, keys and values, side by side. Grid: token, head of any of them.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, TILE)
    slot = tl.zeros([], tl.int64)
    if keys is not None:
        slot = tl.load(slots + token)
    row = x + token * x_stride
    if head < HEADS + KV_HEADS:
        half: tl.constexpr = DIM // 2
        inside = lane < half
        first = row + head * DIM + lane
        angles = token * cos_stride + lane
        a, b = tl.load(first, mask=inside, other=0.0), tl.load(first + half, mask=inside, other=0.0)
        cos_a, cos_b = (
            tl.load(cos + angles, mask=inside, other=0.0),
            tl.load(cos + angles + half, mask=inside, other=0.0),
        )
        sin_a, sin_b = (
            tl.load(sin + angles, mask=inside, other=0.0),
            tl.load(sin + angles + half, mask=inside, other=0.0),
        )
        turned_a = _rounded(a, cos_a) - _rounded(b, sin_a)
        turned_b = _rounded(b, cos_b) + _rounded(a, sin_b)
        tl.store(first, turned_a.to(x.dtype.element_ty), mask=inside)
        tl.store(first + half, turned_b.to(x.dtype.element_ty), mask=inside)
        if keys is not None:
            kept = inside & (head >= HEADS)
            key = keys + (slot * KV_HEADS + head - HEADS) * DIM + lane
            tl.store(key, turned_a.to(x.dtype.element_ty), mask=kept)
            tl.store(key + half, turned_b.to(x.dtype.element_ty), mask=kept)
    elif keys is not None:
        kv_head = head - HEADS - KV_HEADS
        whole = tl.arange(0, 2 * TILE)
        value = tl.load(row + (HEADS + KV_HEADS) * DIM + kv_head * VALUE_DIM + whole, mask=whole < VALUE_DIM, other=0.0)
        tl.store(values + (slot * KV_HEADS + kv_head) * VALUE_DIM + whole, value, mask=whole < VALUE_DIM)


@triton.jit
def _rounded(a, b):  # type: ignore[no-untyped-def]
    """Return a * b as torch's operator rounds it, in float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The form of an attention whose queries and keys are rotated: `call` holds all but the step's own numbers."""

    call: LayerCall
    heads: int
    kv_heads: int
    dim: int
    value_dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of queries, keys and values."""
        return self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.value_dim

    def rotate_call(self, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> KernelCall:
        """Return the launch that rotates rows x [tokens, sum of widths], with cos and sin [tokens, dim]."""
        in_dtype = not step.cache.scales
        keys, values = step.cache.slots[self.call.layer] if in_dtype else (None, None)
        return KernelCall(
            rotate_heads,
            (len(x), self.heads + (2 if in_dtype else 1) * self.kv_heads),
            {
                "x": x, "cos": cos, "sin": sin, "slots": step.slot_mapping if in_dtype else None, "keys": keys,
                "values": values, "x_stride": x.stride(0), "cos_stride": cos.stride(0),
            },
            {
                "HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "VALUE_DIM": self.value_dim,
                "TILE": triton.next_power_of_2(max(self.dim, self.value_dim)) // 2,
            },
            warps=1,
            stages=1,
        )  # fmt: skip

    def of(self, x: Tensor) -> LayerCall:
        """Return the call of rotated rows x: its queries, keys and values are views of these."""
        query, key, value = x.split_with_sizes(self.widths, 1)
        return replace(
            self.call,
            query=query.view(-1, self.heads, self.dim),
            key=key.view(-1, self.kv_heads, self.dim),
            value=value.view(-1, self.kv_heads, self.value_dim),
        )


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

    def call(
        self, x: Tensor, weight: Tensor, out: Tensor, added: Tensor | None = None, sums: Tensor | None = None
    ) -> KernelCall:
        """Return the launch that fills out [rows, columns], contiguous, of rows x, or of sums = x + added.

        These two are contiguous as well.
        """
        columns = x.shape[1]
        return KernelCall(
            norm_rows,
            (len(x),),
            {
                "out": out, "x": x, "added": added, "sums": sums, "weight": weight, "columns": columns,
                "x_stride": x.stride(0), "epsilon": self.epsilon,
            },
            {"OFFSET": self.offset, "LATE": self.late, "TILE": triton.next_power_of_2(columns)},
            warps=4 if columns <= 2048 else 8,
            stages=1,
        )  # fmt: skip


class Norm:
    """A normalization by its kernel. What was normalized together with an addition waits here for the module's call."""

    def __init__(self, form: NormForm, weight: Tensor) -> None:
        self._form = form
        self._weight = weight
        self._waiting: tuple[Tensor, Tensor] | None = None

    def compute(self, hidden_states: Tensor) -> Tensor:
        """Normalize hidden states [..., columns]."""
        waiting, self._waiting = self._waiting, None
        # Compared by identity, so that any other tensor gets its own numbers.
        if waiting is not None and waiting[0] is hidden_states:
            return waiting[1]
        x = hidden_states.reshape(-1, len(self._weight))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._form.call(x, self._weight, out).launch()
        return out.view(hidden_states.shape)

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """Return x + added [..., columns]; the next call of `compute` with it finds it normalized."""
        rows, others = x.reshape(-1, len(self._weight)), added.reshape(-1, len(self._weight)).contiguous()
        sums, out = (torch.empty(rows.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        self._form.call(rows, self._weight, out, others, sums).launch()
        result = sums.view(x.shape)
        self._waiting = result, out.view(x.shape)
        return result


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
    norms: dict[nn.Module, Norm] = {}
    for module in model.modules():
        # Of an earlier call, whose linear layers are not these.
        if getattr(vars(module).get("forward"), "__module__", "").startswith("worker.engine.decoder."):
            del module.forward
        form = norm_form(module, dtype)
        if form is not None:
            norms[module] = Norm(form, module.weight)  # type: ignore[arg-type]
            module.forward = norms[module].compute
        product = _whole_product(module, ("gate_proj", "up_proj"), "down_proj")
        if product is not None and is_gated(module, dtype):
            module.forward = _gated_forward(product, module.down_proj)  # type: ignore[arg-type]
        product = _whole_product(module, ("q_proj", "k_proj", "v_proj"), "o_proj")
        attention = None if product is None else attention_form(module, product.widths, dtype)
        if product is not None and attention is not None:
            module.forward = _attention_forward(module, attention, product)
    use_layers(model, norms)


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


def _whole_product(module: nn.Module, names: Sequence[str], last: str) -> FusedProduct | None:
    """Return the product of a module's layers of these names, in this order; None where they are no whole product."""
    parts = [getattr(module, name, None) for name in names]
    found = [part for part in parts if isinstance(part, FusedPart) and hasattr(module, last)]
    if len(found) < len(names):
        return None
    product = found[0].product
    whole = [part.index for part in found if part.product is product] == list(range(len(product.widths)))
    return product if whole else None


def _small(module: nn.Module, dtype: torch.dtype, shapes: Mapping[str, tuple[int, int]]) -> Any:
    """Return a copy of a module with random layers of (in_features, out_features) on the CPU in place of its own."""
    probe, generator = copy.copy(module), torch.Generator().manual_seed(0)
    probe._modules = dict(module._modules)
    for name, (inputs, outputs) in shapes.items():
        layer = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        numbers = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        layer.weight = nn.Parameter(numbers.to(dtype), requires_grad=False)
        probe._modules[name] = layer
    return probe


# Number of features that copies of modules take, and of their tokens.
_FEATURES, _TOKENS = 16, 5


@torch.inference_mode()
def is_gated(module: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether an MLP computes down(silu(gate(x)) * up(x))."""
    shapes = {"gate_proj": (_FEATURES, 24), "up_proj": (_FEATURES, 24), "down_proj": (24, _FEATURES)}
    probe = _small(module, dtype, shapes)
    x = torch.randn(_TOKENS, _FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)
    try:
        computed = probe(x)
    except (RuntimeError, TypeError):  # it takes something else
        return False
    return _equal(computed, probe.down_proj(silu(probe.gate_proj(x)) * probe.up_proj(x)))


class _Observer:
    """A step of random attention, which keeps the last call."""

    call: LayerCall
    attended: Tensor

    def attend(self, call: LayerCall) -> Tensor:
        """See StepAttention."""
        self.call = call
        self.attended = torch.randn(*call.query.shape[:2], call.value.shape[-1]).to(call.query.dtype)
        return self.attended


@torch.inference_mode()
def attention_form(module: nn.Module, widths: Sequence[int], dtype: torch.dtype) -> AttentionForm | None:
    """Return the form of an attention; None where a module is none that rotates, attends and multiplies, and no more.

    `widths` are those of its queries, keys and values.
    """
    dim, others = getattr(module, "head_dim", None), set(module._modules) - {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not isinstance(dim, int) or dim % 2 or list(module.parameters(recurse=False)) or others:
        return None
    keys, values, heads = widths[1], widths[2], widths[0] // dim
    shapes = {name: (_FEATURES, width) for name, width in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True)}
    probe = _small(module, dtype, shapes | {"o_proj": (heads * values * dim // keys, _FEATURES)})
    generator = torch.Generator().manual_seed(1)
    x, cos, sin = (torch.randn(_TOKENS, size, generator=generator).to(dtype) for size in (_FEATURES, dim, dim))
    observer, context = _Observer(), module.attention_context
    # Some models multiply queries by what depends on how late they are.
    late = torch.tensor([[0, 1, 7, 100_000, 1_000_000]])
    assert isinstance(context, AttentionContext)
    try:
        with context.during(observer):
            computed = probe(
                x[None], position_embeddings=(cos[None], sin[None]), attention_mask=None, position_ids=late
            )
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it takes something else
        return None
    nothing, call = x.new_empty(0), observer.call
    form = AttentionForm(
        replace(call, query=nothing, key=nothing, value=nothing), heads, keys // dim, dim, call.value.shape[-1]
    )
    expected = form.of(torch.cat([probe.q_proj(x), probe.k_proj(x), probe.v_proj(x)], 1))

    def rotated(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return part * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    same = call.sinks is None and _equal(computed[0], probe.o_proj(observer.attended.flatten(1))[None])
    same = same and _equal(call.query, rotated(expected.query)) and _equal(call.key, rotated(expected.key))
    return form if same and _equal(call.value, expected.value) else None


def _equal(actual: Any, expected: Tensor) -> bool:
    return isinstance(actual, Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)


def _gated_forward(product: FusedProduct, down: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        both = product.compute(x)
        out = torch.empty(*x.shape[:-1], product.widths[0], dtype=x.dtype, device=x.device)
        gate_call(both.view(-1, both.shape[-1]), out.view(-1, out.shape[-1])).launch()
        result: Tensor = down(out)
        return result

    return forward


def _attention_forward(module: Any, form: AttentionForm, product: FusedProduct) -> Callable[..., tuple[Any, Any]]:
    context, o, original = module.attention_context, module.o_proj, _own_forward(module)

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Any, Any]:
        step, embeddings = context.step, named.get("position_embeddings")
        if not isinstance(step, AttentionStep) or embeddings is None or embeddings[0].shape[-1] != form.dim:
            result: tuple[Any, Any] = original(hidden_states, *arguments, **named)
            return result
        x = product.compute(hidden_states)[0]
        form.rotate_call(x, embeddings[0][0], embeddings[1][0], step).launch()
        call = form.of(x)
        if step.cache.scales:
            step.plan.quantize(call, step.slot_mapping, step.cache)
        return o(step.plan.attend(call, step.cache).flatten(1)[None]), None

    return forward


def _own_forward(module: Any) -> Callable[..., Any]:
    """Return a module's forward without a reference to the module, which would then never be freed by its last one."""
    method = WeakMethod(module.forward)

    def forward(*arguments: Any, **named: Any) -> Any:
        own = method()
        assert own is not None, "the module is calling"
        return own(*arguments, **named)

    return forward
