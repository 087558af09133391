"""The original model and the quantized one, loaded side by side in float32, and the model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from artifacts.checkpoint import read_small_file
from artifacts.errors import ArtifactError
from worker.engine.evaluation.logits import Ids
from worker.engine.model.loader import LoadedModel, load_model


@dataclass(frozen=True)
class ModelPair:
    """The two models; both compute in float32, so that their difference is the quantization's alone."""

    original: LoadedModel
    quantized: LoadedModel


def load_pair(model: str, quantized: str, device: str) -> ModelPair:
    """Load the model in directory `model`, and `quantized`: a directory, or how to quantize the same model."""
    original = load_model(model, device, "float32")
    if Path(quantized).is_dir():
        return ModelPair(original, load_model(quantized, device, "float32"))
    return ModelPair(original, load_model(model, device, "float32", quantized))


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
