"""The original model and the quantized one, loaded side by side in float32, and the model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from artifacts import ArtifactError
from artifacts.base_model import BaseModel, read_base_model
from artifacts.checkpoint import read_small_file
from worker.engine.device.cores import step_threads
from worker.engine.evaluation.logits import Ids
from worker.engine.model.loader import LoadedModel, load_model


@dataclass(frozen=True)
class ModelPair:
    """The two models; both compute in float32, so that their difference is the quantization's alone."""

    original: LoadedModel
    quantized: LoadedModel


def load_pair(model: str, quantized: str, device: str) -> ModelPair:
    """Load the model in directory `model`, and `quantized`: its scheme, or the directory of a quantized copy.

    An empty scheme loads the model as it is. Raises ArtifactError where the copy is another model's, and
    ModelUnusableError.
    """
    copied = bool(quantized) and Path(quantized).is_dir()
    if copied:
        check_copy(read_base_model(model, "model"), read_base_model(quantized, "model"), quantized)
    original = load_model(model, device, "float32")
    torch.set_num_threads(step_threads(original.parameters, 0))
    copy = load_model(quantized, device, "float32") if copied else load_model(model, device, "float32", quantized)
    return ModelPair(original, copy)


def check_copy(original: BaseModel, copy: BaseModel, directory: str) -> None:
    """Check that a quantized model may be the original's copy. Raises ArtifactError."""
    if not copy.quantization:
        raise ArtifactError("--quantized", f"{directory} is not quantized; give a quantized copy, or a scheme")
    if copy.modules != original.modules or copy.original_digest not in {"", original.digest}:
        raise ArtifactError("--quantized", f"{directory} is not a quantized copy of the model")


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
