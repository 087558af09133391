"""Loads the directory of an encoder: always with a classification head, whichever class it was saved from.

So one set of module names serves all adapters; what of the head the checkpoint lacks is random and never used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from artifacts import ArtifactError
from artifacts.base_model import read_base_model
from artifacts.base_modules import model_bytes
from artifacts.checkpoint import read_checkpoint, read_small_file
from artifacts.encoders import ENCODERS, EncoderFamily, inner_weights
from artifacts.families import is_embedding
from artifacts.json_object import parse_object
from artifacts.quantization import check_device, parse_quantization
from worker.engine.attention import registered
from worker.engine.device.dtypes import dtype_name
from worker.engine.model.loader import check_memory, device_of, dtype_of, require_weights
from worker.engine.model.quantized_weights import QuantizedWeights
from worker.engine_api import ModelUnusableError

# Families whose attention is not computed by transformers' attention interface: see disentangled.py.
_OWN_ATTENTION = ("deberta-v2",)


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder ready to run, with its sizes.

    `ends` are the token embeddings and the head's layers, `linears` those between that adapters may change: of each
    (in_features, out_features) by name.
    """

    module: Any
    family: EncoderFamily
    device: torch.device
    dtype: torch.dtype
    context_length: int
    vocab_size: int
    pooling: str
    linears: Mapping[str, tuple[int, int]]
    ends: Mapping[str, tuple[int, int]]
    directory: Path
    # Number of weights of the model, and those that are quantized.
    parameters: int
    quantized: QuantizedWeights | None

    @property
    def of_tokens(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers whose inputs are a batch's tokens, not relative positions."""
        return {name: sizes for name, sizes in self.linears.items() if ".pos_" not in name}

    @property
    def body(self) -> Any:
        """Return the encoder without its head."""
        return self.module.get_submodule(self.family.prefix)


def load_encoder(path: str, device: str = "cpu", dtype: str = "auto", quantize: str = "") -> LoadedEncoder:
    """Load the encoder in directory `path`; dtype "auto" is the model's own.

    `quantize` names the scheme in which the weights of its layers are loaded; the head's stay as they are. Raises
    ModelUnusableError.
    """
    directory, place = Path(path), device_of(device)
    if place.type != "cpu":
        raise ModelUnusableError("encoders are computed on the CPU; leave --device out")
    try:
        manifest = read_base_model(path, name="model", quantize=quantize)
        config = parse_object(read_small_file(directory / "config.json"), "config.json")
        checkpoint, scheme = read_checkpoint(directory), parse_quantization(quantize)
        check_device(scheme, device)
    except ArtifactError as error:
        raise ModelUnusableError(f"{directory}: {error}") from None
    family = ENCODERS[manifest.architecture]
    number = dtype_of(dtype, config, next(tensor for _, tensor in checkpoint.tensors.values()), place)
    inner = inner_weights(checkpoint, family)
    parameters, needed = model_bytes(checkpoint, inner, scheme, number.itemsize)
    check_memory(directory, needed, place, manifest.quantization or dtype_name(number))
    quantized = QuantizedWeights.of(checkpoint, inner, scheme)
    module = _from_pretrained(directory, number, family, quantized)
    if quantized is not None:
        quantized.fill(module, number, place)
    sizes = {one.name: (one.in_features, one.out_features) for one in manifest.modules}
    adaptable = {name: sizes[name] for name, _ in module.named_modules() if name in sizes}
    ends = {name for name in adaptable if is_embedding(name) or name in family.head.linears}
    return LoadedEncoder(
        module=module,
        family=family,
        device=place,
        dtype=number,
        context_length=manifest.context_length,
        vocab_size=manifest.vocab_size,
        pooling=manifest.pooling,
        linears={name: shape for name, shape in adaptable.items() if name not in ends},
        ends={name: shape for name, shape in adaptable.items() if name in ends},
        directory=directory,
        parameters=parameters,
        quantized=quantized,
    )


def _from_pretrained(
    directory: Path, dtype: torch.dtype, family: EncoderFamily, quantized: QuantizedWeights | None
) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager" if family.model_type in _OWN_ATTENTION else registered.NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **(quantized.loading_options(directory) if quantized else {}),
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelUnusableError(f"{directory} can't be loaded: {' '.join(str(error).split())}") from error
    module, info = loaded
    head = tuple(f"{name}." for name in family.head.modules)
    require_weights(directory, info, lambda name: name.startswith(head))
    evaluated: nn.Module = module.eval().requires_grad_(False)
    return evaluated
