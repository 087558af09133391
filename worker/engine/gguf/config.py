"""The configuration of a GGUF file's model: as transformers reads it, with what transformers leaves out.

transformers takes some keys and passes over the rest, whose meaning would be lost in silence. Here each key of the
architecture is read by transformers, or set or compared here; any other one is refused by its name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from artifacts import ArtifactError
from worker.engine.gguf.file import GgufFile

# Architectures by their names in GGUF whose reading was compared with the original model.
ARCHITECTURES = ("llama", "qwen2")


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration. Raises ArtifactError for a model that is not imported."""
    _check_kind(file)
    with tempfile.TemporaryDirectory(prefix="loraplex-gguf-") as folder:
        # Of the file itself transformers would make an array of every token.
        (Path(folder) / "model.gguf").write_bytes(file.skeleton())
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
    config.vocab_size = file.tensors["token_embd.weight"].shape[0]
    return config


def _check_kind(file: GgufFile) -> None:
    architecture = file.architecture
    kind = file.get("general.type", "model")
    if architecture == "clip" or kind == "mmproj":
        raise ArtifactError(
            file.name, "is the projector of images (mmproj), not a language model; give the model's file"
        )
    if kind == "adapter":
        raise ArtifactError(file.name, "is an adapter; push it with: loraplex adapters push")
    if kind != "model":
        raise ArtifactError(file.name, f"is a GGUF file of type {kind!r}, not a model")
    if architecture not in ARCHITECTURES:
        raise ArtifactError(
            file.name,
            f"architecture {architecture!r} is not imported from GGUF, only {', '.join(ARCHITECTURES)}; "
            "serve the model's transformers directory",
        )
