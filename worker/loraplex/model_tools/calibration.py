"""Rounds a decoder's linear layers to 4 bits by what they compute for texts, and keeps the most sensitive in 8.

texts          drawn from the model itself, half of them as chats, or windows of a given text: ids [texts, tokens]
sensitivity    of each product, by the texts' gradients: how much its rounding changes the texts' probability
layer by layer inputs [texts, tokens, hidden] through the layers that are rounded already -> rounded weights -> outputs

The model is in memory once, in float32. Given the same texts, version of torch and processor, codes are the same.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_modules import LinearWeight
from loraplex.contracts.artifacts.checkpoint import read_checkpoint
from loraplex.contracts.artifacts.families import is_inner
from loraplex.contracts.artifacts.quantization import Quantization
from loraplex.worker.engine.device import step_threads
from loraplex.worker.engine.model.loader import from_pretrained
from loraplex.worker.engine.quantized.rounding import round_weight
from loraplex.worker.engine.quantized.stored import open_slices, transformers_config
from loraplex.worker.engine.quantized.weight import QuantizedWeight, quantize, quantize_weight
from loraplex.worker.engine_api import ModelUnusableError

# Number of texts, and the tokens of each; of texts that are computed at once, and whose gradients are measured.
TEXTS, TOKENS = 48, 256
_ROWS, _MEASURED = 8, 8
# Stands for what a user writes, in a chat template.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
# The layers of the most sensitive products are kept in this scheme.
EIGHT_BITS = Quantization(8, symmetric=True)
# Called with what is done, and how much there is to do.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Calibration:
    """The settings of a calibration: the bound of bits of a weight, with scales and zero points, and the texts.

    `texts` is the path of a UTF-8 text; empty: texts are drawn from the model, by `seed`.
    """

    bits: float
    texts: str = ""
    seed: int = 0


def calibrated_weights(
    directory: Path, weights: Mapping[str, LinearWeight], scheme: Quantization, how: Calibration, progress: Progress
) -> dict[str, QuantizedWeight]:
    """Round the inner weights of a model, by module name; those with 8 bits are the most sensitive ones.

    Raises ArtifactError where the model has no room for the texts, or the texts no tokens, or the bound is too low.
    """
    inner = {name: weight for name, weight in weights.items() if is_inner(name)}
    least = _bytes(inner, inner, scheme)
    numbers = sum(weight.in_features * weight.out_features for weight in inner.values())
    room = int(how.bits * numbers / 8) - least
    if room < 0:
        raise ArtifactError("--bits", f"{how.bits:g} is below the {8 * least / numbers:.2f} that {scheme} takes")
    model = _load(directory)
    texts = _given(directory, Path(how.texts), how.seed) if how.texts else _drawn(model, directory, how.seed)
    steps = len(_layers(model)) + 1
    progress(0, steps)
    sensitivities, products = _sensitivities(model, inner, texts[:: max(1, len(texts) // _MEASURED)], scheme)
    progress(1, steps)
    wide = _most_sensitive(inner, products, sensitivities, scheme, room)
    with torch.inference_mode():
        return dict(_rounded(model, inner, wide, scheme, texts, lambda done: progress(done + 1, steps)))


def _load(directory: Path) -> Any:
    try:
        with open_slices(read_checkpoint(directory), mapped=False) as slices:
            options = {"config": transformers_config(directory)}
            auto = transformers.AutoModelForCausalLM
            model = from_pretrained(auto, directory, slices, torch.float32, None, options)
    except ModelUnusableError as error:
        raise ArtifactError("model", str(error)) from error
    torch.set_num_threads(step_threads(sum(one.numel() for one in model.parameters()), 0))
    return model


def read_tokenizer(directory: Path) -> Any:
    """Return a model's tokenizer of transformers. Raises ArtifactError."""
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ArtifactError("model", f"its tokenizer cannot be read: {' '.join(str(error).split())}") from error


def _given(directory: Path, path: Path, seed: int) -> Tensor:
    """Return windows of a text, chosen by the seed: ids [texts, tokens]."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError("--texts", f"{path} cannot be read as UTF-8 text: {error}") from error
    ids = torch.tensor(read_tokenizer(directory)(text)["input_ids"])
    windows = ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)
    if not len(windows):
        raise ArtifactError("--texts", f"{path} has {len(ids)} tokens; give a text of at least {TOKENS}")
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return windows[order[:TEXTS]]


def _drawn(model: Any, directory: Path, seed: int) -> Tensor:
    """Draw texts from the model at temperature 1, half of them as a user begins to write: ids [texts, tokens]."""
    tokens = min(TOKENS, model.config.max_position_embeddings)
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    texts = []
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        for begin in _beginnings(model, directory):
            rows = torch.tensor([begin] * (TEXTS // 2))
            new = tokens - len(begin)
            lengths = {"min_new_tokens": new, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
            mask = torch.ones_like(rows)
            texts.append(model.generate(rows, attention_mask=mask, do_sample=True, **plain, **lengths))
    # Out of inference mode: gradients are computed of them.
    return torch.cat(texts).clone()


def _beginnings(model: Any, directory: Path) -> list[list[int]]:
    """Return the ids that a text and a chat begin with; a model without tokenizer or template has texts alone."""
    begin = model.config.bos_token_id
    if not isinstance(begin, int):
        end = model.config.eos_token_id
        begin = end if isinstance(end, int) else end[0] if end else 0
    text = [begin]
    try:
        tokenizer = read_tokenizer(directory)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False).split(_MARK)[0]
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    except Exception:  # no template, or one that does not take a lone user
        ids = []
    return [text, ids if 0 < len(ids) < TOKENS // 2 else text]


def _layers(model: Any) -> nn.ModuleList:
    layers: nn.ModuleList = getattr(model.base_model, "layers", None) or model.base_model.h
    return layers


def _bytes(weights: Mapping[str, LinearWeight], names: Collection[str], scheme: Quantization) -> int:
    """Return the bytes of weights, in memory and in the copy."""
    return sum(scheme.weight_bytes(weights[name].out_features, weights[name].in_features) for name in names)


def _values(model: Any, name: str, weight: LinearWeight) -> Tensor:
    """Return a module's weight [out, in]; a view."""
    values: Tensor = model.get_submodule(name).weight.detach()
    return values.t() if weight.input_first else values


def _sensitivities(
    model: Any, weights: Mapping[str, LinearWeight], texts: Tensor, scheme: Quantization
) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """Return by how much rounding each weight alone would change the texts' probability: its Fisher information.

    That is the sum over tokens of (gradient of the output . change of the output) squared. Also the names of the
    layers that have the same input, which engines compute as one product.
    """
    sharing: dict[int, list[str]] = defaultdict(list)
    sums: dict[str, float] = defaultdict(float)
    changes: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def forward(_module: nn.Module, inputs: Any, output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2)
            # Inputs stay in memory until the gradients are known: no two have one address.
            if name not in sharing[x.data_ptr()]:
                sharing[x.data_ptr()].append(name)

            def backward(gradient: Tensor) -> None:
                if name not in changes:
                    values = _values(model, name, weights[name])
                    rounded = quantize_weight(values, scheme)
                    changes[name] = (rounded.dequantize() - values).bfloat16()
                change = x @ changes[name].float().t()
                sums[name] += float((gradient.flatten(0, -2) * change).sum(-1).square().sum())

            output.register_hook(backward)  # type: ignore[no-untyped-call]  # torch's own

        return forward

    hooks = [model.get_submodule(name).register_forward_hook(watch(name)) for name in weights]
    with torch.enable_grad():
        for text in texts:
            sharing.clear()
            embedded = model.get_input_embeddings()(text[None]).requires_grad_(True)
            logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
            cross_entropy(logits[:-1].float(), text[1:], reduction="sum").backward()  # type: ignore[no-untyped-call]  # torch's own
    for hook in hooks:
        hook.remove()
    return sums, [tuple(names) for names in sharing.values()]


def _most_sensitive(
    weights: Mapping[str, LinearWeight],
    products: Sequence[tuple[str, ...]],
    sensitivities: Mapping[str, float],
    scheme: Quantization,
    room: int,
) -> set[str]:
    """Return the weights that get 8 bits: those that gain the most for a byte, as many as there is room for.

    Layers that one product computes stay together.
    """
    costs = {names: _bytes(weights, names, EIGHT_BITS) - _bytes(weights, names, scheme) for names in products}
    gains = {names: sum(sensitivities[name] for name in names) / max(costs[names], 1) for names in products}
    chosen: set[str] = set()
    for names in sorted(products, key=lambda names: -gains[names]):
        if costs[names] <= room:
            room -= costs[names]
            chosen.update(names)
    return chosen


def _rounded(
    model: Any,
    weights: Mapping[str, LinearWeight],
    wide: Collection[str],
    scheme: Quantization,
    texts: Tensor,
    done: Callable[[int], None],
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Round layer after layer, each for the inputs that it gets from the rounded ones before it."""
    names_of = {model.get_submodule(name): name for name in weights}
    layers, states = _layers(model), list(torch.split(texts, _ROWS))
    arguments = _arguments(model, layers, texts[:1])
    states = [_entry(model, layers[0], batch) for batch in states]
    for number, layer in enumerate(layers):
        compute = partial(_compute, layer, *arguments[number])
        own = {names_of[module]: module for module in layer.modules() if module in names_of}
        hessians = _hessians(own, compute, states)
        for name in own:
            values = _values(model, name, weights[name])
            quantized = quantize(values, 8) if name in wide else round_weight(values, hessians[name], scheme.group)
            values.copy_(quantized.dequantize())
            yield name, quantized
        states = [compute(state) for state in states]
        done(number + 1)


class _Reached(Exception):
    """Ends a pass at a layer's inputs."""


def _arguments(model: Any, layers: nn.ModuleList, text: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return what each layer is called with behind its states: those of one text hold for all of its length."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def before(_layer: nn.Module, rest: Any, words: dict[str, Any]) -> None:
        arguments.append((rest[1:], {name: value for name, value in words.items() if name != "hidden_states"}))

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    model(input_ids=text, use_cache=False)
    for hook in hooks:
        hook.remove()
    return arguments


def _entry(model: Any, first: nn.Module, batch: Tensor) -> Tensor:
    """Return the states [texts, tokens, hidden] that enter the first layer."""
    states: list[Tensor] = []

    def before(_layer: nn.Module, rest: Any, words: dict[str, Any]) -> None:
        states.append(rest[0] if rest else words["hidden_states"])
        raise _Reached

    hook = first.register_forward_pre_hook(before, with_kwargs=True)
    with contextlib.suppress(_Reached):
        model(input_ids=batch, use_cache=False)
    hook.remove()
    return states[0]


def _compute(layer: nn.Module, rest: tuple[Any, ...], words: Mapping[str, Any], state: Tensor) -> Tensor:
    output = layer(state, *rest, **words)
    values: Tensor = output if isinstance(output, Tensor) else output[0]
    return values


def _hessians(
    modules: Mapping[str, nn.Module], compute: Callable[[Tensor], Tensor], states: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the sum of products of each module's inputs [in, in]; modules with the same input share one."""
    inputs: dict[int, Tensor] = {}
    seen: dict[str, int] = {}
    sums: dict[str, Tensor] = {}

    def before(name: str, x: Tensor) -> None:
        seen[name] = id(x)
        inputs[id(x)] = x

    hooks = [
        module.register_forward_pre_hook(lambda _module, x, name=name: before(name, x[0]))
        for name, module in modules.items()
    ]
    for state in states:
        inputs.clear()
        compute(state)
        for key, x in inputs.items():
            rows = x.flatten(0, -2)
            product, names = rows.t() @ rows, [name for name in seen if seen[name] == key]
            total = sums[names[0]].add_(product) if names[0] in sums else product
            sums.update(dict.fromkeys(names, total))
    for hook in hooks:
        hook.remove()
    return sums
