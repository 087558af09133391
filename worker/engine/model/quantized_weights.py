"""Loads quantized weights: those of quantized checkpoints, and float weights that are quantized while they are loaded.

transformers builds the model without these weights and loads the rest; then they are read, one after the other, so that
the memory never holds more than one of them in floats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from artifacts.base_modules import LinearWeight
from artifacts.checkpoint import Checkpoint
from artifacts.families import HEAD
from artifacts.quantization import Quantization
from worker.engine.quantized.embedding import QuantizedEmbedding
from worker.engine.quantized.schemes import quantize_tensor, quantize_weight
from worker.engine.quantized.stored import ReadTensor, open_tensors, read_weight
from worker.engine.quantized.weight import QuantizedLinear, QuantizedWeight, equal
from worker.engine_api import ModelUnusableError

_METHOD = "loraplex"
# Names of tensors that transformers has no place for: they are read here.
_READ_HERE = r"\.(weight|weight_\w+|qweight|qzeros|scales|g_idx)$"


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of a checkpoint that are loaded quantized, by module name; `scheme` for those that are in floats.

    `tied` says that the output head shares the token embeddings' weight.
    """

    checkpoint: Checkpoint
    weights: Mapping[str, LinearWeight]
    scheme: Quantization | None
    tied: bool

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        weights: Mapping[str, LinearWeight],
        scheme: Quantization | None,
        *,
        tied: bool = False,
    ) -> QuantizedWeights | None:
        """Choose the weights that are loaded quantized; None where there are none."""
        chosen = {name: weight for name, weight in weights.items() if weight.scheme(scheme) is not None}
        if tied:
            chosen.pop(HEAD, None)
        return cls(checkpoint, chosen, scheme, tied) if chosen else None

    def loading_options(self, directory: Path) -> dict[str, Any]:
        """Return the arguments of from_pretrained that leave these weights to `fill`."""
        config, awaited = _transformers_config(directory), list(self.weights)
        if self.tied and self.embeddings is not None:
            config.tie_word_embeddings = False
            awaited.append(HEAD)
        return {"config": config, "quantization_config": _AwaitedWeights(awaited)}

    def fill(self, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Put the quantized layers into a loaded model that is on the device already."""
        with open_tensors(self.checkpoint) as read:
            for name, weight in self.weights.items():
                place, quantized = module.get_submodule(name), self._read(weight, read).to(device)
                if not weight.is_embedding:
                    module.set_submodule(name, QuantizedLinear(quantized, place.bias))
                    continue
                scale = getattr(place, "embed_scale", None)
                embedding = QuantizedEmbedding(quantized, dtype, None if scale is None else float(scale))
                module.set_submodule(name, embedding)
                if self.tied:
                    module.set_submodule(HEAD, QuantizedLinear(quantized, module.get_submodule(HEAD).bias))

    @property
    def embeddings(self) -> LinearWeight | None:
        """Return the token embeddings, where they are quantized."""
        return next((weight for weight in self.weights.values() if weight.is_embedding), None)

    def has_end(self, module: str) -> bool:
        """Tell whether token embeddings or an output head have a quantized weight."""
        return self._end(module) is not None

    def repeats(self, module: str, values: Tensor, dtype: torch.dtype) -> bool:
        """Tell whether the end's weight, before it was quantized, equals these values in `dtype`."""
        weight = self._end(module)
        assert weight is not None
        with open_tensors(self.checkpoint) as read:
            if weight.stored is None:
                return torch.equal(read(weight.tensor).to(dtype), values.to(dtype))
            return equal(read_weight(weight.stored, read), quantize_weight(values, weight.stored.scheme.quantization))

    def _end(self, module: str) -> LinearWeight | None:
        return self.weights.get(module) or (self.embeddings if self.tied else None)

    def _read(self, weight: LinearWeight, read: ReadTensor) -> QuantizedWeight:
        if weight.stored is not None:
            return read_weight(weight.stored, read)
        assert self.scheme is not None
        return quantize_tensor(read(weight.tensor), weight, self.scheme)


def has_tied_head(directory: Path) -> bool:
    """Tell whether a model's output head shares its token embeddings' weight. Raises ModelUnusableError."""
    try:
        return bool(_transformers_config(directory).tie_word_embeddings)
    except Exception as error:  # transformers raises errors of many kinds for a config that it can't read
        raise ModelUnusableError(f"{directory} can't be loaded: {' '.join(str(error).split())}") from error


def _transformers_config(directory: Path) -> Any:
    """Return a model's config without the checkpoint's own quantization, which transformers would do in its way."""
    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


@register_quantization_config(_METHOD)
class _AwaitedWeights(QuantizationConfigMixin):
    """Names the layers whose weights transformers does not load."""

    quant_method: Any

    def __init__(self, names: Collection[str]) -> None:
        self.quant_method = _METHOD
        self.names = names


@register_quantizer(_METHOD)
class _Emptied(HfQuantizer):
    """Takes weights away from layers, between the construction of a model and the loading of the other weights."""

    quantization_config: _AwaitedWeights
    is_trainable = False

    def is_serializable(self) -> bool:
        """Return False: the model is not saved."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), _READ_HERE}
        for name in self.quantization_config.names:
            layer = model.get_submodule(name)
            del layer.weight
            # No parameter, so nothing is loaded; models that initialize layers by their names find it.
            layer.weight = torch.empty(0, device="cpu")
            layer.weight._is_hf_initialized = True

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]  # transformers' own
