"""Weights of linear layers as the CPU kernels read them: panels of columns, whose memory is read front to back.

    weight [out, in]  ──▶  panels [out / PANEL, in / unit, PANEL, bytes of a unit], zeros beyond the last output

A unit is so many columns that are stored side by side for one output; see vectors.py for how they are unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.engine.device.dtypes import dtype_name
from worker.engine.linear.formats import UNIT_COLUMNS, ZERO_STEP, panel_outputs
from worker.engine.quantized.weight import SYMMETRIC_ZERO, AnyLinear, QuantizedWeight

# Number of columns whose products are summed before they are added to the total, where no group has its own scale.
SEGMENT_COLUMNS = 128
# Columns are padded to a multiple of this: whole units of every format, and whole vectors.
COLUMNS_STEP = 16
# Columns of a unit in the low and in the high nibbles of its four bytes: those of two int16, even columns in the first.
_NIBBLES = [0, 4, 1, 5], [2, 6, 3, 7]
# The float kernel sees codes shifted to the upper half of a word.
_SHIFTED = 65536.0


@dataclass(frozen=True)
class Panels:
    """A weight [outputs, columns] in panels.

    `columns` is padded to a multiple of COLUMNS_STEP. `scales` and `zeros` are float32 [panels, groups, PANEL], None
    where the format has none; `group` columns share one. `bias` is float32 [panels * PANEL].
    """

    format: str
    outputs: int
    columns: int
    memory: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group: int
    bias: Tensor

    @property
    def count(self) -> int:
        """Return the number of panels."""
        return len(self.memory)

    @property
    def segment(self) -> int:
        """Return the number of columns that are summed before a scale is applied."""
        return self.group if self.scales is not None and self.scales.shape[1] > 1 else SEGMENT_COLUMNS

    def scale_places(self) -> tuple[int, int, int, int]:
        """Return the addresses of scales and zeros, and the bytes from panel to panel and from segment to segment."""
        if self.scales is None:
            return 0, 0, 0, 0
        _, groups, width = self.scales.shape
        zeros = 0 if self.zeros is None else self.zeros.data_ptr()
        return self.scales.data_ptr(), zeros, groups * width * 4, width * 4 if groups > 1 else 0


def can_be_panels(linear: AnyLinear) -> bool:
    """Tell whether there is a format for the layer's weight."""
    weight = linear.weight
    if not isinstance(weight, QuantizedWeight):
        return weight.dtype in (torch.float32, torch.bfloat16)
    return not weight.codes.is_floating_point() and (weight.scales.shape[1] == 1 or weight.group % COLUMNS_STEP == 0)


def make_panels(linear: AnyLinear, *, fixed: bool = False) -> Panels:
    """Lay out a layer's weight and bias. `fixed`: for activations in fixed point, where the weight is codes."""
    weight = linear.weight
    outputs = linear.out_features
    panels = -(-outputs // panel_outputs())
    bias = torch.zeros(panels * panel_outputs())
    if linear.bias is not None:
        bias[:outputs] = linear.bias.detach()
    if not isinstance(weight, QuantizedWeight):
        name = dtype_name(weight.dtype)
        memory = _in_panels(weight.detach(), name, panels)
        return Panels(name, outputs, _padded(linear.in_features), memory, None, None, linear.in_features, bias)
    name = f"int{weight.bits}"
    scales, zeros, group = weight.scales, weight.zeros, weight.group
    if zeros is None and weight.bits == 4:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    if fixed and scales.shape[1] > 1:
        # Each part of a long group is a segment with its scale.
        group = _part_of(group)
        parts = weight.group // group
        scales = scales.repeat_interleave(parts, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(parts, 1)
    if not fixed:
        scales, zeros = scales / _SHIFTED, None if zeros is None else zeros * _SHIFTED
    elif zeros is not None:
        # The sums of a row begin with a product of these pairs and of its sum of q.
        zeros = torch.stack((-zeros, -ZERO_STEP * zeros), -1).to(torch.int16).view(torch.int32).squeeze(-1)
    return Panels(
        name,
        outputs,
        _padded(linear.in_features),
        _in_panels(weight.unpacked(), name, panels),
        _groups_in_panels(scales, panels),
        None if zeros is None else _groups_in_panels(zeros, panels),
        group,
        bias,
    )


def _part_of(group: int) -> int:
    """Return the largest number of columns of which a group is a multiple, and which integer sums can take."""
    return next(part for part in range(SEGMENT_COLUMNS, 0, -COLUMNS_STEP) if group % part == 0)


def _padded(columns: int) -> int:
    return -(-columns // COLUMNS_STEP) * COLUMNS_STEP


def _in_panels(numbers: Tensor, name: str, panels: int) -> Tensor:
    """Lay out one number for each weight [out, in]: [panels, units, PANEL, ...]."""
    unit, columns = UNIT_COLUMNS[name], _padded(numbers.shape[1])
    missing = columns - numbers.shape[1], panels * panel_outputs() - len(numbers)
    if any(missing):
        numbers = pad(numbers, (0, missing[0], 0, missing[1]))
    if name == "float32":
        unit = 1
    of_panels = numbers.view(panels, panel_outputs(), columns // unit, unit).transpose(1, 2)
    if name == "int4":
        of_panels = of_panels[..., _NIBBLES[0]] | of_panels[..., _NIBBLES[1]] << 4
    return of_panels.contiguous()


def _groups_in_panels(of_groups: Tensor, panels: int) -> Tensor:
    """Lay out float32 [out, groups] as [panels, groups, PANEL]."""
    groups = of_groups.shape[1]
    padded = pad(of_groups, (0, 0, 0, panels * panel_outputs() - len(of_groups)))
    return padded.view(panels, panel_outputs(), groups).transpose(1, 2).contiguous()
