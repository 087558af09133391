"""Recognizes the modules of transformers' models that the kernels compute, by their numbers; replaces their forward.

Names of modules suggest a form; one pass of a few tokens through the model, and the same by the kernels, decide. What
does not give the same numbers stays as it is.

The layers run kernel by kernel, or, where a step's tokens are few, as one program. A program is recorded for each
number of tokens, over memory that all programs share:

    hidden states, rotation, slots   copied there before a program runs
    attention, adapters              calls whose arguments differ from step to step: one of each is recorded again

A row's bits are the same either way: the kernels are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import activations

from loraplex.kernels.program import Program, as_integers
from loraplex.kernels.threads import ThreadCall, recorded_calls
from loraplex.worker.engine.attention.cpu import CpuPlan
from loraplex.worker.engine.attention.paged import AttentionContext, AttentionStep, KvCache, LayerCall, RandomAttention
from loraplex.worker.engine.decoder.layer import (
    Arena,
    DecoderLayer,
    Heads,
    Mlp,
    Norm,
    Rotation,
    RowOperators,
)
from loraplex.worker.engine.linear.layer import PanelLayer, scratch_memory
from loraplex.worker.engine.lora.base_layers import own_forward, whole_product
from loraplex.worker.engine.lora.cpu import CpuGroup

# Maximum number of a program's tokens: with more, the time between calls is a small part of a step.
_MOST_TOKENS = 64
# Maximum number of programs: one for each number of tokens, and set of layers that adapters are on. 50 KB each.
_MOST_PROGRAMS = 256

_Counters = NDArray[np.int64]


class _NotOneCallError(Exception):
    """A linear layer is not one call of a kernel."""


class _SharedMemory(Arena):
    """An arena whose memory is the same in every layer and program."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(RowOperators(dtype, shared=0))
        # Products that adapters were added to, with their inputs and outputs.
        self.adapted: list[tuple[CpuGroup, Tensor, Tensor]] = []
        # The scratch memory that recorded calls refer to.
        self._scratch: list[Tensor] = []
        self._rows: dict[str, Tensor] = {}

    def rows(self, name: str, like: Tensor, columns: int) -> Tensor:
        """See Arena."""
        return self._memory(name, columns, like.dtype)[: len(like)]

    def multiply(self, name: str, group: CpuGroup, x: Tensor) -> Tensor:
        """See Arena. Raises _NotOneCallError."""
        base, y = group.base, self.rows(name, x, group.width)
        if not isinstance(base, PanelLayer) or not base.takes_rows or group.add is not None:
            raise _NotOneCallError
        inputs = x
        if base.input_dtype != x.dtype:
            inputs = self._memory(f"{name}, inputs", x.shape[1], base.input_dtype)[: len(x)]
            self.operators.widen(x, inputs)
        self._grow_scratch(base)
        base.multiply_into(inputs, y)
        if group.adapts:
            group.add_adapters(x, y)
            self.adapted.append((group, x, y))
        return y

    def _grow_scratch(self, layer: PanelLayer) -> None:
        """Let the scratch memory grow to what any program needs, and keep it."""
        x = torch.empty(_MOST_TOKENS, layer.in_features, dtype=layer.input_dtype)
        with recorded_calls():
            layer.multiply_into(x, x.new_empty(_MOST_TOKENS, layer.out_features))
        scratch, _ = scratch_memory()
        if not any(scratch is one for one in self._scratch):
            self._scratch.append(scratch)

    def _memory(self, name: str, columns: int, dtype: torch.dtype) -> Tensor:
        memory = self._rows.get(name)
        if memory is None:
            memory = self._rows[name] = torch.empty(_MOST_TOKENS, columns, dtype=dtype)
        assert (memory.shape[1], memory.dtype) == (columns, dtype), "rows of the same kind"
        return memory


class _LayersProgram:
    """The recorded calls of all layers for one number of tokens."""

    def __init__(
        self, calls: Sequence[ThreadCall], again: Callable[[CpuPlan], None], counters: Sequence[_Counters]
    ) -> None:
        """Take the calls; `again` makes those of one layer that differ from step to step."""
        self._program = Program(calls)
        self._again = again
        self._counters = counters
        functions = [call.function for call in calls]
        self._places = {
            function: np.flatnonzero(np.array(functions) == function) for function in dict.fromkeys(functions)
        }

    def run(self, plan: CpuPlan) -> None:
        """Make the calls of a step."""
        arguments = self._program.arguments
        with recorded_calls() as calls:
            self._again(plan)
        for call in calls:
            # Arguments that changed are the step's, equal in all layers; the rest are the layer's.
            places, new = self._places[call.function], as_integers(call, arguments.shape[1])
            changed = np.flatnonzero(new != arguments[places[0]])
            arguments[np.ix_(places, changed)] = new[changed]
        self._program.run([*self._counters, plan.counters])


class DecoderSteps:
    """The steps of a model's decoder layers; from one thread."""

    def __init__(self, layers: Sequence[DecoderLayer], context: AttentionContext, dtype: torch.dtype) -> None:
        """Take all layers, in their order; they pass hidden states on as they are, with one rotation for all."""
        self._layers = layers
        self._groups = [group for layer in layers for group in layer.groups]
        self._context = context
        self._dtype = dtype
        self._new = Arena(RowOperators(dtype))
        self._shared = _SharedMemory(dtype)
        self._slots = torch.empty(_MOST_TOKENS, dtype=torch.int64)
        self._programs: dict[object, _LayersProgram] = {}
        self._has_programs = len({layer.widths for layer in layers}) == 1
        self._cache: KvCache | None = None
        # The step whose layers are all computed, while the model still calls them.
        self._done: AttentionStep | None = None

    def forward(self, index: int, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the forward of layer `index`; `original` computes what is no step of the paged cache."""

        def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
            step, embeddings = self._context.step, named.get("position_embeddings")
            if not isinstance(step, AttentionStep) or embeddings is None:
                return original(hidden_states, *arguments, **named)
            stored = step.cache.slots[0][0].dtype
            if hidden_states.dtype != self._dtype or stored not in (self._dtype, torch.int8):
                return original(hidden_states, *arguments, **named)
            if self._done is step:
                if index == len(self._layers) - 1:
                    self._done = None
                return hidden_states
            rotation = Rotation(*(part[0].contiguous() for part in embeddings))
            return self._compute(index, hidden_states[0].contiguous(), rotation, step)[None]

        return forward

    def _compute(self, index: int, x: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
        plan = step.plan
        assert isinstance(plan, CpuPlan), "a step on the CPU"
        self._cache = self._cache or step.cache
        few = len(x) <= _MOST_TOKENS and step.cache is self._cache
        if index == 0 and few and self._has_programs:
            try:
                out = self._run_program(x, rotation, step, plan)
            except _NotOneCallError:
                self._has_programs = False
            else:
                self._done = step if len(self._layers) > 1 else None
                return out
        return self._layers[index].run(x, rotation, step, plan, self._new)

    def _run_program(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan) -> Tensor:
        """Compute all layers. Raises _NotOneCallError."""
        shared, slots = self._shared, self._slots[: len(x)]
        columns = rotation.cos.shape[1]
        out, cos, sin = (
            shared.rows(name, x, width) for name, width in (("out", x.shape[1]), ("cos", columns), ("sin", columns))
        )
        for to, of in ((out, x), (cos, rotation.cos), (sin, rotation.sin), (slots, step.slot_mapping)):
            to.copy_(of)
        key = len(x), torch.get_num_threads(), tuple(group.adapts for group in self._groups)
        if key not in self._programs:
            if len(self._programs) == _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = self._record(out, Rotation(cos, sin), replace(step, slot_mapping=slots), plan)
        self._programs[key].run(plan)
        return out

    def _record(self, x: Tensor, rotation: Rotation, step: AttentionStep, plan: CpuPlan) -> _LayersProgram:
        shared = self._shared
        shared.adapted.clear()
        with recorded_calls() as calls:
            for layer in self._layers:
                out = layer.run(x, rotation, step, plan, shared)
                assert out.data_ptr() == x.data_ptr(), "the next layer's input"
        first, adapted = self._layers[0], shared.adapted[:1]
        call, attended = first.call(shared.rows("qkv", x, first.qkv.width)), first.attended(x, shared)

        def again(plan: CpuPlan) -> None:
            plan.attend(call, step.cache, attended)
            for group, inputs, y in adapted:
                group.add_adapters(inputs, y)

        counters = [shared.operators.counter, scratch_memory()[1], *(group.counters for group, _, _ in adapted)]
        return _LayersProgram(calls, again, counters)


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


def observe_layers(model: Any, context: AttentionContext, length: int) -> list[ObservedLayer]:
    """Return the calls of the decoder layers in a pass of a few tokens, at positions from 0 to `length` - 1."""
    observer, calls = RandomAttention(), list[ObservedLayer]()
    # The last ones too: some models multiply queries by what depends on how late they are.
    positions = torch.linspace(0, length - 1, _TOKENS).long()
    positions[1] = 1 % length
    ids = torch.randint(model.config.vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    with context.during(observer), _watching(model, observer, calls):
        model(
            input_ids=ids,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor([0]),
        )
    return calls


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


def is_chain(calls: list[ObservedLayer]) -> bool:
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
        if getattr(vars(module).get("forward"), "__module__", "") == __name__:
            del module.forward
    arena = Arena(RowOperators(dtype))
    norms = {module: norm for module in model.modules() if (norm := _norm_of(module, dtype)) is not None}
    calls = observe_layers(model, context, length)
    layers = [_layer_of(call, norms, arena, agree) for call in calls]
    recognized = [layer for layer in layers if layer is not None]
    if recognized and len(recognized) == len(layers) and is_chain(calls):
        steps = DecoderSteps(recognized, context, dtype)
        for index, call in enumerate(calls):
            call.module.forward = steps.forward(index, own_forward(call.module))
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
            return function(x)
        flat = nn.functional.pad(x.reshape(-1), (0, -x.numel() % _VECTORS))
        results, done = [], 0
        while done < len(flat):
            count = len(flat) - done
            if not _has_whole_parts(count):
                count -= count % (_VECTORS * torch.get_num_threads())
                count = count if _has_whole_parts(count) else _ALONE
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
