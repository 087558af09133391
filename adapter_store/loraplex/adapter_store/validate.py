"""Validates an adapter's files before they are accepted: every field, tensor, shape and number.

The files are anybody's: `python -m loraplex.adapter_store.validate` checks them as a child process of rpc.children, so
that files that are made to end it end nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loraplex.contracts.artifacts import ArtifactError, MismatchError, parse_object
from loraplex.contracts.artifacts.activation import check_invocation
from loraplex.contracts.artifacts.adapter_files import AdapterFiles, read_adapter_files
from loraplex.contracts.artifacts.added_tokens import check_new_tokens
from loraplex.contracts.artifacts.base_model import HASH_ARCHITECTURE, BaseModel
from loraplex.contracts.artifacts.checkpoint import TensorInfo
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE, MAX_RANK, PeftConfig, parse_peft_config
from loraplex.contracts.artifacts.revision import TENSOR_PREFIX, WEIGHTS_FILE, revision_digest, tensor_names
from loraplex.runtime.rpc.children.child import LAST, Json, serve

# By dtype: an unsigned type of its size, and the bits of the exponent; infinities and NaNs alone have all of them set.
_EXPONENTS: dict[str, tuple[str, int]] = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_PIECE_BYTES = 4 * 1024 * 1024
# Maximum bytes of an adapter's configuration; workers take no more.
CONFIG_BYTES = 1024 * 1024
# Maximum address space in bytes of this process; Python and numpy need a third of it.
MEMORY_BYTES = 1 << 30
# Maximum processor time in seconds for an adapter's configuration and header, and bytes of weights checked in a second
# by a slow processor.
CPU_S = 0.5
WEIGHT_BYTES_S = 100_000_000
# Maximum open files: the socket under two names, stderr, the file that is read, and the folder that Python imports of.
_FILES = 8


@dataclass(frozen=True, slots=True)
class Validated:
    """An adapter that is accepted: its largest rank, the configuration to keep where that is not the one given, the
    name that its training gave the base model, and what its owner should know.
    """

    rank: int
    config: bytes | None = None
    trained_on: str = ""
    warnings: tuple[str, ...] = ()


def validate_adapter(directory: Path, base: BaseModel) -> Validated:
    """Check the two files in `directory` against the base model.

    Patterns of ranks and alphas become names of modules, unless they are names already. Raises ArtifactError for what
    is broken, MismatchError for what does not go with the base or is not served.
    """
    config_bytes = (directory / CONFIG_FILE).read_bytes()
    if base.architecture == HASH_ARCHITECTURE:
        return Validated(_rank_if_readable(config_bytes))
    files = read_adapter_files(directory, base.sizes, base.architecture, evaluate=True)
    check_new_tokens(files.sent.added_tokens, base.vocab_size)
    check_invocation(files.sent.invocation, base.vocab_size)
    zeros, shapes = _check_finite(directory / WEIGHTS_FILE, files.header), files.shapes
    warnings = [*_warnings_of_names(files.changes)]
    if all(files.config.scaling_of(name, shape.rank) == 0 for name, shape in shapes.items()):
        warnings.append("lora_alpha is 0: its LoRA layers change nothing")
    elif all(tensor_names(name)["B"] in zeros for name in shapes) and not files.sent.use_dora:
        warnings.append("every lora_B is zero: its LoRA layers change nothing; was it saved before it was trained?")
    kept = _with_names(config_bytes, files)
    return Validated(max(files.ranks.values()), kept, files.sent.base_model, tuple(warnings))


def _warnings_of_names(changes: Sequence[str]) -> Iterator[str]:
    """Yield a warning of names of tensors that are not as peft writes them; `changes` are those of as_peft_names."""
    if without := ", ".join(repr(part) for part in changes if part != TENSOR_PREFIX):
        yield f"names of tensors were read without {without}"
    if TENSOR_PREFIX in changes:
        yield f"names of tensors were read with {TENSOR_PREFIX!r} in front"


def _with_names(data: bytes, files: AdapterFiles) -> bytes | None:
    """Return the configuration with names for patterns; None where its patterns are names that mean the same."""
    sent, config = files.sent, files.config
    if not sent.has_expressions and all(_values(sent, module) == _values(config, module) for module in files.shapes):
        return None
    patterns = {names.field: dict(names.entries) for names in (config.rank_pattern, config.alpha_pattern)}
    resolved = json.dumps(parse_object(data, CONFIG_FILE) | patterns, ensure_ascii=False, indent=2).encode()
    if len(resolved) > CONFIG_BYTES:
        raise MismatchError("rank_pattern", f"{CONFIG_FILE} has more than {CONFIG_BYTES} bytes with names for patterns")
    return resolved


def _values(config: PeftConfig, module: str) -> tuple[float, float]:
    return config.rank_of(module), config.alpha_pattern.value_of(module, config.alpha)


def _rank_if_readable(config: bytes) -> int:
    """Return the largest rank of an adapter of a hash model, which takes any bytes but no rank that no worker holds."""
    try:
        return min(parse_peft_config(config).max_rank, MAX_RANK)
    except ArtifactError:
        return 0


def _check_finite(path: Path, header: Mapping[str, TensorInfo]) -> set[str]:
    """Raise ArtifactError for infinities and NaNs; return the names of tensors that have nothing but zeros."""
    # Imported late: the store itself, which imports this module for hash models, starts without it.
    import numpy as np

    zeros = set(header)
    with open(path, "rb") as file:
        for name, tensor in header.items():
            kind, exponent = _EXPONENTS[tensor.dtype]
            file.seek(tensor.start)
            remaining = tensor.end - tensor.start
            while remaining:
                numbers = np.frombuffer(file.read(min(remaining, _PIECE_BYTES)), dtype=kind)
                remaining -= numbers.nbytes
                if np.any((numbers & exponent) == exponent):
                    raise ArtifactError(WEIGHTS_FILE, f"tensor {name} has infinities or NaNs")
                if name in zeros and np.any(numbers << 1):  # without the sign
                    zeros.remove(name)
    return zeros


def _answer(request: Mapping[str, Any]) -> Json:
    """Return rank, digest and what changes of the configuration; or what is to blame and why."""
    directory = Path(request["directory"])
    try:
        valid = validate_adapter(directory, msgspec.convert(request["base"], BaseModel))
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
    kept = valid.config.decode() if valid.config else None
    told = {"trained_on": valid.trained_on, "warnings": valid.warnings}
    return {"rank": valid.rank, "digest": digest, "config": kept, **told}


def _cpu_s(request: Mapping[str, Any]) -> float:
    return CPU_S + float(request["bytes"]) / WEIGHT_BYTES_S


if __name__ == "__main__":
    import numpy  # noqa: F401  # before the limits: loading it takes files and memory

    serve(_answer, cpu_s=_cpu_s, memory_bytes=MEMORY_BYTES, files=_FILES)
