"""The panel's columns: disjoint, kept while they are of use, never more than the batch needs by far."""

from __future__ import annotations

import itertools
import random

from worker.lora.panel import PanelLayout


def test_columns_stay_while_nothing_new_comes() -> None:
    layout = PanelLayout()
    assert [(place.slot, place.offset) for place in layout.arrange({3: 16, 7: 8})] == [(3, 0), (7, 16)]
    assert layout.arrange({3: 16, 7: 8}) == []
    assert layout.arrange({7: 8}) == []
    assert layout.arrange({3: 16}) == []
    assert layout.width == 24


def test_a_newcomer_takes_over_columns_as_wide_as_its_own() -> None:
    layout = PanelLayout()
    layout.arrange({3: 16, 7: 8, 9: 16})
    fresh = layout.arrange({7: 8, 9: 16, 4: 16})
    assert [(place.slot, place.offset, place.width) for place in fresh] == [(4, 0, 16)]
    assert layout.width == 40


def test_a_slot_with_another_adapter_is_filled_again() -> None:
    layout = PanelLayout()
    layout.arrange({3: 16, 7: 8})
    layout.forget(3)
    assert [place.slot for place in layout.arrange({3: 8, 7: 8})] == [3]
    assert layout[3].width == 8


def test_walk() -> None:
    chance = random.Random(0)
    layout = PanelLayout()
    ranks = {slot: chance.choice([8, 16, 32, 64]) for slot in range(64)}
    for _ in range(3000):
        if chance.random() < 0.1:
            slot = chance.randrange(64)
            ranks[slot] = chance.choice([8, 16, 32, 64])
            layout.forget(slot)
        wanted = {slot: ranks[slot] for slot in chance.sample(range(64), chance.choice([1, 2, 4, 8, 16]))}
        before = {place.slot: place.offset for place in layout.places()}
        fresh = {place.slot for place in layout.arrange(wanted)}
        for slot, width in wanted.items():
            assert layout[slot].width == width
            assert slot in fresh or before[slot] == layout[slot].offset
        taken = sorted((place.offset, place.offset + place.width) for place in layout.places())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))
        assert taken[-1][1] <= layout.width <= 2 * sum(wanted.values()) + 64
