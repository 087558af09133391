"""The original model and the quantized one, loaded side by side in float32, and the model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from artifacts.checkpoint import read_small_file
from artifacts.errors import ArtifactError
from worker.engine.evaluation.logits import Ids
from worker.engine.model.loader import LoadedModel, load_model
from worker.engine.quantized.weight import QuantizedLinear, quantize

_SCHEMES = {"int8": (8, None, True), "int8-zero-point": (8, None, False), "int4": (4, 128, False)}


@dataclass(frozen=True)
class ModelPair:
    """The two models; both compute in float32, so that their difference is the quantization's alone."""

    original: LoadedModel
    quantized: LoadedModel


def load_pair(model: str, quantized: str, device: str) -> ModelPair:
    """Load the model in directory `model`, and `quantized`: a directory, or how to quantize the same model."""
    return ModelPair(load_model(model, device, "float32"), _load_quantized(model, quantized, device))


def _load_quantized(model: str, scheme: str, device: str) -> LoadedModel:
    loaded = load_model(model, device, "float32")
    bits, group, symmetric = _SCHEMES[scheme]
    for name in loaded.linears:
        layer = loaded.module.get_submodule(name)
        quantized = QuantizedLinear(quantize(layer.weight, bits, group, symmetric=symmetric), layer.bias)
        loaded.module.set_submodule(name, quantized)
    return loaded


class TextCodec:
    """The tokenizer of a model directory, as routers use it."""

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer. Raises ArtifactError."""
        data = read_small_file(directory / "tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError("tokenizer.json", f"cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, with the special tokens that the tokenizer adds to a prompt."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text
