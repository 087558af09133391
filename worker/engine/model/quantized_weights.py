"""Loads quantized weights: those of quantized checkpoints, and float weights that are quantized while they are loaded.

transformers builds the model with a placeholder for each such layer and loads the rest; then each layer is read, one
after the other, so that the memory never holds more than one weight of the layers in floats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from artifacts.base_modules import LinearWeight
from artifacts.checkpoint import Checkpoint
from artifacts.families import HEAD
from artifacts.quantization import Quantization
from worker.engine.quantized.embedding import QuantizedEmbedding
from worker.engine.quantized.schemes import quantize_weight
from worker.engine.quantized.stored import ReadTensor, read_weight
from worker.engine.quantized.weight import QuantizedLinear, QuantizedWeight, equal

_METHOD = "loraplex"
# Names of tensors that transformers has no place for: they are read here.
_READ_HERE = r"\.(weight|weight_\w+|qweight|qzeros|scales|g_idx)$"


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of a checkpoint that are loaded quantized, by module name; `scheme` for those that are in floats."""

    checkpoint: Checkpoint
    weights: Mapping[str, LinearWeight]
    scheme: Quantization | None

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, weights: Mapping[str, LinearWeight], scheme: Quantization | None
    ) -> QuantizedWeights | None:
        """Choose the weights that are loaded quantized; None where there are none."""
        chosen = {name: weight for name, weight in weights.items() if weight.scheme(scheme) is not None}
        return cls(checkpoint, chosen, scheme) if chosen else None

    def loading_options(self, directory: Path) -> dict[str, Any]:
        """Return the arguments of from_pretrained that leave these weights to `fill`."""
        config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        awaited = [name for name, weight in self.weights.items() if not weight.is_embedding]
        if config.tie_word_embeddings and HEAD in awaited:
            awaited.remove(HEAD)
        return {"config": config, "quantization_config": _AwaitedLayers(awaited)}

    def is_read_here(self, key: str) -> bool:
        """Tell whether `fill` puts a layer in the place of a weight that transformers missed."""
        ends = {f"{name}.weight" for name, weight in self.weights.items() if weight.is_embedding}
        return key in ends or (bool(ends) and key == f"{HEAD}.weight")

    def fill(self, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Put the quantized layers into a loaded model that is on the device already."""
        with _tensors(self.checkpoint) as read:
            for name, weight in self.weights.items():
                place = module.get_submodule(name)
                if isinstance(place, _AwaitedLinear):
                    module.set_submodule(name, QuantizedLinear(self._read(weight, read).to(device), place.bias))
                elif weight.is_embedding:
                    self._fill_embeddings(module, name, self._read(weight, read).to(device), dtype)

    def has_end(self, module: str) -> bool:
        """Tell whether token embeddings or an output head have a quantized weight."""
        return self._end(module) is not None

    def repeats(self, module: str, values: Tensor, dtype: torch.dtype) -> bool:
        """Tell whether the end's weight, before it was quantized, equals these values in `dtype`."""
        weight = self._end(module)
        assert weight is not None
        with _tensors(self.checkpoint) as read:
            if weight.stored is None:
                return torch.equal(read(weight.tensor).to(dtype), values.to(dtype))
            return equal(read_weight(weight.stored, read), quantize_weight(values, weight.stored.scheme.quantization))

    def _end(self, module: str) -> LinearWeight | None:
        if module == HEAD and HEAD in self.weights:
            return self.weights[HEAD]
        return next((weight for weight in self.weights.values() if weight.is_embedding), None)

    def _fill_embeddings(self, module: Any, name: str, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        place, head = module.get_submodule(name), module.get_output_embeddings()
        scale = getattr(place, "embed_scale", None)
        # The head first: it shares the weight where the model ties the two.
        if isinstance(head, nn.Linear) and head.weight is place.weight:
            names = {child: name for name, child in module.named_modules()}
            module.set_submodule(names[head], QuantizedLinear(weight, head.bias))
        module.set_submodule(name, QuantizedEmbedding(weight, dtype, None if scale is None else float(scale)))

    def _read(self, weight: LinearWeight, read: ReadTensor) -> QuantizedWeight:
        if weight.stored is not None:
            return read_weight(weight.stored, read)
        assert self.scheme is not None
        tensor = read(weight.tensor)
        return quantize_weight(tensor.t() if weight.input_first and not weight.is_embedding else tensor, self.scheme)


@contextlib.contextmanager
def _tensors(checkpoint: Checkpoint) -> Iterator[ReadTensor]:
    """Open a checkpoint's files; yields a function that reads a tensor by its name."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, Any] = {}

        def read(name: str) -> Tensor:
            path, _ = checkpoint.tensors[name]
            if path not in files:
                files[path] = stack.enter_context(safetensors.safe_open(path, "pt"))
            tensor: Tensor = files[path].get_tensor(name)
            return tensor

        yield read


class _AwaitedLinear(nn.Module):
    """The place of a linear layer whose weight is read later; transformers loads its bias."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias
        # Some models initialize layers by their names; this keeps no numbers, and is in no list of parameters.
        self.weight = torch.empty(0)


@register_quantization_config(_METHOD)
class _AwaitedLayers(QuantizationConfigMixin):
    """Names the layers that transformers does not load."""

    quant_method: Any

    def __init__(self, names: list[str]) -> None:
        self.quant_method = _METHOD
        self.names = names


@register_quantizer(_METHOD)
class _Placeholders(HfQuantizer):
    """Replaces layers by placeholders, between the construction of a model and the loading of its weights."""

    quantization_config: _AwaitedLayers
    is_trainable = False

    def is_serializable(self) -> bool:
        """Return False: the model is not saved."""
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), _READ_HERE}
        for name in self.quantization_config.names:
            model.set_submodule(name, _AwaitedLinear(model.get_submodule(name).bias))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]  # transformers' own
