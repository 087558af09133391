"""GGUF files, as llama.cpp has them: models are imported as transformers directories, LoRA adapters as peft's.

A file's header is read before transformers is imported, which takes seconds: most bad files are refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.model_tools.gguf.file import check_types, read_gguf

# Names of the dtypes that weights are written in.
DTYPES = ("bfloat16", "float32")
# Says how many of the tensors are done.
Progress = Callable[[int, int], None]


def import_gguf(
    path: Path, directory: Path, dtype: str = "bfloat16", progress: Progress = lambda done, of: None
) -> BaseModel:
    """Write the model of a GGUF file, with all its parts, to a new directory in the layout of transformers.

    Returns its manifest. Raises ArtifactError, also where `directory` exists or cannot be written; it leaves nothing.
    """
    if dtype not in DTYPES:
        raise ArtifactError("--dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}")
    if directory.exists():
        raise ArtifactError(str(directory), "exists; give a new directory")
    file = read_gguf(path)
    check_types(file)
    from loraplex.model_tools.gguf.base import write_model

    return write_model(file, directory, dtype, progress)


def convert_adapter(path: Path, base: Path, out: Path) -> None:
    """Write a GGUF adapter's peft files to a directory; `base` is its base model's. Raises ArtifactError, OSError."""
    file = read_gguf(path)
    check_types(file)
    from loraplex.model_tools.gguf.adapter import write_adapter

    write_adapter(file, base, out)
