"""The layout of weights that the kernels of linear layers read: panels, front to back.

    weight [out, in]  ──▶  panels [out / PANEL, in / unit, PANEL, bytes of a unit], zeros beyond the last output

A unit is so many columns that are stored side by side for one output; see weight_vectors.py for how they are unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from loraplex.kernels.weight_vectors import PANEL, UNIT_COLUMNS

# Number of columns whose products are summed before they are added to the total, where no group has its own scale.
SEGMENT_COLUMNS = 128
# Columns are padded to a multiple of this: whole units of every format, and whole vectors.
COLUMNS_STEP = 16
# Columns of a unit in the low and in the high nibbles of its four bytes; of int4, two int16: even ones in the first.
_NIBBLES = {"int4": ([0, 4, 1, 5], [2, 6, 3, 7]), "uint4": ([0, 1, 2, 3], [4, 5, 6, 7])}


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


def padded_columns(columns: int) -> int:
    """Return the columns of a weight in panels."""
    return -(-columns // COLUMNS_STEP) * COLUMNS_STEP


def in_panels(numbers: Tensor, name: str, panels: int) -> Tensor:
    """Lay out one number for each weight [out, in]: [panels, units, PANEL, ...]."""
    unit, columns = UNIT_COLUMNS[name], padded_columns(numbers.shape[1])
    missing = columns - numbers.shape[1], panels * PANEL - len(numbers)
    if any(missing):
        numbers = pad(numbers, (0, missing[0], 0, missing[1]))
    if name == "float32":
        unit = 1
    of_panels = numbers.view(panels, PANEL, columns // unit, unit).transpose(1, 2)
    if name in _NIBBLES:
        low, high = (of_panels[..., columns] for columns in _NIBBLES[name])
        of_panels = low | high << 4
    return of_panels.contiguous()


def groups_in_panels(of_groups: Tensor, panels: int) -> Tensor:
    """Lay out float32 [out, groups] as [panels, groups, PANEL]."""
    groups = of_groups.shape[1]
    padded = pad(of_groups, (0, 0, 0, panels * PANEL - len(of_groups)))
    return padded.view(panels, PANEL, groups).transpose(1, 2).contiguous()
