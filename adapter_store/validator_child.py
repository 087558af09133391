"""Validate adapters as a child process of rpc.children: files that are made to end it end nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  # before the limits: loading it takes files and memory

from adapter_store.validate import validate_adapter
from artifacts.base_model import BaseModel, ModuleShape
from artifacts.errors import ArtifactError, MismatchError
from artifacts.revision import CONFIG_FILE, revision_digest
from rpc.children.child import LAST, Json, serve

# Maximum address space in bytes of this process; Python and numpy need a third of it.
MEMORY_BYTES = 1 << 30
# Maximum processor time in seconds for an adapter's configuration and header, and bytes of weights checked in a second
# by a slow processor.
CPU_S = 0.5
WEIGHT_BYTES_S = 100_000_000
# Maximum open files: the socket under two names, stderr, the file that is read, and the folder that Python imports of.
_FILES = 8


def _answer(request: Mapping[str, Any]) -> Json:
    """Return rank, digest and what changes of the configuration; or what is to blame and why."""
    directory = Path(request["directory"])
    base = request["base"]
    base["modules"] = tuple(ModuleShape(*module) for module in base["modules"])
    try:
        valid = validate_adapter(directory, BaseModel(**base))
    except MemoryError:
        return {"subject": "adapter", "error": "its files need too much memory to read", LAST: True}
    except RecursionError:
        return {"subject": "adapter", "error": "its files are nested too deeply"}
    except ArtifactError as error:
        return {"subject": error.subject, "error": error.message, "mismatch": isinstance(error, MismatchError)}
    except Exception as error:  # anybody may have written the files
        return {"subject": "adapter", "error": f"its files cannot be read: {type(error).__name__}"}
    config = (directory / CONFIG_FILE).read_bytes() if valid.config is None else valid.config
    digest = revision_digest(config, request["weights"])
    return {"rank": valid.rank, "digest": digest, "config": valid.config.decode() if valid.config else None}


def _cpu_s(request: Mapping[str, Any]) -> float:
    return CPU_S + float(request["bytes"]) / WEIGHT_BYTES_S


if __name__ == "__main__":
    serve(_answer, cpu_s=_cpu_s, memory_bytes=MEMORY_BYTES, files=_FILES)
