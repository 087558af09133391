"""GGUF files by their names: a model is one file, or parts called NAME-00001-of-00003.gguf in one folder.

Apart from the readers, which need the package gguf: the command names models without it.
"""

from __future__ import annotations

import re
from pathlib import Path

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.gguf_files import GGUF_SUFFIX

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
# Characters that a base model's name cannot contain, or cannot begin with.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+")


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split file, whichever is given, or the file alone.

    Raises ArtifactError for a missing one.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    parts = [
        path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{GGUF_SUFFIX}") for number in range(1, int(match[3]) + 1)
    ]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ArtifactError(str(path), f"is one of {len(parts)} parts, and {missing[0]} is missing beside it")
    return tuple(parts)


def model_name(path: Path) -> str:
    """Return the name that a file's model gets: the file's own, without ending and part, in allowed characters."""
    match = _PART.fullmatch(path.name)
    stem = match[1] if match else path.name.removesuffix(GGUF_SUFFIX)
    return _NOT_IN_NAMES.sub("-", stem).strip("-._")[:128] or "model"
