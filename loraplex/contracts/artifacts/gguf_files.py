"""Recognizes GGUF files, which are imported (loraplex.checkpoints.gguf_names) before anything is served of them."""

from __future__ import annotations

from pathlib import Path

from loraplex.contracts.artifacts import ArtifactError

MAGIC = b"GGUF"
GGUF_SUFFIX = ".gguf"


def is_gguf(path: str) -> bool:
    """Tell whether a path names a GGUF file, by its ending or its first bytes."""
    if path.endswith(GGUF_SUFFIX):
        return not Path(path).is_dir()
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def refuse_gguf(subject: str, path: str) -> None:
    """Raise ArtifactError for a GGUF file where a directory is needed, with the command that makes one of it."""
    if is_gguf(path):
        raise ArtifactError(subject, f"{path} is a GGUF file; first: loraplex models import {path} DIR")
