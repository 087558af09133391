"""Commands after `loraplex worker` that compute with a model and end: copies in other layouts, and comparisons.

`report` and `certify` compare a quantized model with the original, and print one JSON object:

loraplex worker report --model DIR --quantized int4 --text FILE        its size, errors and effect on a text
loraplex worker report --model DIR --kv-cache-dtype int8 --text FILE   the same of its KV cache
loraplex worker certify --model DIR --quantized int4 --adapter DIR     the figures of an adapter's certificate
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.families import KV_CACHE_HELP, check_kv_cache_dtype
from loraplex.contracts.artifacts.gguf_files import refuse_gguf
from loraplex.contracts.artifacts.quantization import FLAG_HELP, parse_quantization
from loraplex.runtime.rpc.settings import read_settings, setting
from loraplex.worker.engine_api import ModelUnusableError

# Number of lines of progress; at a terminal each replaces the one before.
_LINES = 20


@dataclass(frozen=True)
class QuantizeSettings:
    """Writes a quantized copy of a model's directory, in the layout of compressed-tensors."""

    model: str = setting("a transformers directory")
    out: str = setting("the new directory")
    to: str = setting(FLAG_HELP)
    calibrate: bool = setting("choose 4-bit codes by what the layers compute for texts", default=False)
    bits: float = setting("with --calibrate: maximum bits of a weight; sensitive layers get 8 within it", 4.75)
    texts: str = setting("with --calibrate: a UTF-8 text of at least 256 tokens; empty: drawn from the model", "")
    seed: int = setting("with --calibrate: seed of the texts that are drawn", 0)


def quantize(argv: Sequence[str]) -> int:
    """Write the copy that the flags describe. Raises ArtifactError, SettingsError."""
    settings = read_settings(QuantizeSettings, "worker-quantize", argv, {})
    refuse_gguf("model", settings.model)
    if not Path(settings.model).is_dir():
        raise ArtifactError("model", f"{settings.model} is not a directory; a model is a transformers directory")
    if parse_quantization(settings.to, "--to") is None:
        raise ArtifactError("--to", "name a scheme, such as int8")
    from loraplex.model_tools.calibration import Calibration
    from loraplex.model_tools.quantized_copy import write_copy

    calibration = Calibration(settings.bits, settings.texts, settings.seed) if settings.calibrate else None
    show = partial(_show, "calibrated", noun="layers") if calibration else partial(_show, "quantized")
    base = write_copy(settings.model, settings.out, settings.to, show, calibration)
    print(f"wrote {settings.out}: {base.quantization} of {base.original_digest}")
    return 0


def _show(verb: str, done: int, of: int, *, noun: str = "tensors") -> None:
    if done == of or done % max(1, of // _LINES) == 0:
        end = "\r" if sys.stderr.isatty() and done < of else "\n"
        print(f"{verb} {done} of {of} {noun}", end=end, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ImportSettings:
    """Writes a GGUF file's model as a transformers directory."""

    file: Path = setting("the GGUF file; of a split one any part")
    out: Path = setting("the new directory")
    dtype: str = setting("dtype of the weights: bfloat16 or float32", "bfloat16")
    quiet: bool = setting("print nothing but progress and errors", False)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt at the first signal: what is written is removed, which a second one must not stop."""
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def import_gguf(argv: Sequence[str]) -> int:
    """Write the directory that the flags describe; 130 after Ctrl-C. Raises ArtifactError, SettingsError."""
    settings = read_settings(ImportSettings, "worker-import-gguf", argv, {})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        from loraplex.model_tools.gguf import import_gguf as write

        base = write(settings.file, settings.out, settings.dtype, partial(_show, "imported"))
        _ignore_signals()  # the directory is whole
    except KeyboardInterrupt:
        return 130
    if not settings.quiet:
        print(f"wrote {settings.out}: {base.architecture} {base.digest}")
    return 0


@dataclass(frozen=True)
class ConvertSettings:
    """Writes a LoRA adapter in GGUF as peft's two files."""

    file: Path = setting("the adapter's GGUF file")
    base: Path = setting("its base model's transformers directory")
    out: Path = setting("a directory that is there")


def convert_adapter(argv: Sequence[str]) -> int:
    """Write the files that the flags describe. Raises ArtifactError, SettingsError."""
    settings = read_settings(ConvertSettings, "worker-convert-adapter", argv, {})
    _check_models(str(settings.base), "", as_given=True)
    try:
        from loraplex.model_tools.gguf import convert_adapter as write

        write(settings.file, settings.base, settings.out)
    except ModelUnusableError as error:
        raise ArtifactError("model", str(error)) from error
    except OSError as error:
        raise ArtifactError(str(settings.out), f"cannot be written: {error.strerror or error}") from error
    return 0


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


def measure(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the figures of `report` or `certify` with these flags. Raises ArtifactError, SettingsError."""
    try:
        return _report(argv) if command == "report" else _certify(argv)
    except ModelUnusableError as error:
        raise ArtifactError("model", str(error)) from error


def _report(argv: Sequence[str]) -> dict[str, Any]:
    settings = read_settings(ReportSettings, "worker-report", argv, {})
    _check_models(settings.model, settings.quantized, as_given=bool(settings.kv_cache_dtype))
    from loraplex.model_tools.report import quantization_report

    chosen = settings.device, settings.kv_cache_dtype
    return quantization_report(settings.model, settings.quantized, settings.text, *chosen)


def _certify(argv: Sequence[str]) -> dict[str, Any]:
    settings = read_settings(CertifySettings, "worker-certify", argv, {})
    _check_models(settings.model, settings.quantized)
    from loraplex.model_tools.certificate import certify

    chosen = settings.quantized, settings.adapter, settings.device
    return asdict(certify(settings.model, *chosen, partial(_show, "measured", noun="prompts")))


def _check_models(model: str, quantized: str, *, as_given: bool = False) -> None:
    """Check a model's directory and its quantized form before torch is imported; `as_given`: the form may be empty.

    Raises ArtifactError.
    """
    refuse_gguf("model", model)
    if not Path(model).is_dir():
        raise ArtifactError("model", f"{model} is not a directory; a model is a transformers directory")
    accepted = Path(quantized).is_dir() if quantized else as_given
    if not accepted and parse_quantization(quantized, "--quantized") is None:
        raise ArtifactError("--quantized", "name a scheme, such as int8, or the directory of a quantized copy")
    if not read_base_model(model, "model").serves("generate"):
        raise ArtifactError("model", f"{model} is an encoder; only models that generate are compared")


def run(command: str, argv: Sequence[str]) -> int:
    """Run a command; return its exit status. Raises ArtifactError, SettingsError."""
    writers: dict[str, Callable[[Sequence[str]], int]] = {
        "quantize": quantize,
        "import-gguf": import_gguf,
        "convert-adapter": convert_adapter,
    }
    if command in writers:
        return writers[command](argv)
    print(json.dumps(measure(command, argv)))
    return 0
