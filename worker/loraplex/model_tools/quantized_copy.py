"""Writes a quantized copy of a model's directory, in the layout of compressed-tensors, or for 4 bits one of our own.

Its weights are, bit by bit, those that an engine has which quantizes the original while it loads, or calibrated ones.
config.json names the original's digest, so adapters of the original are valid for the copy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.artifacts.base_modules import LinearWeight, read_weights
from loraplex.contracts.artifacts.checkpoint import Checkpoint, read_checkpoint
from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.contracts.artifacts.quantization import EIGHTHS, Quantization, calibrated_name, parse_quantization
from loraplex.model_tools.calibration import EIGHT_BITS, Calibration, calibrated_weights
from loraplex.worker.engine.quantized.stored import open_slices
from loraplex.worker.engine.quantized.weight import QuantizedWeight, quantize_tensor

# Maximum bytes of a file of the copy; so much of it is in memory at once.
_SHARD_BYTES = 2 << 30
# Endings of the original's files that hold weights.
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)
# Says how many of the tensors are done.
Progress = Callable[[int, int], None]


def write_copy(
    model: str,
    out: str,
    scheme: str,
    progress: Progress = lambda done, of: None,
    calibration: Calibration | None = None,
) -> BaseModel:
    """Write a copy of directory `model`, quantized by a scheme's name, to the new directory `out`; its manifest.

    Raises ArtifactError, also where `out` exists or can't be written.
    """
    base = read_base_model(model, quantize=scheme)
    config = parse_object(base.files["config.json"], "config.json")
    target = parse_quantization(scheme, "--to")
    if target is None or "quantization_config" in config:
        raise ArtifactError("model", f"{model} is quantized already; give the original")
    directory = Path(out)
    if calibration is not None and (target.bits != 4 or not target.group or target.dynamic):
        raise ArtifactError("--calibrate", f"is for int4, int4-64 and int4-128, not {target}")
    if directory.exists():
        raise ArtifactError("out", f"{out} exists; give a new directory")
    unfinished = directory.with_name(directory.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        checkpoint = read_checkpoint(Path(model))
        modules = read_weights(config, checkpoint)
        weights = {weight.tensor: weight for weight in modules.values()}
        done: dict[str, QuantizedWeight] = {}
        if calibration is not None:
            rounded = calibrated_weights(Path(model), modules, target, calibration, progress)
            done = {modules[name].tensor: weight for name, weight in rounded.items()}
            progress = _silent
        _write_tensors(unfinished, checkpoint, weights, target, done, progress)
        _copy_small_files(Path(model), unfinished)
        config |= {"quantization_config": _quantization_config(base, weights, target, done, calibration)}
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        os.rename(unfinished, directory)
    except OSError as error:
        raise ArtifactError("out", f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return read_base_model(out)


def _silent(done: int, of: int) -> None:
    """Show nothing: writing takes no time beside calibrating."""


def _write_tensors(
    out: Path,
    checkpoint: Checkpoint,
    weights: Mapping[str, LinearWeight],
    scheme: Quantization,
    done: Mapping[str, QuantizedWeight],
    progress: Progress,
) -> None:
    shard: dict[str, Tensor] = {}
    placed: dict[str, str] = {}
    total = 0

    def write(last: bool) -> None:
        # A model of a single file has its usual name, and no index.
        name = "model.safetensors" if last and not placed else f"model-{len(set(placed.values())) + 1:05}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        placed.update(dict.fromkeys(shard, name))
        shard.clear()

    with open_slices(checkpoint, mapped=False) as slices:
        for number, name in enumerate(checkpoint.tensors, 1):
            new, weight = {name: slices[name][...]}, weights.get(name)
            if weight is not None and weight.scheme(scheme) is not None:
                parts = stored_tensors(done.get(name) or quantize_tensor(new[name], weight, scheme))
                layer = name.removesuffix(".weight")
                new = {f"{layer}.{part}": values.contiguous() for part, values in parts.items()}
            size = sum(values.nbytes for values in new.values())
            if shard and sum(values.nbytes for values in shard.values()) + size > _SHARD_BYTES:
                write(last=False)
            shard |= new
            total += size
            progress(number, len(checkpoint.tensors))
    write(last=True)
    if len(set(placed.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def stored_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors that hold a weight, by the last part of their names."""
    scales = {"weight_scale": weight.scales}
    if weight.codes.dtype == torch.float8_e4m3fn:
        return {"weight": weight.codes} | scales
    # 4 bits are stored from 0, as they are held; 8 bits are held from -128.
    codes = weight.codes if weight.bits == 4 else weight.codes.view(torch.uint8) ^ 0x80
    shape = torch.tensor([weight.out_features, weight.in_features])
    parts = {"weight_packed": _words(codes), "weight_shape": shape} | scales
    if weight.zeros is None:
        return parts
    if weight.bits == 4:
        return parts | {"weight_zero_point": weight.zeros}
    zeros = (weight.zeros + 128).to(torch.uint8).t()
    return parts | {"weight_zero_point": _words(zeros.contiguous()).t()}


def _words(rows: Tensor) -> Tensor:
    """View bytes [rows, bytes] as int32 words, the first byte lowest; a row's last word is filled with zeros."""
    filled = pad(rows, (0, -rows.shape[1] % 4))
    return filled.flatten().view(torch.int32).view(len(rows), -1)


def _quantization_config(
    base: BaseModel,
    weights: Mapping[str, LinearWeight],
    scheme: Quantization,
    done: Mapping[str, QuantizedWeight],
    calibration: Calibration | None,
) -> dict[str, Any]:
    ignored = [weight.tensor.removesuffix(".weight") for weight in weights.values() if weight.scheme(scheme) is None]
    if FAMILIES[base.architecture].experts:
        ignored += [r"re:.*\.experts\..*", r"re:.*\.(gate|router)$"]
    groups = {"group_0": _config_group(["Linear", "Embedding"] if scheme.embeddings else ["Linear"], scheme)}
    wide = [tensor.removesuffix(".weight") for tensor, weight in done.items() if weight.bits != scheme.bits]
    if wide:
        groups["group_1"] = _config_group(wide, EIGHT_BITS)
    name = str(scheme)
    if calibration is not None:
        name = calibrated_name(scheme, calibration.bits)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme.floating else EIGHTHS if scheme.bits == 4 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "loraplex": {"original": base.original_digest, "quantization": name},
    }


def _config_group(targets: list[str], scheme: Quantization) -> dict[str, Any]:
    arguments = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.floating else "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    return {"targets": targets, "weights": arguments, "input_activations": None, "output_activations": None}


def _copy_small_files(model: Path, out: Path) -> None:
    """Copy what is beside the weights: tokenizer, chat template, and the pooling's folder."""
    folders = [path for path in model.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for path in (*model.iterdir(), *(file for folder in folders for file in folder.glob("*.json"))):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            (out / path.relative_to(model)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / path.relative_to(model))
