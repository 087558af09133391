"""`python -m worker report` and `certify`: a quantized model against the original, as one JSON object on stdout.

python -m worker report --model DIR --quantized int4 --text FILE        its size, errors and effect on a text
python -m worker report --model DIR --kv-cache-dtype int8 --text FILE   the same of its KV cache
python -m worker certify --model DIR --quantized int4 --adapter DIR     the figures of an adapter's certificate
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artifacts import ArtifactError
from artifacts.base_model import read_base_model
from artifacts.families import KV_CACHE_HELP, check_kv_cache_dtype
from artifacts.quantization import FLAG_HELP, parse_quantization
from rpc.settings import read_settings, setting
from worker.engine_api import ModelUnusableError

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


_QUANTIZED = "how it is quantized, such as int8, or the directory of a quantized copy"
_DEVICE = "the device to compute on: cpu or cuda"


@dataclass(frozen=True)
class ReportSettings:
    """Compares a quantized model with the original: size, error of the weights, and effect on a text."""

    model: str = setting("a transformers directory")
    text: str = setting("a UTF-8 text file")
    quantized: str = setting(f"{_QUANTIZED}; empty: not at all", "")
    kv_cache_dtype: str = setting(KV_CACHE_HELP, "")
    device: str = setting(_DEVICE, "cpu")

    def __post_init__(self) -> None:
        """Check the values. Raises ArtifactError."""
        check_kv_cache_dtype(self.kv_cache_dtype)


@dataclass(frozen=True)
class CertifySettings:
    """Measures an adapter on a quantized base against the same adapter on the original base."""

    model: str = setting("a transformers directory")
    quantized: str = setting(_QUANTIZED)
    adapter: str = setting("the adapter's directory")
    device: str = setting(_DEVICE, "cpu")


def evaluate(command: str, argv: Sequence[str]) -> int:
    """Run `report` or `certify`, and print its figures. Raises ArtifactError, SettingsError."""
    print(json.dumps(measure(command, argv)))
    return 0


def measure(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the figures of `report` or `certify` with these flags. Raises ArtifactError, SettingsError."""
    try:
        return _report(argv) if command == "report" else _certify(argv)
    except ModelUnusableError as error:
        raise ArtifactError("model", str(error)) from error
    except ModuleNotFoundError as error:
        raise ArtifactError(
            command, f"{error.name} is not installed, which computing with a model needs: install loraplex[worker]"
        ) from error


def _report(argv: Sequence[str]) -> dict[str, Any]:
    settings = read_settings(ReportSettings, "worker-report", argv, {})
    _check_models(settings.model, settings.quantized, as_given=bool(settings.kv_cache_dtype))
    from worker.engine.evaluation.report import quantization_report

    chosen = settings.device, settings.kv_cache_dtype
    return quantization_report(settings.model, settings.quantized, settings.text, *chosen)


def _certify(argv: Sequence[str]) -> dict[str, Any]:
    settings = read_settings(CertifySettings, "worker-certify", argv, {})
    _check_models(settings.model, settings.quantized)
    from worker.engine.evaluation.report import certify

    return asdict(certify(settings.model, settings.quantized, settings.adapter, settings.device))


def _check_models(model: str, quantized: str, *, as_given: bool = False) -> None:
    """Check a model's directory and its quantized form before torch is imported; `as_given`: the form may be empty.

    Raises ArtifactError.
    """
    if not Path(model).is_dir():
        raise ArtifactError("model", f"{model} is not a directory; a model is a transformers directory")
    known = Path(quantized).is_dir() if quantized else as_given
    if not known and parse_quantization(quantized, "--quantized") is None:
        raise ArtifactError("--quantized", "name a scheme, such as int8, or the directory of a quantized copy")
    if not read_base_model(model, "model").serves("generate"):
        raise ArtifactError("model", f"{model} is an encoder; only models that generate are compared")
