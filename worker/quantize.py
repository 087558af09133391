"""`python -m worker quantize`: writes a quantized copy of a model's directory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts import ArtifactError
from artifacts.quantization import FLAG_HELP, parse_quantization
from rpc.settings import read_settings, setting

# Number of lines of progress; at a terminal each replaces the one before.
_LINES = 20


@dataclass(frozen=True)
class QuantizeSettings:
    """Writes a quantized copy of a model's directory, in the layout of compressed-tensors."""

    model: str = setting("a transformers directory")
    out: str = setting("the new directory")
    to: str = setting(FLAG_HELP)


def quantize(argv: Sequence[str]) -> int:
    """Write the copy that the flags describe. Raises ArtifactError, SettingsError."""
    settings = read_settings(QuantizeSettings, "worker-quantize", argv, {})
    if not Path(settings.model).is_dir():
        raise ArtifactError("model", f"{settings.model} is not a directory; a model is a transformers directory")
    if parse_quantization(settings.to, "--to") is None:
        raise ArtifactError("--to", "name a scheme, such as int8")
    try:
        from worker.engine.quantized.copy import write_copy
    except ModuleNotFoundError as error:
        raise ArtifactError(
            "quantize", f"{error.name} is not installed, which computing with a model needs: install loraplex[worker]"
        ) from error
    base = write_copy(settings.model, settings.out, settings.to, _show)
    print(f"wrote {settings.out}: {base.quantization} of {base.original_digest}")
    return 0


def _show(done: int, of: int) -> None:
    if done == of or done % max(1, of // _LINES) == 0:
        end = "\r" if sys.stderr.isatty() and done < of else "\n"
        print(f"quantized {done} of {of} tensors", end=end, file=sys.stderr, flush=True)
