"""Reads the quantized weights of checkpoints, or float weights that are quantized while they are loaded.

transformers builds the model without these weights and loads the rest; then they are read, one after the other, so that
the memory never holds more than one of them in floats. artifacts/quantization.py describes the layouts, and
checks them:

compressed-tensors   words of int32 hold 4 or 8 columns of a row, the first one in the lowest bits; codes and zero
                     points have an offset of half their range. Copies of 4 bits: zero points are bytes, in eighths
awq                  words hold 8 outputs of a column, in the order 0 2 4 6 1 3 5 7 from the lowest bits
gptq                 words hold 4 or 8 columns of an output, zero points 4 or 8 outputs; the first in the lowest bits
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from loraplex.contracts.artifacts.base_modules import LinearWeight
from loraplex.contracts.artifacts.checkpoint import Checkpoint, read_config
from loraplex.contracts.artifacts.families import HEAD
from loraplex.contracts.artifacts.quantization import Method, Quantization, StoredWeight
from loraplex.worker.engine.device import return_freed_memory
from loraplex.worker.engine.parallel.splits import RankPlan, Split
from loraplex.worker.engine.quantized.layers import QuantizedEmbedding, QuantizedLinear
from loraplex.worker.engine.quantized.weight import (
    ZERO_PARTS,
    QuantizedWeight,
    equal,
    pack_codes,
    quantize_tensor,
    quantize_weight,
)
from loraplex.worker.engine_api import ModelUnusableError

# The place of output i of eight in an AWQ word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

# Slices of safetensors, by name, of tensors that are not read yet.
Slices = Mapping[str, Any]


@contextlib.contextmanager
def open_slices(checkpoint: Checkpoint, *, mapped: bool) -> Iterator[dict[str, Any]]:
    """Open a checkpoint's files; yields the slices of their tensors.

    Tensors of `mapped` files share the system's pages, which stay until the last of these tensors is gone; others are
    read into memory of their own.
    """
    with contextlib.ExitStack() as stack:
        paths = {path for path, _ in checkpoint.tensors.values()}
        backend = "mmap" if mapped else "pread"
        files = {path: stack.enter_context(safetensors.safe_open(path, "pt", backend=backend)) for path in paths}
        names = checkpoint.stored_names
        yield {name: files[path].get_slice(names.get(name, name)) for name, (path, _) in checkpoint.tensors.items()}


def read_weight(stored: StoredWeight, slices: Slices) -> QuantizedWeight:
    """Read a quantized weight."""
    if stored.scheme.method is Method.COMPRESSED_TENSORS:
        return _compressed(stored, slices)
    return _transposed(stored, slices)


def _compressed(stored: StoredWeight, slices: Slices) -> QuantizedWeight:
    scheme = stored.scheme.quantization
    out_features, in_features = stored.out_features, stored.in_features
    codes = slices[stored.codes][...]
    zeros = None if stored.zeros is None else slices[stored.zeros][...]
    if stored.packed:
        codes = codes.contiguous().view(torch.uint8)[:, : in_features * scheme.bits // 8]
        # Pairs of 4 bits are as QuantizedWeight has them; bytes lose their offset.
        codes = codes.contiguous() if scheme.bits == 4 else (codes ^ 0x80).view(torch.int8)
        if zeros is not None and not stored.scheme.zeros_in_eighths:
            zeros = _fields(zeros.t(), scheme.bits)[:, :out_features].t()
            zeros = zeros * ZERO_PARTS if scheme.bits == 4 else zeros - 128
    scales = slices[stored.scales][...]
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(out_features, 1)
    return _weight(stored, codes, scales, zeros)


def _transposed(stored: StoredWeight, slices: Slices) -> QuantizedWeight:
    scheme = stored.scheme
    bits = scheme.quantization.bits
    if scheme.method is Method.AWQ:
        codes, zeros = (_awq_fields(slices[name][...]) for name in (stored.codes, stored.zeros or ""))
        codes = codes.t()
    else:
        codes = _fields(slices[stored.codes][...].t(), bits)
        zeros = _fields(slices[stored.zeros or ""][...], bits) + (1 if scheme.zeros_less_one else 0)
    # Eight bits are stored from 0, and held from -128.
    shift = 128 if bits == 8 else 0
    codes = pack_codes(codes) if bits == 4 else (codes - shift).to(torch.int8)
    zeros = zeros * ZERO_PARTS if bits == 4 else zeros - shift
    return _weight(stored, codes, slices[stored.scales][...].t(), zeros.t())


def _weight(stored: StoredWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedWeight:
    scheme = stored.scheme.quantization
    # Only the smallest form of 4 bits is kept as it is stored; kernels are made for it, and for float32.
    small = scheme.bits == 4 and zeros is not None and scales.dtype == torch.bfloat16
    return QuantizedWeight(
        codes.contiguous(),
        scales.to(torch.bfloat16 if small else torch.float32).contiguous(),
        None if zeros is None else zeros.to(torch.uint8 if scheme.bits == 4 else torch.float32).contiguous(),
        scheme.bits,
        scheme.group or stored.in_features,
        scheme.dynamic,
    )


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of int32 words [rows, words], lowest first: int32 [rows, words * 32 // bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _awq_fields(words: Tensor) -> Tensor:
    fields = _fields(words, 4)
    return fields.view(len(words), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)


_METHOD = "loraplex"
# Names of tensors that transformers has no place for: they are read here.
_READ_HERE = r"\.(weight|weight_\w+|qweight|qzeros|scales|g_idx)$"


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of a checkpoint that are loaded quantized, by module name; `scheme` for those that are in floats.

    `tied` says that the output head shares the token embeddings' weight.
    """

    checkpoint: Checkpoint
    weights: Mapping[str, LinearWeight]
    scheme: Quantization | None
    tied: bool

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        weights: Mapping[str, LinearWeight],
        scheme: Quantization | None,
        *,
        tied: bool = False,
    ) -> QuantizedWeights | None:
        """Choose the weights that are loaded quantized; None where there are none."""
        chosen = {name: weight for name, weight in weights.items() if weight.scheme(scheme) is not None}
        if tied:
            chosen.pop(HEAD, None)
        return cls(checkpoint, chosen, scheme, tied) if chosen else None

    def fill(
        self, module: Any, dtype: torch.dtype, device: torch.device, splits: Mapping[str, Split] = MappingProxyType({})
    ) -> None:
        """Put the quantized layers into a loaded model that is on the device already; `splits` are a rank's."""
        with open_slices(self.checkpoint, mapped=False) as slices:
            for name, weight in self.weights.items():
                place = module.get_submodule(name)
                quantized = self._read(weight, slices, device, splits.get(name))
                # The float weights before: the heap has no use for gaps of their sizes.
                return_freed_memory()
                if not weight.is_embedding:
                    module.set_submodule(name, QuantizedLinear(quantized, place.bias))
                    continue
                scale = getattr(place, "embed_scale", None)
                embedding = QuantizedEmbedding(quantized, dtype, None if scale is None else float(scale))
                module.set_submodule(name, embedding)
                if self.tied:
                    head = _part(quantized, splits.get(HEAD))
                    module.set_submodule(HEAD, QuantizedLinear(head, module.get_submodule(HEAD).bias))

    def read(self, module: str) -> QuantizedWeight:
        """Read the whole weight of a module in `weights`."""
        with open_slices(self.checkpoint, mapped=False) as slices:
            return self._read(self.weights[module], slices, torch.device("cpu"), None)

    @property
    def embeddings(self) -> LinearWeight | None:
        """Return the token embeddings, where they are quantized."""
        return next((weight for weight in self.weights.values() if weight.is_embedding), None)

    def repeats(self, module: str, values: Tensor, dtype: torch.dtype) -> bool | None:
        """Tell whether the weight of the token embeddings or the output head, before it was quantized, equals these
        values in `dtype`; None where it is not quantized.
        """
        weight = self._of_end(module)
        if weight is None:
            return None
        with open_slices(self.checkpoint, mapped=False) as slices:
            if weight.stored is None:
                return torch.equal(slices[weight.tensor][...].to(dtype), values.to(dtype))
            return equal(read_weight(weight.stored, slices), quantize_weight(values, weight.stored.scheme.quantization))

    def rows(self, module: str, ids: Tensor) -> QuantizedWeight | None:
        """Read tokens' rows of the token embeddings or the output head; None where its weight is not quantized."""
        weight = self._of_end(module)
        if weight is None:
            return None
        with open_slices(self.checkpoint, mapped=True) as slices:
            if weight.stored is not None:
                return read_weight(weight.stored, slices).rows(ids)
            assert self.scheme is not None
            # Each row has scales of its own.
            return quantize_weight(slices[weight.tensor][...][ids], self.scheme)

    def _of_end(self, module: str) -> LinearWeight | None:
        return self.weights.get(module) or (self.embeddings if self.tied else None)

    def _read(self, weight: LinearWeight, slices: Slices, device: torch.device, split: Split | None) -> QuantizedWeight:
        """Read a weight, or a rank's part of it; floats are quantized on the device."""
        if weight.stored is not None:
            return _part(read_weight(weight.stored, slices), split).to(device)
        assert self.scheme is not None
        tensor = slices[weight.tensor]
        if split is not None and split.outputs is not None:
            return quantize_tensor(split.part.of(tensor).to(device), weight, self.scheme)
        # Its scales may be those of whole rows.
        return _part(quantize_tensor(tensor[...].to(device), weight, self.scheme), split)


def _part(weight: QuantizedWeight, split: Split | None) -> QuantizedWeight:
    if split is None:
        return weight
    if split.outputs is not None:
        outputs = [torch.arange(*span, device=weight.codes.device) for span in split.outputs]
        return weight.rows(torch.cat(outputs))
    return weight if split.inputs is None else weight.columns(*split.inputs)


def transformers_config(directory: Path) -> Any:
    """Return a model's config without the checkpoint's own quantization, which transformers would do in its way.

    Raises ModelUnusableError.
    """
    try:
        content = read_config(directory)
        config: Any = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    except Exception as error:  # transformers raises errors of many kinds for a config that it can't read
        raise ModelUnusableError(f"{directory} can't be loaded: {' '.join(str(error).split())}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def loading_options(
    directory: Path, quantized: QuantizedWeights | None, plan: RankPlan | None, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of from_pretrained for a device: quantized weights are left to QuantizedWeights.fill, and
    the others are read straight to the device; with a plan its parts of them.
    """
    config, awaited = transformers_config(directory), list(quantized.weights if quantized else ())
    if quantized and quantized.tied and quantized.embeddings is not None:
        config.tie_word_embeddings = False
        awaited.append(HEAD)
    if not awaited and plan is None and device.type == "cpu":
        return {"config": config}
    return {"config": config, "quantization_config": _Preparation(awaited, plan, device)}


@register_quantization_config(_METHOD)
class _Preparation(QuantizationConfigMixin):
    """Names the layers whose weights transformers does not load, and says what of the others it loads, and where."""

    quant_method: Any

    def __init__(self, names: Collection[str], plan: RankPlan | None, device: torch.device) -> None:
        self.quant_method = _METHOD
        self.names = names
        self.plan = plan
        self.device = device


@register_quantizer(_METHOD)
class _Preparing(HfQuantizer):
    """Changes a model between its construction and the loading of its weights."""

    quantization_config: _Preparation
    is_trainable = False

    def is_serializable(self) -> bool:
        """Return False: the model is not saved."""
        return False

    def update_device_map(self, device_map: Any) -> Any:
        """Return the device for all weights; passed to from_pretrained it would ask for a library."""
        device = self.quantization_config.device
        return device_map if device.type == "cpu" else {"": device}

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return 0, so that transformers does not reserve one block of the device's memory for all weights.

        Fusing layers frees their weights: holes in such a block would never be returned to the device.
        """
        return 0.0

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        names, plan = self.quantization_config.names, self.quantization_config.plan
        if names:
            model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), _READ_HERE}
        for name in names:
            layer = model.get_submodule(name)
            del layer.weight
            # No parameter, so nothing is loaded; models that initialize layers by their names find it.
            layer.weight = torch.empty(0, device="cpu")
            layer.weight._is_hf_initialized = True
        if plan is not None:
            _shrink(model, plan)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]  # transformers' own


def _shrink(model: nn.Module, plan: RankPlan) -> None:
    """Give the parameters of a model the shapes of a rank's parts."""
    for name, parameter in list(model.named_parameters()):
        part = plan.part(name, parameter.shape)
        if part is None:
            continue
        path, _, kind = name.rpartition(".")
        module, shape = model.get_submodule(path), part.shape(parameter.shape)
        setattr(module, kind, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), False))
        if isinstance(module, nn.Linear) and kind == "weight":
            module.out_features, module.in_features = shape
