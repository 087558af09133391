"""The model's linear layers on CUDA: fused linears as one product, their rows' adapters added by Triton kernels.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CudaLora.apply(x, y) ──▶ views of y

Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from worker.engine.lora.cuda.kernels.groups import MAX_MODULES
from worker.engine.lora.cuda.lora import CudaLora
from worker.engine.lora.fused_linears import FusedProduct, can_fuse, fuse, fusion_candidates, replace_linears
from worker.engine.lora.weights import AdapterWeights
from worker.engine.quantized.weight import AnyLinear, is_linear


class CudaLayers:
    """Implements worker.engine.lora.adapter_layers.AdapterLayers for the model's linear layers."""

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
        """Replace the layers, allocate all slots, and compile the kernels; `rows` is the maximum a step decodes."""
        groups = {names[0]: names for names in _groups(model, linears)}
        self.lora = CudaLora(linears, groups, slots, max_rank, rows, dtype, device)
        for name, members in groups.items():
            replace_linears(model, members, _CudaGroup(_linears(model, members), self.lora, name))
        self.lora.warm_up()
        if device.type == "cuda":
            # Return the memory of the separate weights: torch would keep it, and KV blocks are sized by what is free.
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


class _CudaGroup(FusedProduct):
    """Fused linears, with each row's adapter added to their product."""

    def __init__(self, linears: Sequence[AnyLinear], lora: CudaLora, group: str) -> None:
        super().__init__(fuse(linears), [linear.out_features for linear in linears])
        self._lora = lora
        self._group = group

    def compute(self, x: Tensor) -> Tensor:
        """Compute the base product and add the adapters: [..., in_features] to [..., sum of the widths]."""
        y = self.base(x)
        self._lora.apply(x, y, self._group)
        return y


def _groups(model: nn.Module, linears: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Group the layers that can be fused, at most MAX_MODULES to a group; the others are groups of one."""
    groups: list[list[str]] = []
    for names in fusion_candidates(linears):
        together = len(names) <= MAX_MODULES and can_fuse(_linears(model, names))
        groups += [names] if together else [[name] for name in names]
    return groups


def _linears(model: nn.Module, names: Sequence[str]) -> list[AnyLinear]:
    layers = [model.get_submodule(name) for name in names]
    return [layer for layer in layers if is_linear(layer)]
