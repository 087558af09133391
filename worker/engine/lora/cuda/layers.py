"""The model's linear layers on CUDA: those with the same input as one product, their rows' adapters added by kernels.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CudaLora.apply(x, y) ──▶ views of y

Imported where there is Triton only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from worker.engine.lora.cuda.kernels.groups import MAX_MODULES
from worker.engine.lora.cuda.lora import CudaLora
from worker.engine.lora.fused_linears import FusedProduct, can_fuse, fuse, fusion_candidates, replace_linears
from worker.engine.lora.weights import AdapterWeights


class CudaLayers:
    """All of a model's adaptable linear layers, replaced; see worker.engine.lora.adapter_layers."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, tuple[int, int]],
        slots: int,
        max_rank: int,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Takes the memory of all slots, and compiles the kernels; `rows` is the most that a step decodes."""
        groups = {names[0]: names for names in _groups(model, linears)}
        self.lora = CudaLora(linears, groups, slots, max_rank, rows, dtype, device)
        for name, members in groups.items():
            product = _Adapted(fuse(_linears(model, members)), self.lora, name)
            widths = [layer.out_features for layer in _linears(model, members)]
            replace_linears(model, members, FusedProduct(product, widths, product.linear))
        self.lora.warm_up()
        if device.type == "cuda":
            # Of the weights that were fused: torch would keep their memory, and who measures what is free not see it.
            torch.cuda.empty_cache()

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """See AdapterLayers."""
        self.lora.write_slot(weights, slot)

    def begin_step(self, rows: Sequence[tuple[int, int]], wanted: Sequence[int] = ()) -> None:
        """See AdapterLayers."""
        self.lora.set_rows(rows)

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        self.lora.set_decode_slots(row_slots, padded)


class _Adapted:
    """A group's product, and what each row's adapter adds to it."""

    def __init__(self, linear: nn.Linear, lora: CudaLora, group: str) -> None:
        self.linear = linear
        self._lora = lora
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self._lora.apply(x, y, self._group)
        return y


def _groups(model: nn.Module, linears: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Siblings, where they can be one product for which there is a kernel; else each alone."""
    groups: list[list[str]] = []
    for names in fusion_candidates(linears):
        together = len(names) <= MAX_MODULES and can_fuse(_linears(model, names))
        groups += [names] if together else [[name] for name in names]
    return groups


def _linears(model: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    layers = [model.get_submodule(name) for name in names]
    return [layer for layer in layers if isinstance(layer, nn.Linear)]
