"""Rows of a decoder layer on CUDA: Triton kernels in place of the many small operators of transformers' modules.

The gate of an MLP takes two launches by torch's operators and one by its kernel; the normalization and rotation of
queries and keys, and their way into the cache, up to 28 and one; normalizations are in residuals.py. A module is
replaced where it has the form of one of them, which a pass of a few random numbers through a copy of it on the CPU
decides, to the bit: the kernels round where it does. What has another form stays as it is. Imported only where there is
Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from loraplex.worker.engine.attention.paged import AttentionContext, AttentionStep, LayerCall, RandomAttention
from loraplex.worker.engine.decoder.residuals import (
    NormForm,
    NormKernel,
    equal,
    norm_form,
    use_layers,
    weighted,
    with_random_weight,
)
from loraplex.worker.engine.device import KernelCall
from loraplex.worker.engine.lora.base_layers import FusedProduct, own_forward, whole_product

# Columns of a program of the gate.
_GATE_COLUMNS = 1024


@triton.jit
def gate_rows(out, both, columns, stride, GELU: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write silu (or gelu by tanh) of a row's first half, times its second half. Grid: row, block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    gate = tl.load(both + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    # The sigmoid's argument; (1 + tanh(x)) / 2 is the sigmoid of 2x. The factor is 2 * sqrt(2 / pi).
    bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    # Rounded as torch's operators do it one after the other.
    gated = (gate / (1.0 + tl.exp(-bent))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * columns + column, (gated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(  # type: ignore[no-untyped-def]
    out, x, cos, sin, slots, keys, values, query_weight, key_weight, x_stride, cos_stride, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
    OFFSET: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries and keys to `out`, and write keys and values to its slot, unless that is in int8.

    x are the rows of queries, keys and values, side by side. With weights queries and keys are normalized first: each
    head by itself or, where WHOLE is a tile for them, all heads together. Grid: token, head of any of them.
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
        first = head * DIM + lane
        angles = token * cos_stride + lane
        a, b = tl.load(row + first, mask=inside, other=0.0), tl.load(row + first + half, mask=inside, other=0.0)
        if query_weight is not None:
            a, b = _normed(
                a, b, row, query_weight, key_weight, head, lane, epsilon, HEADS, KV_HEADS, DIM, OFFSET, LATE, WHOLE
            )
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
        turned = out + token * ((HEADS + KV_HEADS) * DIM) + first
        tl.store(turned, turned_a.to(x.dtype.element_ty), mask=inside)
        tl.store(turned + half, turned_b.to(x.dtype.element_ty), mask=inside)
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
def _normed(  # type: ignore[no-untyped-def]
    a, b, row, query_weight, key_weight, head, lane, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    OFFSET: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the halves of a head of queries or keys, normalized."""
    half: tl.constexpr = DIM // 2
    is_query = head < HEADS
    first_a, first_b = a.to(tl.float32), b.to(tl.float32)
    place = lane
    if WHOLE > 0:
        # Their other heads are read by other programs as well; none writes to them.
        begin = tl.where(is_query, 0, HEADS * DIM)
        width = tl.where(is_query, HEADS * DIM, KV_HEADS * DIM)
        column = tl.arange(0, WHOLE)
        numbers = tl.load(row + begin + column, mask=column < width, other=0.0).to(tl.float32)
        mean = tl.sum(numbers * numbers, 0) / width
        place += head * DIM - begin
    else:
        mean = (tl.sum(first_a * first_a, 0) + tl.sum(first_b * first_b, 0)) / DIM
    scale = tl.rsqrt(mean + epsilon)
    of_query, of_key = is_query & (lane < half), (lane < half) & (head >= HEADS)
    weight_a = tl.load(query_weight + place, mask=of_query, other=0.0) + tl.load(
        key_weight + place, mask=of_key, other=0.0
    )
    weight_b = tl.load(query_weight + place + half, mask=of_query, other=0.0) + tl.load(
        key_weight + place + half, mask=of_key, other=0.0
    )
    return (
        weighted(first_a * scale, weight_a, a.dtype, OFFSET, LATE),
        weighted(first_b * scale, weight_b, a.dtype, OFFSET, LATE),
    )


@triton.jit
def _rounded(a, b):  # type: ignore[no-untyped-def]
    """Return a * b as torch's operator rounds it, in float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@dataclass(frozen=True, slots=True)
class QueryKeyNorms:
    """Normalizations of queries and keys, of one form: by head, or by all heads where the weights are so long."""

    form: NormForm
    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """The form of an attention whose queries and keys are rotated: `call` holds all but the step's own numbers."""

    call: LayerCall
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    norms: QueryKeyNorms | None = None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of queries, keys and values."""
        return self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.value_dim

    def rotate_call(self, out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> KernelCall:
        """Return the launch that rotates queries and keys of rows x [tokens, sum of widths] to `out`, contiguous.

        cos and sin are [tokens, dim].
        """
        in_dtype, norms = not step.cache.scales, self.norms
        keys, values = step.cache.slots[self.call.layer] if in_dtype else (None, None)
        form = NormForm(0.0, 0.0, late=False) if norms is None else norms.form
        whole = norms is not None and len(norms.query) > self.dim
        return KernelCall(
            rotate_heads,
            (len(x), self.heads + (2 if in_dtype else 1) * self.kv_heads),
            {
                "out": out, "x": x, "cos": cos, "sin": sin, "slots": step.slot_mapping if in_dtype else None,
                "keys": keys, "values": values, "query_weight": norms and norms.query,
                "key_weight": norms and norms.key,
                "x_stride": x.stride(0), "cos_stride": cos.stride(0), "epsilon": form.epsilon,
            },
            {
                "HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "VALUE_DIM": self.value_dim,
                "TILE": triton.next_power_of_2(max(self.dim, self.value_dim)) // 2, "OFFSET": form.offset,
                "LATE": form.late, "WHOLE": triton.next_power_of_2(max(self.widths[:2])) if whole else 0,
            },
            warps=4 if whole else 1,
            stages=1,
        )  # fmt: skip

    def of(self, turned: Tensor, x: Tensor) -> LayerCall:
        """Return the call of rotated queries and keys, and of the values of rows x: these are views."""
        (query, key), value = turned.split_with_sizes(self.widths[:2], 1), x[:, sum(self.widths[:2]) :]
        return replace(
            self.call,
            query=query.view(-1, self.heads, self.dim),
            key=key.view(-1, self.kv_heads, self.dim),
            value=value.view(-1, self.kv_heads, self.value_dim),
        )


def gate_call(both: Tensor, out: Tensor, *, gelu: bool = False) -> KernelCall:
    """Return the launch that fills out [rows, columns], contiguous, of rows both [rows, 2 * columns]."""
    rows, columns = out.shape
    return KernelCall(
        gate_rows,
        (rows, triton.cdiv(columns, _GATE_COLUMNS)),
        {"out": out, "both": both, "columns": columns, "stride": both.stride(0)},
        {"GELU": gelu, "TILE": _GATE_COLUMNS},
        warps=4,
        stages=1,
    )


def use_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the kernels compute the normalizations and gates of a model whose linear layers are in place."""
    norms: dict[nn.Module, NormKernel] = {}
    for module in model.modules():
        # Of an earlier call, whose linear layers are not these.
        if getattr(vars(module).get("forward"), "__module__", "").startswith("loraplex.worker.engine.decoder."):
            del module.forward
    for module in model.modules():
        form = norm_form(module, dtype)
        if form is not None:
            norms[module] = NormKernel(form, module.weight)  # type: ignore[arg-type]
            module.forward = norms[module].compute
        product = whole_product(module, ("gate_proj", "up_proj")) if hasattr(module, "down_proj") else None
        gate = None if product is None else gate_of(module, dtype)
        if product is not None and gate is not None:
            module.forward = _gated_forward(product, module.down_proj, gelu=gate == "gelu")  # type: ignore[arg-type]
        product = whole_product(module, ("q_proj", "k_proj", "v_proj")) if hasattr(module, "o_proj") else None
        attention = None if product is None else attention_form(module, product.widths, dtype)
        if product is not None and attention is not None:
            module.forward = _attention_forward(module, attention, product)
    use_layers(model, norms)


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


# The functions of gates that the kernel computes.
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": partial(gelu, approximate="tanh")}


@torch.inference_mode()
def gate_of(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the name of the function with which an MLP computes down(function(gate(x)) * up(x)), in _GATES or None."""
    shapes = {"gate_proj": (_FEATURES, 24), "up_proj": (_FEATURES, 24), "down_proj": (24, _FEATURES)}
    probe = _small(module, dtype, shapes)
    x = torch.randn(_TOKENS, _FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)
    try:
        computed = probe(x)
    except (RuntimeError, TypeError):  # it takes something else
        return None
    gate, up = probe.gate_proj(x), probe.up_proj(x)
    return next((name for name, bend in _GATES.items() if equal(computed, probe.down_proj(bend(gate) * up))), None)


_PROJECTIONS, _NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")


def _query_key_norms(module: Any, dim: int, widths: Sequence[int], dtype: torch.dtype) -> QueryKeyNorms | None:
    """Return an attention's normalizations; None where it has none. Raises ValueError for others than the kernel's."""
    if not any(name in module._modules for name in _NORMS):
        return None
    norms: list[Any] = [getattr(module, name, None) for name in _NORMS]
    query, key = (norm_form(norm, dtype) if isinstance(norm, nn.Module) else None for norm in norms)
    if query is None or query != key or [len(norm.weight) for norm in norms] not in ([dim, dim], [*widths[:2]]):
        raise ValueError("a normalization of another form")
    return QueryKeyNorms(query, norms[0].weight, norms[1].weight)


@torch.inference_mode()
def attention_form(module: nn.Module, widths: Sequence[int], dtype: torch.dtype) -> RotaryForm | None:
    """Return the form of an attention; None where a module is none that rotates, attends and multiplies, and no more.

    `widths` are those of its queries, keys and values.
    """
    dim, others = getattr(module, "head_dim", None), set(module._modules) - {*_PROJECTIONS, *_NORMS}
    if not isinstance(dim, int) or dim % 2 or list(module.parameters(recurse=False)) or others:
        return None
    try:
        norms = _query_key_norms(module, dim, widths, dtype)
    except ValueError:
        return None
    keys, values, heads = widths[1], widths[2], widths[0] // dim
    shapes = {name: (_FEATURES, width) for name, width in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True)}
    probe = _small(module, dtype, shapes | {"o_proj": (heads * values * dim // keys, _FEATURES)})
    probed = [with_random_weight(getattr(module, name)) for name in _NORMS] if norms is not None else []
    probe._modules |= {name: norm for name, (norm, _) in zip(_NORMS, probed, strict=False)}
    generator = torch.Generator().manual_seed(1)
    x, cos, sin = (torch.randn(_TOKENS, size, generator=generator).to(dtype) for size in (_FEATURES, dim, dim))
    observer, context = RandomAttention(), module.attention_context
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
    if len(observer.calls) != 1:
        return None
    nothing, (call, attended) = x.new_empty(0), observer.calls[0]
    form = RotaryForm(
        replace(call, query=nothing, key=nothing, value=nothing), heads, keys // dim, dim, call.value.shape[-1], norms
    )
    parts = [
        part if norms is None else norms.form.compute(part.view(_TOKENS, -1, len(numbers)), numbers).view(_TOKENS, -1)
        for part, (_, numbers) in zip((probe.q_proj(x), probe.k_proj(x)), probed or [(probe, x)] * 2, strict=True)
    ]
    expected = form.of(torch.cat(parts, 1), torch.cat([*parts, probe.v_proj(x)], 1))

    def rotated(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return part * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    same = call.sinks is None and equal(computed[0], probe.o_proj(attended.flatten(1))[None])
    same = same and equal(call.query, rotated(expected.query)) and equal(call.key, rotated(expected.key))
    return form if same and equal(call.value, expected.value) else None


def _gated_forward(product: FusedProduct, down: nn.Module, *, gelu: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        both = product.compute(x)
        out = torch.empty(*x.shape[:-1], product.widths[0], dtype=x.dtype, device=x.device)
        gate_call(both.view(-1, both.shape[-1]), out.view(-1, out.shape[-1]), gelu=gelu).launch()
        result: Tensor = down(out)
        return result

    return forward


def _attention_forward(module: Any, form: RotaryForm, product: FusedProduct) -> Callable[..., tuple[Any, Any]]:
    context, o, original = module.attention_context, module.o_proj, own_forward(module)

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Any, Any]:
        step, embeddings = context.step, named.get("position_embeddings")
        if not isinstance(step, AttentionStep) or embeddings is None or embeddings[0].shape[-1] != form.dim:
            result: tuple[Any, Any] = original(hidden_states, *arguments, **named)
            return result
        x = product.compute(hidden_states)[0]
        turned = torch.empty(len(x), sum(form.widths[:2]), dtype=x.dtype, device=x.device)
        form.rotate_call(turned, x, embeddings[0][0], embeddings[1][0], step).launch()
        call = form.of(turned, x)
        if step.cache.scales:
            step.plan.quantize(call, step.slot_mapping, step.cache)
        return o(step.plan.attend(call, step.cache).flatten(1)[None]), None

    return forward
