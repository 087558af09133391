"""Recognizes the modules of transformers' models that the kernels compute, by their numbers; replaces their forward.

Names of modules suggest a form; one pass of a few tokens through the model, and the same by the kernels, decide. What
does not give the same numbers stays as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from loraplex.worker.engine.attention.paged import AttentionContext, LayerCall, RandomAttention
from loraplex.worker.engine.decoder.layer import (
    Arena,
    DecoderLayer,
    Heads,
    Mlp,
    Norm,
    Rotation,
    RowOperators,
)
from loraplex.worker.engine.decoder.steps import DecoderSteps, Ends, Rotations, can_record
from loraplex.worker.engine.lora.base_layers import FusedPart, own_forward, whole_product
from loraplex.worker.engine.lora.cpu import CpuGroup

# Number of tokens that the model computes.
_TOKENS = 5


@dataclass
class ObservedLayer:
    """A call of a decoder layer: its first argument, named arguments and result, and the attention in it."""

    module: Any
    hidden: Tensor
    named: dict[str, Any]
    attention: list[tuple[LayerCall, Tensor]]
    out: Any = None


@dataclass
class ObservedPass:
    """A pass of a few tokens through a model: the calls of its decoder layers, and the logits of the first token.

    `hidden` is the result of the model below the head.
    """

    ids: Tensor
    positions: Tensor
    layers: list[ObservedLayer]
    logits: Tensor
    hidden: Any = None


def observe_pass(model: Any, context: AttentionContext, length: int) -> ObservedPass:
    """Compute a few tokens, at positions from 0 to `length` - 1."""
    observer, calls = RandomAttention(), list[ObservedLayer]()
    # The last ones too: some models multiply queries by what depends on how late they are.
    positions = torch.linspace(0, length - 1, _TOKENS).long()
    positions[1] = 1 % length
    ids = torch.randint(model.config.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    bodies: list[Any] = []
    hook = model.base_model.register_forward_hook(lambda _module, _inputs, output: bodies.append(output))
    try:
        with context.during(observer), _watching(model, observer, calls):
            output = model(
                input_ids=ids,
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor([0]),
            )
    finally:
        hook.remove()
    return ObservedPass(ids[0], positions, calls, output.logits, bodies[-1].last_hidden_state if bodies else None)


@contextmanager
def _watching(model: Any, observer: RandomAttention, calls: list[ObservedLayer]) -> Iterator[None]:
    def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        observer.calls = []
        calls.append(ObservedLayer(module, hidden, named, observer.calls))

    def after(module: nn.Module, arguments: Any, out: Any) -> None:
        calls[-1].out = out

    hooks = []
    for module in model.modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_chain(calls: list[ObservedLayer]) -> bool:
    """Tell whether each layer takes the layer before's result as it is, and all take the same rotation."""
    embeddings = calls[0].named.get("position_embeddings")
    return all(call.named.get("position_embeddings") is embeddings for call in calls) and all(
        after.hidden is before.out for before, after in pairwise(calls)
    )


# Maximum length of a row's difference from a module's own numbers, relative to the row's, that rounding explains. One
# number may differ by more: trained models have some a hundred times as large as others, by sums that nearly cancel.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@torch.inference_mode()
def use_kernels(
    model: Any, context: AttentionContext, dtype: torch.dtype, length: int, agree: Callable[[bool], bool] = bool
) -> None:
    """Let the kernels compute what they can of a model on the CPU whose linear layers are in place.

    `length` is that of its context; `agree` tells whether a result is True on all ranks of a split model.
    """
    if dtype not in _TOLERANCE:
        return
    for module in model.modules():
        # Of an earlier call, whose linear layers are not these.
        if getattr(vars(module).get("forward"), "__module__", "") in (__name__, DecoderSteps.__module__):
            del module.forward
    arena = Arena(RowOperators(dtype))
    norms = {module: norm for module in model.modules() if (norm := _norm_of(module, dtype)) is not None}
    observed = observe_pass(model, context, length)
    layers = [_layer_of(call, norms, arena, agree) for call in observed.layers]
    recognized = [layer for layer in layers if layer is not None]
    if recognized and len(recognized) == len(layers) and (ends := _ends_of(model, observed, norms, dtype)) is not None:
        steps, body = DecoderSteps(recognized, ends, context, dtype), model.base_model
        body.forward = steps.body_forward(own_forward(body))
        model.forward = steps.forward(own_forward(model), body)
    for module, norm in norms.items():
        module.forward = _norm_forward(norm, arena, own_forward(module))
    for module in model.modules():
        if type(module).__module__ == activations.__name__ or isinstance(module, nn.SiLU | nn.GELU):
            module.forward = in_whole_vectors(own_forward(module))


# Numbers that torch's vector code computes at once, of the smallest dtype: two vectors of 512 bits.
_VECTORS = 64
# Minimum numbers of a thread's part of an elementwise function of torch, and the maximum that GELU computes in one.
_PART, _ALONE = 32_768, 16_384


def in_whole_vectors(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an elementwise function of torch that gives a number the same bits beside any others.

    Its threads part the numbers anywhere, and what is left over of vectors is computed by other code. Here it is called
    with so many numbers that all parts have whole vectors.
    """

    def forward(x: Tensor) -> Tensor:
        if _has_whole_parts(x.numel()):
            return function(x.contiguous())  # parts of wider rows are computed row by row
        flat = nn.functional.pad(x.reshape(-1), (0, -x.numel() % _VECTORS))
        results, done = [], 0
        while done < len(flat):
            count = len(flat) - done
            if not _has_whole_parts(count):
                count -= count % (_VECTORS * torch.get_num_threads())
                count = count if count and _has_whole_parts(count) else _ALONE
            results.append(function(flat[done : done + count]))
            done += count
        return torch.cat(results)[: x.numel()].view(x.shape)

    return forward


def _has_whole_parts(count: int) -> bool:
    """Tell whether so many numbers are parted where vectors end, as most functions do it and as GELU does."""
    threads = torch.get_num_threads()
    parts = min(threads, -(-count // _PART)), threads if count > _ALONE else 1
    return not any(-(-count // max(1, part)) % _VECTORS for part in parts)


def _norm_forward(norm: Norm, arena: Arena, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != arena.operators.dtype:
            return original(hidden_states)
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        out = torch.empty_like(x)
        arena.operators.norm(x, norm, out)
        return out.view(hidden_states.shape)

    return forward


def _norm_of(module: Any, dtype: torch.dtype) -> Norm | None:
    """Return what a module normalizes with; None where it is none of this form."""
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    parameters = dict(module.named_parameters())
    if not isinstance(epsilon, float) or list(parameters) != ["weight"] or parameters["weight"].ndim != 1:
        return None
    if isinstance(module, nn.LayerNorm) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = parameters["weight"].float()
    exact = copy.deepcopy(module).float()
    # Rows of many sizes: in the smallest epsilon matters.
    x = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 8)[:, None]
    operators = RowOperators(torch.float32)
    for candidate in (Norm(weight, epsilon), Norm(1 + weight, epsilon)):
        out = torch.empty_like(x)
        operators.norm(x, candidate, out)
        if _same(out, exact(x)) and module(x.to(dtype)).dtype == dtype:
            return candidate
    return None


def _ends_of(model: Any, observed: ObservedPass, norms: dict[Any, Norm], dtype: torch.dtype) -> Ends | None:
    """Return what is around a model's layers; None where it does more between its modules, or between its layers."""
    calls, embeddings, head = observed.layers, model.get_input_embeddings(), model.get_output_embeddings()
    rotary, norm = (getattr(model.base_model, name, None) for name in ("rotary_emb", "norm"))
    if rotary is None or norm is None or norm not in norms or not _is_chain(calls):
        return None
    rotation = calls[0].named["position_embeddings"]
    rotated = rotary(calls[0].hidden, observed.positions[None])
    if not all(torch.equal(own, of_layer) for own, of_layer in zip(rotated, rotation, strict=True)):
        return None
    if not torch.equal(embeddings(observed.ids)[None], calls[0].hidden):
        return None
    if not torch.equal(norm(calls[-1].out), observed.hidden):
        return None
    if not torch.equal(head(observed.hidden[:, :1]), observed.logits):
        return None
    product = head.product if isinstance(head, FusedPart) and head.is_plain else None
    recorded = product if isinstance(product, CpuGroup) and can_record(product) else None
    return Ends(embeddings, Rotations(rotary, dtype), norms[norm], head, recorded)


def _layer_of(
    call: ObservedLayer, norms: dict[Any, Norm], arena: Arena, agree: Callable[[bool], bool]
) -> DecoderLayer | None:
    """Return an observed layer's form; None where the kernels do not give its numbers."""
    module, embeddings = call.module, call.named.get("position_embeddings")
    names = ("input_layernorm", "post_attention_layernorm")
    before, between = (norms.get(getattr(module, name, None)) for name in names)
    mlp, qkv = _mlp_of(module.mlp), _product_of(module.self_attn, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    o = _product_of(module.self_attn, ("o_proj",), "dense")
    if before is None or between is None or mlp is None or qkv is None or o is None or len(call.attention) != 1:
        return None
    if not isinstance(embeddings, tuple) or not isinstance(call.out, Tensor):
        return None
    asked, attended = call.attention[0]
    heads = _heads_of(module.self_attn, asked, norms)
    rotation = Rotation(*(part[0].contiguous() for part in embeddings))
    if rotation.cos.dtype != call.hidden.dtype:
        return None
    if heads is None or not _fits(heads, qkv, o, rotation):
        return None
    nothing = attended.new_empty(0)
    sinks = None if asked.sinks is None else asked.sinks.float().contiguous()
    form = replace(asked, query=nothing, key=nothing, value=nothing, sinks=sinks)
    for rotates in (True, False):
        layer = DecoderLayer(before, qkv, heads, form, rotates, o, between, mlp)
        computed = layer.call(layer.project(call.hidden[0], rotation, arena))
        # The ranks of a split model see other heads, and have to finish the layer together.
        if agree(all(_same(getattr(computed, part), getattr(asked, part)) for part in ("query", "key", "value"))):
            out = layer.finish(call.hidden[0], attended.flatten(1), arena)
            return layer if _same(out, call.out[0]) else None
    return None


def _heads_of(attention: Any, call: LayerCall, norms: dict[Any, Norm]) -> Heads | None:
    own = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    own_norms = [norms.get(module) for module in own]
    if any(module is not None and norm is None for module, norm in zip(own, own_norms, strict=True)):
        return None
    _, heads, key_dim = call.query.shape
    if any(norm is not None and len(norm.weight) != key_dim for norm in own_norms):
        return None
    if len({norm.epsilon for norm in own_norms if norm is not None}) > 1:
        return None
    return Heads(heads, call.key.shape[1], key_dim, call.value.shape[-1], *own_norms)


def _fits(heads: Heads, qkv: CpuGroup, o: CpuGroup, rotation: Rotation) -> bool:
    """Tell whether the kernels stay within the rows."""
    width = (heads.heads + heads.kv_heads) * heads.key_dim + heads.kv_heads * heads.value_dim
    columns = rotation.cos.shape[1]
    fits = columns <= heads.key_dim and columns % 2 == 0 and rotation.cos.shape == rotation.sin.shape
    return fits and width == qkv.width and o.in_features == heads.heads * heads.value_dim


def _mlp_of(module: Any) -> Mlp | None:
    gate_up, down = _product_of(module, ("gate_proj", "up_proj"), "gate_up_proj"), _product_of(module, ("down_proj",))
    if gate_up is None or down is None or gate_up.width != 2 * down.in_features:
        return None
    return Mlp(gate_up, down)


def _product_of(module: Any, names: tuple[str, ...], other: str = "") -> CpuGroup | None:
    """Return the product of these layers, in this order, or of the one layer `other`; None if they are not fused."""
    product = whole_product(module, names if hasattr(module, names[0]) else (other,))
    return product if isinstance(product, CpuGroup) else None


def _same(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    rows = expected.float().flatten(1)
    differences = (actual.float().flatten(1) - rows).norm(dim=1)
    return bool((differences <= _TOLERANCE[actual.dtype] * rows.norm(dim=1)).all())
