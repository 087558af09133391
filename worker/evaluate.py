"""`python -m worker report` and `certify`: a quantized model against the original, as one JSON object on stdout.

python -m worker report --model DIR --quantized int4 --text FILE        its size, errors and effect on a text
python -m worker certify --model DIR --quantized int4 --adapter DIR     the figures of an adapter's certificate
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from artifacts.errors import ArtifactError
from rpc.settings import read_settings, setting
from worker.engine.model.errors import ModelUnusableError

_QUANTIZED = "how it is quantized, such as int8, or the directory of a quantized copy"
_DEVICE = "the device to compute on: cpu or cuda"


@dataclass(frozen=True)
class ReportSettings:
    """Compares a quantized model with the original: size, error of the weights, and effect on a text."""

    model: str = setting("a transformers directory")
    quantized: str = setting(_QUANTIZED)
    text: str = setting("a UTF-8 text file")
    device: str = setting(_DEVICE, "cpu")


@dataclass(frozen=True)
class CertifySettings:
    """Measures an adapter on a quantized base against the same adapter on the original base."""

    model: str = setting("a transformers directory")
    quantized: str = setting(_QUANTIZED)
    adapter: str = setting("the adapter's directory")
    device: str = setting(_DEVICE, "cpu")


def evaluate(command: str, argv: Sequence[str]) -> int:
    """Run `report` or `certify`; print its figures. Raises ArtifactError, SettingsError."""
    try:
        figures = _report(argv) if command == "report" else _certify(argv)
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"loraplex {command}", f"{error.name} is not installed; install loraplex[worker] to compute with models"
        ) from error
    print(json.dumps(figures))
    return 0


def _report(argv: Sequence[str]) -> dict[str, Any]:
    settings = read_settings(ReportSettings, "worker-report", argv, {})
    from worker.engine.evaluation.report import quantization_report

    with _as_artifact_errors():
        return quantization_report(settings.model, settings.quantized, settings.text, settings.device)


def _certify(argv: Sequence[str]) -> dict[str, Any]:
    settings = read_settings(CertifySettings, "worker-certify", argv, {})
    from worker.engine.evaluation.certify import certify

    with _as_artifact_errors():
        return asdict(certify(settings.model, settings.quantized, settings.adapter, settings.device))


@contextmanager
def _as_artifact_errors() -> Iterator[None]:
    try:
        yield
    except ModelUnusableError as error:
        raise ArtifactError("model", str(error)) from error
