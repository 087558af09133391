"""Lets kernels compute what they can of a model on the CPU: whole steps, or normalizations and activations alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import activations

from loraplex.worker.engine.attention.paged import AttentionContext
from loraplex.worker.engine.decoder.layer import Arena, DecoderLayer, RowOperators
from loraplex.worker.engine.decoder.recognition import (
    GATE_UP,
    LLAMA,
    QKV,
    Forms,
    Norm,
    Sines,
    equal,
    fused_product,
    late_positions,
    recognize,
    try_module,
)
from loraplex.worker.engine.decoder.steps import DecoderSteps, Ends, Rotations, can_record
from loraplex.worker.engine.linear.experts import PanelExperts
from loraplex.worker.engine.lora.base_layers import FusedPart, own_forward
from loraplex.worker.engine.lora.cpu import CpuGroup

_Norms = Mapping[nn.Module, Norm]


@torch.inference_mode()
def use_kernels(model: Any, context: AttentionContext, dtype: torch.dtype, length: int) -> None:
    """Let the kernels compute what they can of a model whose linear layers are in place.

    `length` is that of its context.
    """
    forms, arena = recognize(model, dtype, length), Arena(RowOperators(dtype))
    norms = {module: norm.folded for module, norm in forms.norms.items()}
    layers = list(getattr(model.base_model, "layers", ()))
    decoders = [layer for module in layers if (layer := _layer_of(module, forms, norms)) is not None]
    ends = _ends_of(model, layers, norms, dtype, length) if layers and len(decoders) == len(layers) else None
    if ends is not None and {layer.attention.columns for layer in decoders} <= {0, ends.rotations.width // 2}:
        steps, body = DecoderSteps(decoders, ends, context, dtype), model.base_model
        body.forward = steps.body_forward(own_forward(body))
        model.forward = steps.forward(own_forward(model), body)
    for module, norm in norms.items():
        module.forward = _norm_forward(norm, arena, own_forward(module))
    for module in model.modules():
        if type(module).__module__ == activations.__name__ or isinstance(module, nn.SiLU | nn.GELU):
            module.forward = in_whole_vectors(own_forward(module))
        # torch computes what routers and gates of experts do beside their products.
        if any(isinstance(vars(child).get("forward"), PanelExperts) for child in module.children()):
            module.forward = with_whole_sigmoids(own_forward(module))


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


class _WholeSigmoids(TorchFunctionMode):
    """Computes sigmoids in whole vectors."""

    _sigmoid = staticmethod(in_whole_vectors(torch.sigmoid))

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func in {torch.sigmoid, Tensor.sigmoid}:
            return self._sigmoid(args[0])
        return func(*args, **(kwargs or {}))


def with_whole_sigmoids(mixture: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a mixture of experts with sigmoids in whole vectors."""

    def forward(*arguments: Any, **named: Any) -> Any:
        with _WholeSigmoids():
            return mixture(*arguments, **named)

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


def _ends_of(model: Any, layers: Sequence[Any], norms: _Norms, dtype: torch.dtype, length: int) -> Ends | None:
    """Return what is around a model's layers; None where it does more between its modules, or between its layers."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    norm: Any = getattr(model.base_model, "norm", None)
    if rotary is None or norm not in norms:
        return None
    positions, sines = late_positions(length), [Sines(1.0 + index) for index in range(len(layers))]
    ids = torch.arange(positions.shape[1])[None] % model.config.vocab_size
    for layer, sine in zip(layers, sines, strict=True):
        layer.forward = sine.forward
    output = try_module(model, ids, position_ids=positions, use_cache=False, logits_to_keep=torch.tensor([0]))
    for layer in layers:
        del layer.forward
    x = embeddings(ids)
    rotation = rotary(x, positions)
    for sine in sines:
        passed, x = sine.named.get("position_embeddings", ()), sine(x)
        if len(passed) != 2 or not all(map(equal, passed, rotation)):
            return None
    if output is None or not equal(output.logits, head(norm(x)[:, :1])) or rotation[0].dtype != dtype:
        return None
    product = head.product if isinstance(head, FusedPart) and head.is_plain else None
    recorded = product if isinstance(product, CpuGroup) and can_record(product) else None
    return Ends(embeddings, Rotations(rotary, dtype), norms[norm], head, recorded)


def _layer_of(module: Any, forms: Forms, norms: _Norms) -> DecoderLayer | None:
    """Return a layer whose modules have the forms that the kernels compute; None where they do not."""
    if forms.layers.get(module) != LLAMA:
        return None
    attention, mlp = module.self_attn, module.mlp
    form = forms.attentions.get(attention)
    choices = (attention, QKV), (attention, [("o_proj",)]), (mlp, GATE_UP), (mlp, [("down_proj",)])
    groups = [group for choice in choices if isinstance(group := fused_product(*choice), CpuGroup)]
    if form is None or forms.gates.get(mlp) != "silu" or len(groups) < len(choices):
        return None
    if form.norms is not None:
        if len(form.norms[0].weight) != form.key_dim:
            return None
        form = replace(form, norms=(norms[attention.q_norm], norms[attention.k_norm]))
    if form.call.sinks is not None:
        form = replace(form, call=replace(form.call, sinks=form.call.sinks.float().contiguous()))
    before, between = (norms[getattr(module, name)] for name in LLAMA.norms)
    qkv, o, gate_up, down = groups
    return DecoderLayer(before, form, between, (qkv, o, gate_up, down))
