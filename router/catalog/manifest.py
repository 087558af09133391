"""Base models as the store registers them, with the files that a router needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.adapters.v1 import adapters_pb2 as pb

from artifacts import ArtifactError
from artifacts.json_object import parse_object

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A base model as the store has it. `files` are the small files, by name.

    A quantized model may have the digest of its original, whose adapters are valid for it.
    """

    name: str
    digest: str
    architecture: str
    context_length: int
    vocab_size: int
    files: Mapping[str, bytes]
    original_digest: str = ""
    # The scheme of its weights; empty: not quantized.
    quantization: str = ""
    # Of generate, embed and classify those that it serves; the labels of its classifier, in the order of its logits.
    tasks: tuple[str, ...] = ("generate",)
    labels: tuple[str, ...] = ()
    # transformers' name of the task that its classifier solves; empty: one label of several.
    problem_type: str = ""

    @property
    def adapted_digest(self) -> str:
        """Return the digest that adapters are bound to."""
        return self.original_digest or self.digest


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A base model as the store lists it. `tasks` change where it is registered again with others."""

    digest: str
    tasks: tuple[str, ...] = ("generate",)


def registered_model(model: pb.BaseModel) -> RegisteredModel:
    """Return a base model of the store's list."""
    return RegisteredModel(model.digest, tuple(model.tasks))


def read_manifest(model: pb.BaseModel, files: Mapping[str, bytes]) -> Manifest:
    """Return the manifest of a base model and its small files."""
    return Manifest(
        model.name,
        model.digest,
        model.architecture,
        model.context_length,
        model.vocab_size,
        files,
        model.original_digest,
        model.quantization,
        tasks=tuple(model.tasks),
        labels=tuple(model.labels),
        problem_type=_problem_type(files.get(_CONFIG, b"{}")),
    )


def _problem_type(config: bytes) -> str:
    try:
        return str(parse_object(config, _CONFIG).get("problem_type") or "")
    except ArtifactError:  # anybody may have written it
        return ""
