"""Loads the directory of an encoder: always with a classification head, whichever class it was saved from.

So one set of module names serves all adapters; what of the head the checkpoint lacks is random and never used. The head
turns pooled hidden states into logits, by the base's layers or by those that an adapter brings:

    logits = output(norm(act(dense(pooled))))        one row for each text; the base's layers take LoRA too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import layer_norm, linear
from transformers.activations import ACT2FN

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.base_modules import model_bytes
from loraplex.contracts.artifacts.checkpoint import read_checkpoint, read_small_file
from loraplex.contracts.artifacts.encoders import ENCODERS, EncoderFamily, inner_weights
from loraplex.contracts.artifacts.families import is_embedding
from loraplex.contracts.artifacts.quantization import check_device, parse_quantization
from loraplex.worker.engine.attention import paged
from loraplex.worker.engine.device import dtype_name
from loraplex.worker.engine.lora.base_layers import LoadedBase
from loraplex.worker.engine.lora.weights import AdapterWeights
from loraplex.worker.engine.model.loader import check_memory, device_of, dtype_of, from_pretrained
from loraplex.worker.engine.quantized.stored import QuantizedWeights, loading_options, open_slices
from loraplex.worker.engine_api import ModelUnusableError

# Families whose attention is not computed by transformers' attention interface: see body.py.
_OWN_ATTENTION = ("deberta-v2",)


@dataclass(frozen=True)
class LoadedEncoder(LoadedBase):
    """An encoder ready to run."""

    family: EncoderFamily

    @property
    def of_tokens(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers whose inputs are a batch's tokens, not relative positions."""
        return {name: sizes for name, sizes in self.linears.items() if ".pos_" not in name}

    @property
    def body(self) -> Any:
        """Return the encoder without its head."""
        return self.module.get_submodule(self.family.prefix)


def load_encoder(path: str, device: str = "cpu", dtype: str = "auto", quantize: str = "") -> LoadedEncoder:
    """Load the encoder in directory `path`; dtype "auto" is the model's own.

    `quantize` names the scheme in which the weights of its layers are loaded; the head's stay as they are. Raises
    ModelUnusableError.
    """
    directory, place = Path(path), device_of(device)
    if place.type != "cpu":
        raise ModelUnusableError("encoders are computed on the CPU; leave --device out")
    try:
        manifest = read_base_model(path, name="model", quantize=quantize)
        config = parse_object(read_small_file(directory / "config.json"), "config.json")
        checkpoint, scheme = read_checkpoint(directory), parse_quantization(quantize)
        check_device(scheme, device)
    except ArtifactError as error:
        raise ModelUnusableError(f"{directory}: {error}") from None
    family = ENCODERS[manifest.architecture]
    number = dtype_of(dtype, config, next(tensor for _, tensor in checkpoint.tensors.values()), place)
    inner = inner_weights(checkpoint, family)
    parameters, needed = model_bytes(checkpoint, inner, scheme, number.itemsize)
    check_memory(directory, needed, place, manifest.quantization or dtype_name(number))
    quantized = QuantizedWeights.of(checkpoint, inner, scheme)
    attention = "eager" if family.model_type in _OWN_ATTENTION else paged.NAME
    head = tuple(f"{name}." for name in family.head.modules)
    auto = transformers.AutoModelForSequenceClassification
    with open_slices(checkpoint, mapped=False) as slices:
        options = loading_options(directory, quantized, None, place)
        module = from_pretrained(
            auto, directory, slices, number, attention, options, lambda name: name.startswith(head)
        )
    if quantized is not None:
        quantized.fill(module, number, place)
    sizes = {one.name: (one.in_features, one.out_features) for one in manifest.modules}
    adaptable = {name: sizes[name] for name, _ in module.named_modules() if name in sizes}
    ends = {name for name in adaptable if is_embedding(name) or name in family.head.linears}
    return LoadedEncoder(
        module=module,
        family=family,
        device=place,
        dtype=number,
        context_length=manifest.context_length,
        vocab_size=manifest.vocab_size,
        pooling=manifest.pooling,
        linears={name: shape for name, shape in adaptable.items() if name not in ends},
        ends={name: shape for name, shape in adaptable.items() if name in ends},
        directory=directory,
        parameters=parameters,
        quantized=quantized,
    )


class ClassifierHeads:
    """The head of the base model, where it has one, and those of the adapters in the slots."""

    def __init__(self, loaded: LoadedEncoder, slots: int) -> None:
        self._module = loaded.module
        self._head = loaded.family.head
        self._own: list[dict[str, Tensor]] = [{} for _ in range(slots)]
        self._of_base = {name for name in self._head.linears if name in loaded.ends}
        config = loaded.module.config
        activations = {
            "bert": "tanh",
            "roberta": "tanh",
            "deberta": getattr(config, "pooler_hidden_act", ""),
            "model": getattr(config, "classifier_activation", ""),
        }
        self._activation: Callable[[Tensor], Tensor] = ACT2FN[activations[loaded.family.prefix]]
        # Pooling of the hidden states that the head gets; only ModernBERT's config names one.
        self.pooling: str = getattr(config, "classifier_pooling", "cls")

    def complete(self, slot: int) -> bool:
        """Tell whether texts with the adapter in a slot can be classified; -1: no adapter."""
        own = self._own_of(slot)
        return all(name in self._of_base or f"{name}.weight" in own for name in self._head.linears)

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter."""
        self._own[slot] = dict(weights.own)

    def logits(self, pooled: Tensor, slots: Sequence[int]) -> list[Tensor]:
        """Return each row's logits [labels], of pooled [rows, width]; the rows' adapters are complete."""
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            rows.setdefault(slot, []).append(row)
        hidden = self._activation(torch.stack(self._linear(self._head.dense, pooled, rows)))
        if self._head.norm:
            hidden = self._normed(hidden, rows)
        return self._linear(self._head.output, hidden, rows)

    def _linear(self, name: str, x: Tensor, rows: Mapping[int, list[int]]) -> list[Tensor]:
        """Return each row's output of one layer: the base's, or the one that the row's adapter brings."""
        # The base's is called with all rows, because its adapters' rows are those of the step.
        out = list(self._module.get_submodule(name)(x)) if name in self._of_base else [x[0]] * len(x)
        for slot, its in rows.items():
            own = self._own_of(slot)
            if f"{name}.weight" in own:
                y = linear(x[its], own[f"{name}.weight"], own.get(f"{name}.bias"))
                for row, value in zip(its, y, strict=True):
                    out[row] = value
        return out

    def _normed(self, x: Tensor, rows: Mapping[int, list[int]]) -> Tensor:
        norm: Any = self._module.get_submodule(self._head.norm)
        y: Tensor = norm(x)
        for slot, its in rows.items():
            own = self._own_of(slot)
            weight = own.get(f"{self._head.norm}.weight")
            if weight is not None:
                y[its] = layer_norm(x[its], norm.normalized_shape, weight, own.get(f"{self._head.norm}.bias"), norm.eps)
        return y

    def _own_of(self, slot: int) -> Mapping[str, Tensor]:
        """Return the head's parameters that the adapter in a slot brings; -1: no adapter."""
        return self._own[slot] if slot >= 0 else {}
