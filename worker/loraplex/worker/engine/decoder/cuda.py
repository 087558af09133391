"""Rows of a decoder layer on CUDA: Triton kernels in place of the many small operators of transformers' modules.

    x ─▶ norm ─▶ attention ─▶ + x, norm ─▶ MLP ─▶ +, norm of the next layer ─▶

A normalization is one launch with the addition before it. Families that normalize before they add (Gemma 2 and 3, OLMo
2) do that in the same launch. The gate of an MLP takes two launches by torch's operators and one by its kernel; the
normalization and rotation of queries and keys, and their way into the cache, up to 28 and one. The kernels round where
the operators do. A module of another form stays as it is. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from loraplex.worker.engine.attention.paged import AttentionStep
from loraplex.worker.engine.decoder.recognition import (
    GATE_UP,
    QKV,
    AttentionForm,
    LayerForm,
    Norm,
    fused_product,
    recognize,
)
from loraplex.worker.engine.device import KernelCall
from loraplex.worker.engine.lora.base_layers import own_forward

# Columns of a program of the gate.
_GATE_COLUMNS = 1024
_NO_NORM = Norm(torch.empty(0), 0.0)


@triton.jit
def _weighted(normed, factors, dtype: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr):  # type: ignore[no-untyped-def]
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
            more = _weighted(more * scale, factors, dtype, INNER_OFFSET, INNER_LATE).to(tl.float32)
        numbers = (numbers + more).to(dtype).to(tl.float32)
        tl.store(sums + row * columns + column, numbers.to(dtype), mask=inside)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / columns + epsilon)
        factors = tl.load(weight + column, mask=inside, other=0.0)
        tl.store(out + row * columns + column, _weighted(numbers * scale, factors, dtype, OFFSET, LATE), mask=inside)


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
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rotate a token's queries and keys to `out`, and write keys and values to its slot, unless that is in int8.

    x are the rows of queries, keys and values, side by side; of each head the first COLUMNS numbers are rotated. With
    weights queries and keys are normalized first: each head by itself or, where WHOLE is a tile for them, all heads
    together. Grid: token, head of any of them.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, TILE)
    slot = tl.zeros([], tl.int64)
    if keys is not None:
        slot = tl.load(slots + token)
    row = x + token * x_stride
    if head < HEADS + KV_HEADS:
        half: tl.constexpr = COLUMNS // 2
        inside, rotates = lane < DIM, lane < COLUMNS
        # The place of the number that each is rotated with.
        other = tl.where(lane < half, lane + half, lane - half)
        first = row + head * DIM
        a, b = tl.load(first + lane, mask=inside, other=0.0), tl.load(first + other, mask=rotates, other=0.0)
        if query_weight is not None:
            a, b = _normed(
                a, b, row, query_weight, key_weight, head, lane, other, epsilon,
                HEADS, KV_HEADS, DIM, COLUMNS, OFFSET, LATE, WHOLE,
            )  # fmt: skip
        angles = token * cos_stride + lane
        cosine, sine = tl.load(cos + angles, mask=rotates, other=1.0), tl.load(sin + angles, mask=rotates, other=0.0)
        turned = _rounded(a, cosine) + _rounded(tl.where(lane < half, -b, b), sine)
        turned = turned.to(x.dtype.element_ty)
        tl.store(out + token * ((HEADS + KV_HEADS) * DIM) + head * DIM + lane, turned, mask=inside)
        if keys is not None:
            key = keys + (slot * KV_HEADS + head - HEADS) * DIM + lane
            tl.store(key, turned, mask=inside & (head >= HEADS))
    elif keys is not None:
        kv_head = head - HEADS - KV_HEADS
        value = tl.load(row + (HEADS + KV_HEADS) * DIM + kv_head * VALUE_DIM + lane, mask=lane < VALUE_DIM, other=0.0)
        tl.store(values + (slot * KV_HEADS + kv_head) * VALUE_DIM + lane, value, mask=lane < VALUE_DIM)


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    a, b, row, query_weight, key_weight, head, lane, other, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    OFFSET: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the numbers of a head of queries or keys, and those that they are rotated with, normalized."""
    is_query = head < HEADS
    first_a, first_b = a.to(tl.float32), b.to(tl.float32)
    begin = head * DIM
    if WHOLE > 0:
        # Their other heads are read by other programs as well; none writes to them.
        begin = tl.where(is_query, 0, HEADS * DIM)
        width = tl.where(is_query, HEADS * DIM, KV_HEADS * DIM)
        column = tl.arange(0, WHOLE)
        numbers = tl.load(row + begin + column, mask=column < width, other=0.0).to(tl.float32)
        mean = tl.sum(numbers * numbers, 0) / width
    else:
        mean = tl.sum(first_a * first_a, 0) / DIM
    scale = tl.rsqrt(mean + epsilon)
    of_query, of_key = query_weight + head * DIM - begin, key_weight + head * DIM - begin
    inside, rotates = lane < DIM, lane < COLUMNS
    weight_a = tl.load(of_query + lane, mask=inside & is_query, other=0.0) + tl.load(
        of_key + lane, mask=inside & (head >= HEADS), other=0.0
    )
    weight_b = tl.load(of_query + other, mask=rotates & is_query, other=0.0) + tl.load(
        of_key + other, mask=rotates & (head >= HEADS), other=0.0
    )
    return (
        _weighted(first_a * scale, weight_a, a.dtype, OFFSET, LATE),
        _weighted(first_b * scale, weight_b, a.dtype, OFFSET, LATE),
    )


@triton.jit
def _rounded(a, b):  # type: ignore[no-untyped-def]
    """Return a * b as torch's operator rounds it, in float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


class NormKernel:
    """A normalization by its kernel. What was normalized together with an addition waits here for the module's call."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm
        self.waiting: tuple[Tensor, Tensor] | None = None

    def compute(self, hidden_states: Tensor) -> Tensor:
        """Normalize hidden states [..., columns]."""
        waiting, self.waiting = self.waiting, None
        # Compared by identity, so that any other tensor gets its own numbers.
        if waiting is not None and waiting[0] is hidden_states:
            return waiting[1]
        x = hidden_states.reshape(-1, len(self.norm.weight))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm_call(self.norm, x, out).launch()
        return out.view(hidden_states.shape)


def norm_call(
    norm: Norm | None, x: Tensor, out: Tensor | None, added: Tensor | None = None, sums: Tensor | None = None,
    inner: Norm | None = None,
) -> KernelCall:  # fmt: skip
    """Return the launch that fills out [rows, columns], contiguous, of rows x, or of sums = x + added.

    These two are contiguous as well. `inner` normalizes `added` first; without `norm` there is no out.
    """
    columns, own, others = x.shape[1], norm or _NO_NORM, inner or _NO_NORM
    return KernelCall(
        norm_rows,
        (len(x),),
        {
            "out": out, "x": x, "added": added, "sums": sums, "weight": norm and norm.weight,
            "inner": inner and inner.weight, "columns": columns, "x_stride": x.stride(0), "epsilon": own.epsilon,
            "inner_epsilon": others.epsilon,
        },
        {
            "OFFSET": own.offset, "LATE": own.late, "INNER_OFFSET": others.offset, "INNER_LATE": others.late,
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
    own, of_added = (None if one is None else one.norm for one in (following, inner))
    norm_call(own, rows, out, others, sums, of_added).launch()
    result = sums.view(x.shape)
    if following is not None and out is not None:
        following.waiting = result, out.view(x.shape)
    return result


def rotate_call(
    form: AttentionForm, out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep
) -> KernelCall:
    """Return the launch that rotates queries and keys of rows x [tokens, sum of widths] to `out`, contiguous.

    cos and sin are [tokens, columns].
    """
    in_dtype, (query, key) = not step.cache.scales, form.norms or (_NO_NORM, _NO_NORM)
    keys, values = step.cache.slots[form.call.layer] if in_dtype else (None, None)
    whole = form.norms is not None and len(query.weight) > form.key_dim
    return KernelCall(
        rotate_heads,
        (len(x), form.heads + (2 if in_dtype else 1) * form.kv_heads),
        {
            "out": out, "x": x, "cos": cos, "sin": sin, "slots": step.slot_mapping if in_dtype else None,
            "keys": keys, "values": values, "query_weight": form.norms and query.weight,
            "key_weight": form.norms and key.weight,
            "x_stride": x.stride(0), "cos_stride": cos.stride(0), "epsilon": query.epsilon,
        },
        {
            "HEADS": form.heads, "KV_HEADS": form.kv_heads, "DIM": form.key_dim, "VALUE_DIM": form.value_dim,
            "COLUMNS": form.columns, "TILE": triton.next_power_of_2(max(form.key_dim, form.value_dim)),
            "OFFSET": query.offset, "LATE": query.late,
            "WHOLE": triton.next_power_of_2(max(form.widths[:2])) if whole else 0,
        },
        warps=4 if whole else 1,
        stages=1,
    )  # fmt: skip


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


def use_kernels(model: Any, dtype: torch.dtype, length: int) -> None:
    """Let the kernels compute what they can of a model whose linear layers are in place.

    `length` is that of its context.
    """
    forms = recognize(model, dtype, length)
    norms = {module: NormKernel(norm) for module, norm in forms.norms.items()}
    for module, norm in norms.items():
        module.forward = norm.compute
    for module, gate in forms.gates.items():
        module.forward = _gated_forward(module, gelu=gate == "gelu")
    for module, form in forms.attentions.items():
        if form.columns:
            module.forward = _attention_forward(module, form)
    _use_layers(model, forms.layers, norms)


def _gated_forward(module: Any, *, gelu: bool) -> Callable[[Tensor], Tensor]:
    product, down = fused_product(module, GATE_UP), module.down_proj
    assert product is not None, "of what is recognized"

    def forward(x: Tensor) -> Tensor:
        both = product.compute(x)
        out = torch.empty(*x.shape[:-1], both.shape[-1] // 2, dtype=x.dtype, device=x.device)
        gate_call(both.view(-1, both.shape[-1]), out.view(-1, out.shape[-1]), gelu=gelu).launch()
        result: Tensor = down(out)
        return result

    return forward


def _attention_forward(module: Any, form: AttentionForm) -> Callable[..., tuple[Any, Any]]:
    context, o, original, product = (
        module.attention_context,
        module.o_proj,
        own_forward(module),
        fused_product(module, QKV),
    )
    assert product is not None, "of what is recognized"

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Any, Any]:
        step, embeddings = context.step, named.get("position_embeddings")
        if not isinstance(step, AttentionStep) or embeddings is None or embeddings[0].shape[-1] != form.columns:
            result: tuple[Any, Any] = original(hidden_states, *arguments, **named)
            return result
        x = product.compute(hidden_states)[0]
        turned = torch.empty(len(x), sum(form.widths[:2]), dtype=x.dtype, device=x.device)
        rotate_call(form, turned, x, embeddings[0][0], embeddings[1][0], step).launch()
        call = form.call_of(turned, x)
        if step.cache.scales:
            step.plan.quantize(call, step.slot_mapping, step.cache)
        return o(step.plan.attend(call, step.cache).flatten(1)[None]), None

    return forward


def _use_layers(model: Any, forms: Mapping[nn.Module, LayerForm], norms: Mapping[nn.Module, NormKernel]) -> None:
    """Replace the layers of these forms, in their order: one normalizes for the next where that begins by it."""
    following: Any = getattr(model.base_model, "norm", None)
    for layer, form in reversed(list(forms.items())):
        layer.forward = _layer_forward(layer, form, norms, norms.get(following) if form.before else None)
        following = form.before and getattr(layer, form.before)


def _layer_forward(
    layer: Any, form: LayerForm, norms: Mapping[nn.Module, NormKernel], following: NormKernel | None
) -> Callable[..., Tensor]:
    before, of_attention, between, of_mlp = (
        None if name is None else norms[getattr(layer, name)]
        for name in (form.before, form.attended, form.between, form.computed)
    )
    attention, mlp = layer.self_attn, layer.mlp

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        x = hidden_states if before is None else before.compute(hidden_states)
        attended, _ = attention(x, *arguments, **named)
        sums = add_rows(hidden_states, attended, of_attention, between)
        return add_rows(sums, mlp(sums if between is None else between.compute(sums)), of_mlp, following)

    return forward
