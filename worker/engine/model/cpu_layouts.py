"""The dtype and the layouts in which a loaded model computes on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from worker.engine.device.memory import available_bytes, return_freed_memory
from worker.engine.linear.choice import Choice, kind_of, measured, unmeasured
from worker.engine.linear.layouts import replace_linears
from worker.engine.model.loader import LoadedModel
from worker.engine.quantized.embedding import QuantizedEmbedding
from worker.engine.quantized.weight import QuantizedLinear, is_linear
from worker.engine_api import ModelUnusableError

# Maximum number of parameters of a model whose layouts are not measured: that would take longer than its steps.
_UNMEASURED_PARAMETERS = 16_000_000


def choose_layouts(loaded: LoadedModel, dtype: str) -> LoadedModel:
    """Choose how a model computes on the CPU, by measuring with this thread's number of cores; `dtype` may be "auto".

    A bfloat16 model may then compute in float32 over its bfloat16 weights: where a processor has no instructions for
    bfloat16 that is faster, and exact. The result's dtype says so.
    """
    if loaded.device.type != "cpu" or loaded.parameters < _UNMEASURED_PARAMETERS:
        return loaded
    module, own = loaded.module, loaded.dtype
    computes = [own]
    if dtype == "auto" and own == torch.bfloat16 and _other_bytes(module) < available_bytes(loaded.device):
        computes.append(torch.float32)
    choice = measured(module, own, computes)
    if choice.compute != own:
        _compute_in(module, choice.compute)
    return replace(loaded, dtype=choice.compute, layouts=choice)


def lay_out(loaded: LoadedModel) -> None:
    """Replace the linear layers of a model on the CPU. Raises ModelUnusableError where it has no kernel for one."""
    choice = loaded.layouts or unmeasured(loaded.module, loaded.dtype)
    _check_kernels(loaded, choice)
    replace_linears(loaded.module, choice.make)
    # The first layouts of the weights, and what measuring and quantizing took: 0.4 of 1.3 GB with 0.4 B parameters.
    return_freed_memory()


def _check_kernels(loaded: LoadedModel, choice: Choice) -> None:
    for layer in loaded.module.modules():
        if isinstance(layer, QuantizedLinear) and kind_of(layer) not in choice.layouts:
            raise ModelUnusableError(
                f"{loaded.directory}: this processor has no kernel for {kind_of(layer)} weights; "
                "load the model without --quantize, or an unquantized checkpoint"
            )


def _other_bytes(module: nn.Module) -> int:
    """Return the bytes in float32 of all parameters but the linear layers' weights, which stay as they are."""
    kept = {id(layer.weight) for layer in module.modules() if is_linear(layer)}
    embeddings = [layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Embedding)]
    others = (parameter.numel() for parameter in module.parameters() if id(parameter) not in kept)
    return 4 * (sum(others) + sum(embeddings))


def _compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast everything but the linear layers, whose layouts take inputs of that dtype over the weights as they are."""
    for child in module.modules():
        if isinstance(child, QuantizedEmbedding):
            child.dtype = dtype
        if is_linear(child):
            continue
        # A new parameter: a tied weight stays in its dtype in the output head.
        for name, parameter in list(child.named_parameters(recurse=False)):
            if parameter.is_floating_point():
                setattr(child, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
        for name, buffer in list(child.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(child, name, buffer.to(dtype))
