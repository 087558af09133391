"""The panel as strips, one for each adapter, and each with its own rows only: no product with other adapters' columns.

    rows            0  1  1  1  2  2 ...            sorted by adapter; a strip gets as many as the largest has
    panel           │ strip │ strip │ strip │ ...   all as wide
    copied          only the strips in use, in the rows' order: rows that all have their own need no order of their own
    in place        all strips where they lie, also the idle ones; the rows are brought into the panel's order and back

The two ways to read the panel give the same numbers; which is faster depends on a layer's width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.lora.weights import LoraPair
from worker.staging import upload

# Faster than the packed panel from so many rows times columns on, if there are so many rows for strips as wide, and so
# many more for each row that a strip must have because one adapter has as many. (Measured; wider ones never were.)
_FROM_NUMBERS = 8192
_FROM_ROWS = {8: 44, 16: 28, 32: 34}
_ROWS_FOR_PADDING = 1.25
# Copied, where a layer has up to so many inputs and outputs: its strips then still are in the cache when they are read.
# Measured: 7% faster at 896 + 896, 10% slower at 1,536 + 1,536, 50% at 4,096 + 4,096.
_COPIED_UP_TO = 2048
# ... and in any layer where the panel has so many times as many strips as are in use: measured, 1.4 (4,096 + 4,096) to
# 1.6 (2,048 + 2,048).
_COPIED_FROM_IDLE = 1.5


@dataclass(frozen=True, slots=True)
class _Order:
    """Rows for `count` strips: `pad` [count * most], any where a strip has fewer; `back` [rows] is where each stands.

    Both None: the rows as they are.
    """

    count: int
    pad: Tensor | None
    back: Tensor | None


@dataclass(frozen=True, slots=True)
class Strips:
    """A step's rows for a panel of strips of `width` columns. `used` are the strips that are copied."""

    width: int
    used: Tensor
    copied: _Order
    in_place: _Order | None
    # Where copies go, by their features: fresh memory for each would cost more than the copy, in page faults.
    _rooms: dict[int, Tensor] = field(default_factory=dict)

    def add(self, out: Tensor, rows: Tensor, panel: LoraPair) -> None:
        """Add to out [rows, out_features] what the adapters make of x [rows, in_features]."""
        inputs, outputs = panel.a.shape[1], panel.b.shape[1]
        order = self.in_place if inputs + outputs > _COPIED_UP_TO else None
        order, strips = (self.copied, self._copy) if order is None else (order, self._view)
        padded = rows if order.pad is None else rows.index_select(0, order.pad)
        shrunk = torch.bmm(padded.view(order.count, -1, inputs), strips(panel.a).transpose(1, 2))
        added = torch.bmm(shrunk, strips(panel.b)).view(-1, outputs)
        out.add_(added if order.back is None else added.index_select(0, order.back))

    def _view(self, side: Tensor) -> Tensor:
        return side.view(-1, self.width, side.shape[1])

    def _copy(self, side: Tensor) -> Tensor:
        """Holds until the next one."""
        features = side.shape[1]
        room = self._rooms.get(features)
        if room is None:
            room = self._rooms[features] = side.new_empty(self.copied.count, self.width, features)
        return torch.index_select(self._view(side), 0, self.used, out=room)


def strips_of(
    row_slots: Sequence[int], strips: Mapping[int, int], count: int, width: int, device: torch.device
) -> Strips | None:
    """For rows sorted by slot and a panel of `count` strips; `strips` says which is a slot's.

    None where the packed panel is faster.
    """
    if width not in _FROM_ROWS or len(row_slots) * count * width < _FROM_NUMBERS:
        return None
    rows_of = Counter(row_slots)
    used = [strips[slot] for slot in rows_of]
    # The panel's products are with all strips, also idle ones.
    rows = len(row_slots) * count / len(used)
    if rows < _FROM_ROWS[width] + _ROWS_FOR_PADDING * max(rows_of.values()):
        return None
    copied = _order(rows_of, range(len(used)), len(used), device)
    in_place = None if count >= _COPIED_FROM_IDLE * len(used) else _order(rows_of, used, count, device)
    return Strips(width, upload(used, device, torch.int64), copied, in_place)


def _order(rows_of: Counter[int], strips: Sequence[int], count: int, device: torch.device) -> _Order:
    most = max(rows_of.values())
    pad = [0] * (count * most)
    back: list[int] = []
    for strip, rows in zip(strips, rows_of.values(), strict=True):
        for place in range(strip * most, strip * most + rows):
            pad[place] = len(back)
            back.append(place)
    if pad == list(range(len(back))):
        return _Order(count, None, None)
    return _Order(count, upload(pad, device, torch.int64), upload(back, device, torch.int64))
