"""Which columns of the panel belong to which adapter slot.

The panel holds side by side the adapters of the decode rows, so that one product serves them all (see layers.py):

    │ slot 3, rank 16 │ slot 7, rank 8 │ stale: slot 1 │ slot 4 │ ...

Columns stay when their adapter leaves the batch, it may be back with the next request; they are taken over by an
adapter as wide, and when more than half of the panel would be idle, it is laid out anew. So the width is bounded by
what the batch uses, not by what is resident, and filling costs one adapter's bytes for each adapter that joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Idle columns that are left in peace.
_SLACK = 64
_NOBODY = -1


@dataclass(slots=True)
class Columns:
    """The columns [offset, offset + width) and the slot whose adapter they hold."""

    slot: int
    offset: int
    width: int


class PanelLayout:
    """Gives columns to slots, from step to step."""

    def __init__(self) -> None:
        self.width = 0
        self._places: list[Columns] = []
        self._by_slot: dict[int, Columns] = {}

    def __getitem__(self, slot: int) -> Columns:
        return self._by_slot[slot]

    @property
    def strip_width(self) -> int | None:
        """The width that all columns have in common, or None."""
        widths = {place.width for place in self._places}
        return widths.pop() if len(widths) == 1 else None

    def arrange(self, widths: Mapping[int, int]) -> list[Columns]:
        """Place the slots of a step, each with its width in columns; returns the columns to be filled."""
        fresh = []
        if any(slot not in self._by_slot for slot in widths):
            stale = [place for place in self._places if place.slot not in widths]
            for slot, width in widths.items():
                if slot not in self._by_slot:
                    fresh.append(self._place(slot, width, stale))
        if self.width > 2 * sum(widths.values()) + _SLACK:
            self.width, self._places, self._by_slot = 0, [], {}
            fresh = [self._place(slot, width, []) for slot, width in widths.items()]
        return fresh

    def forget(self, slot: int) -> None:
        """Another adapter is in the slot now: its columns are stale."""
        place = self._by_slot.pop(slot, None)
        if place:
            place.slot = _NOBODY

    def places(self) -> list[Columns]:
        """The columns of every slot that has some, also of those that are not in the batch."""
        return list(self._by_slot.values())

    def _place(self, slot: int, width: int, stale: list[Columns]) -> Columns:
        place = next((place for place in stale if place.width == width), None)
        if place:
            stale.remove(place)
            self._by_slot.pop(place.slot, None)
            place.slot = slot
        else:
            place = Columns(slot, self.width, width)
            self._places.append(place)
            self.width += width
        self._by_slot[slot] = place
        return place
