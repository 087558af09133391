"""Recognizes what the modules of transformers' models compute, on any device: their forms, which kernels then compute.

A copy of a module, on the CPU and with simple functions in place of the modules in it, is run over a few random
numbers. It has the form whose operators of torch give the same numbers, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from loraplex.worker.engine.attention.paged import LayerCall, RandomAttention
from loraplex.worker.engine.lora.base_layers import FusedPart, FusedProduct

# Maximum number of columns that are normalized at once.
_MOST_COLUMNS = 16_384
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
# The offsets of normalizations, and whether they round late: Llama's, OLMo 2's and Gemma's.
NORMS = ((0.0, False), (0.0, True), (1.0, True))
# The functions of gates.
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": partial(gelu, approximate="tanh")}
# Names of layers that are one product, or of the one layer that some families have in their place.
QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
# Number of features that copies of modules take, and of their tokens.
_FEATURES, _TOKENS = 16, 5


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization: x / sqrt(mean of x ** 2 + epsilon) * (offset + weight [columns]).

    The product with the weight is rounded to the dtype of x; with `late` for the first time.
    """

    weight: Tensor
    epsilon: float
    offset: float = 0.0
    late: bool = False

    @property
    def folded(self) -> Norm:
        """Return it with its offset in the weight, which is float32."""
        weight = self.weight.float()
        return Norm(weight + self.offset if self.offset else weight, self.epsilon)

    @property
    def kind(self) -> tuple[float, float, bool]:
        """Return all but the weight."""
        return self.epsilon, self.offset, self.late

    def compute(self, x: Tensor) -> Tensor:
        """Compute it by torch's operators."""
        numbers = x.float()
        normed = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.late:
            return (normed * (self.offset + self.weight.float())).to(x.dtype)
        return normed.to(x.dtype) * (self.offset + self.weight)


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """An attention over rows of queries, keys and values, side by side.

    The first `columns` numbers of each query and key are rotated. Before, these are normalized where there are `norms`:
    each head by itself or, where their weights are so long, all heads together. `call` has all but the step's numbers.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    columns: int
    call: LayerCall
    norms: tuple[Norm, Norm] | None = None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of queries, keys and values."""
        return self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim

    def call_of(self, turned: Tensor, x: Tensor) -> LayerCall:
        """Return the call of queries and keys in the rows `turned`, and of the values of rows x: these are views."""
        of, tokens, dim = self.call, len(x), self.key_dim
        queries, keys, _ = self.widths
        row, first, values = turned.stride(0), turned.storage_offset(), x.storage_offset() + queries + keys
        query = turned.as_strided((tokens, self.heads, dim), (row, dim, 1), first)
        key = turned.as_strided((tokens, self.kv_heads, dim), (row, dim, 1), first + queries)
        value = x.as_strided((tokens, self.kv_heads, self.value_dim), (x.stride(0), self.value_dim, 1), values)
        return LayerCall(of.layer, query, key, value, of.scaling, of.window, of.softcap, of.sinks)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The names of a layer's normalizations: of what attention and MLP get, and of what they give; None for none.

    What they give is added to the layer's input.
    """

    before: str | None
    attended: str | None
    between: str | None
    computed: str | None

    @property
    def norms(self) -> list[str]:
        """Return the names of those that there are."""
        return [name for name in (self.before, self.attended, self.between, self.computed) if name is not None]


LLAMA = LayerForm("input_layernorm", None, "post_attention_layernorm", None)
LAYERS = (
    LLAMA,
    LayerForm(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    LayerForm("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a model's modules; of MLPs the functions of their gates, by name."""

    norms: Mapping[nn.Module, Norm]
    gates: Mapping[nn.Module, str]
    attentions: Mapping[nn.Module, AttentionForm]
    layers: Mapping[nn.Module, LayerForm]


@torch.inference_mode()
def recognize(model: Any, dtype: torch.dtype, length: int) -> Forms:
    """Recognize the modules of a model whose linear layers are in place; `length` is that of its context."""
    for module in model.modules():
        # Of an earlier call, whose linear layers are not these.
        if getattr(vars(module).get("forward"), "__module__", "").startswith("loraplex.worker.engine.decoder."):
            del module.forward
    columns = 2 * len(getattr(getattr(model.base_model, "rotary_emb", None), "inv_freq", ()))

    def each(form_of: Callable[[nn.Module], Any]) -> dict[nn.Module, Any]:
        return {module: form for module in model.modules() if (form := form_of(module)) is not None}

    norms, layers = each(lambda module: norm_form(module, dtype)), each(layer_form)
    layers = {
        layer: form for layer, form in layers.items() if all(getattr(layer, name) in norms for name in form.norms)
    }
    gates = each(lambda module: gate_form(module, dtype))
    attentions = each(lambda module: attention_form(module, dtype, length, columns))
    return Forms(norms, gates, attentions, layers)


def fused_product(module: Any, choices: Sequence[Sequence[str]]) -> FusedProduct | None:
    """Return the product of all of a module's layers of the first of these names; None where they are no whole one."""
    names = next((names for names in choices if hasattr(module, names[0])), ())
    parts = [part for name in names if isinstance(part := getattr(module, name, None), FusedPart) and part.is_plain]
    if not parts or len(parts) < len(names):
        return None
    product = parts[0].product
    whole = [part.index for part in parts if part.product is product] == list(range(len(product.widths)))
    return product if whole else None


class Sines(nn.Module):
    """A function in place of a module: sines of as many numbers, or of `width`. It keeps the named arguments."""

    def __init__(self, factor: float, width: int = 0, *, pair: bool = False) -> None:
        super().__init__()
        self.named: dict[str, Any] = {}
        self._factor, self._width, self._pair = factor, width, pair

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        """Return sines up to 10, so that limits of what modules compute show; an attention returns a pair."""
        self.named = named
        x = hidden_states.float() * self._factor
        if self._width:
            x = x.sum(-1, keepdim=True) + torch.arange(self._width)
        result = (10 * x.sin()).to(hidden_states.dtype)
        return (result, None) if self._pair else result


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def late_positions(length: int) -> Tensor:
    """Return positions [1, tokens] up to the last: some models multiply late queries by what depends on how late."""
    positions = torch.linspace(0, length - 1, _TOKENS).long()
    positions[1] = 1 % length
    return positions[None]


def try_module(probe: nn.Module, x: Tensor, **named: Any) -> Any:
    """Compute by a module; None where it takes something else."""
    try:
        return probe(x, **named)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def equal(actual: Any, expected: Tensor) -> bool:
    """Tell whether a result is this tensor, to the bit."""
    return isinstance(actual, Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)


def _with_sines(
    module: nn.Module, choices: Sequence[tuple[str, ...]], last: str, x: Tensor
) -> tuple[Any, list[Tensor]]:
    """Return a copy of a module with sines in place of its layers, and those of rows x in place of the first ones.

    Of a module that has no such layers, None and nothing.
    """
    product = fused_product(module, choices) if hasattr(module, last) else None
    if product is None:
        return None, []
    names = next(names for names in choices if len(names) == len(product.widths))
    sines = {
        name: Sines(2.0 + index, width) for index, (name, width) in enumerate(zip(names, product.widths, strict=True))
    }
    probe = copy.copy(module)
    probe._modules = {**module._modules, **sines, last: Sines(0.3)}
    return probe, [sine(x) for sine in sines.values()]


def _with_random_weight(norm: Any) -> tuple[nn.Module, Tensor]:
    """Return a copy of a normalization on the CPU with a random weight, and the weight."""
    probe, numbers = copy.copy(norm), _normal(len(norm.weight)).to(norm.weight.dtype)
    probe._parameters = {"weight": nn.Parameter(numbers, requires_grad=False)}
    return probe, numbers


def norm_form(module: Any, dtype: torch.dtype) -> Norm | None:
    """Return the form of a normalization; None where a module has none of NORMS."""
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    parameters = dict(module.named_parameters()) if isinstance(epsilon, float) else {}
    if parameters.keys() != {"weight"} or isinstance(module, nn.LayerNorm):
        return None
    weight = parameters["weight"]
    if weight.ndim != 1 or len(weight) > _MOST_COLUMNS or weight.dtype != dtype:
        return None
    probe, numbers = _with_random_weight(module)
    # Rows of many sizes: in the smallest epsilon matters.
    x = (_normal(8, len(weight)) * torch.logspace(-4, 3, 8)[:, None]).to(dtype)
    expected = try_module(probe, x)
    forms = (Norm(numbers, epsilon, *form) for form in NORMS)  # type: ignore[arg-type]
    return next((replace(form, weight=weight) for form in forms if equal(expected, form.compute(x))), None)


def gate_form(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the name of the function with which an MLP computes down(function(gate(x)) * up(x)), in _GATES or None."""
    x = _normal(_TOKENS, _FEATURES).to(dtype)
    probe, parts = _with_sines(module, GATE_UP, "down_proj", x)
    if probe is None:
        return None
    # Of the same strides as the module's: torch has other bits in what is left over of vectors.
    (gate, up), computed = parts if len(parts) > 1 else parts[0].chunk(2, -1), try_module(probe, x)
    return next((name for name, bend in _GATES.items() if equal(computed, probe.down_proj(bend(gate) * up))), None)


def attention_form(module: Any, dtype: torch.dtype, length: int, columns: int) -> AttentionForm | None:
    """Return the form of an attention; None where a module is none that rotates, attends and multiplies, and no more.

    The model's rotations have `columns`; 0: as many as a head.
    """
    x, columns = _normal(_TOKENS, _FEATURES).to(dtype), columns or getattr(module, "head_dim", 0)
    probe, parts = _with_sines(module, QKV, "o_proj", x)
    if probe is None or not columns or columns % 2:
        return None
    own, random = {name: module._modules.get(name) for name in ("q_norm", "k_norm")}, list[Norm]()
    norms = [form for norm in own.values() if (form := norm_form(norm, dtype)) is not None]
    if len(norms) == len(own) and norms[0].kind == norms[1].kind:
        for (name, norm), form in zip(own.items(), norms, strict=True):
            probe._modules[name], weight = _with_random_weight(norm)
            random.append(replace(form, weight=weight))
    cos, sin = _normal(2, _TOKENS, columns).to(dtype)
    call = _observe(probe, x, cos, sin, length)
    if call is None:
        return None
    (_, heads, key_dim), (_, kv_heads, value_dim), nothing = call.query.shape, call.value.shape, x.new_empty(0)
    of_all = replace(call, query=nothing, key=nothing, value=nothing)
    attention = AttentionForm(heads, kv_heads, key_dim, value_dim, columns, of_all)
    if sum(attention.widths) != sum(part.shape[1] for part in parts) or columns > key_dim:
        return None
    parts = parts if len(parts) > 1 else [*parts[0].split_with_sizes(attention.widths, -1)]
    if [len(norm.weight) for norm in random] in ([key_dim, key_dim], [*attention.widths[:2]]):
        attention = replace(attention, norms=(norms[0], norms[1]))
        for index, norm in enumerate(random):
            parts[index] = norm.compute(parts[index].reshape(_TOKENS, -1, len(norm.weight))).flatten(1)
    rows = torch.cat(parts, -1)
    still = attention.call_of(rows, rows)
    if not equal(call.value, still.value):
        return None
    asked, both = torch.cat([call.query, call.key], 1), torch.cat([still.query, still.key], 1)
    if equal(asked, _turned(both, cos, sin)):
        return attention
    return replace(attention, columns=0) if equal(asked, both) else None


def _observe(probe: Any, x: Tensor, cos: Tensor, sin: Tensor, length: int) -> LayerCall | None:
    """Return the call of an attention that multiplies what it attended to by its last layer; None of any other."""
    observer = RandomAttention()
    named = {"position_embeddings": (cos[None], sin[None]), "position_ids": late_positions(length)}
    with probe.attention_context.during(observer):
        computed = try_module(probe, x[None], attention_mask=None, **named)
    if computed is None or len(observer.calls) != 1:
        return None
    call, attended = observer.calls[0]
    return call if equal(computed[0], probe.o_proj(attended.flatten(1))[None]) else None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of x [tokens, heads, dim], as many as cos and sin [tokens, columns] have."""
    first, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    a, b = first.chunk(2, -1)
    return torch.cat([first * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None], rest], -1)


def layer_form(layer: nn.Module) -> LayerForm | None:
    """Return the form of a layer that adds its attention and its MLP, and passes its arguments on as they are."""
    has = layer._modules.keys()
    return next((form for form in LAYERS if {"self_attn", "mlp", *form.norms} <= has and _adds(layer, form)), None)


def _adds(layer: nn.Module, form: LayerForm) -> bool:
    probe, attention, mlp = copy.copy(layer), Sines(17.0, pair=True), Sines(5.0)
    norms: dict[str | None, nn.Module] = {name: Sines(2.0 + index) for index, name in enumerate(form.norms)}
    probe._modules = {**layer._modules, **norms, "self_attn": attention, "mlp": mlp}  # type: ignore[dict-item]
    norms[None] = nn.Identity()
    x = _normal(1, _TOKENS, _FEATURES)
    named = {"position_embeddings": (x, x), "attention_mask": None, "position_ids": torch.zeros(1, _TOKENS)}
    computed, passed = try_module(probe, x, **named), attention.named
    sums = x + norms[form.attended](attention(norms[form.before](x))[0])
    expected = sums + norms[form.computed](mlp(norms[form.between](sums)))
    same = all(passed.pop(name, None) is value for name, value in named.items())
    return same and not any(passed.values()) and equal(computed, expected)
