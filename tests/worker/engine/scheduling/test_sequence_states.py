"""A sequence goes from state to state as sequence.py draws it, and in no other way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from loraplex.worker.engine.scheduling.sequence import Sequence, SequenceState, SequenceStateError
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.scheduling.paged_model import PagedModel, spec

ARRIVED, PARKED, READY, RUNNING, ENDED = SequenceState
# The shortest way to each state.
WAYS = {
    ARRIVED: [],
    PARKED: [PARKED],
    READY: [READY],
    RUNNING: [READY, RUNNING],
    ENDED: [ENDED],
}
ALLOWED = {
    (ARRIVED, PARKED), (ARRIVED, READY), (ARRIVED, ENDED),
    (PARKED, READY), (PARKED, ENDED),
    (READY, PARKED), (READY, RUNNING), (READY, ENDED),
    (RUNNING, PARKED), (RUNNING, READY), (RUNNING, ENDED),
}  # fmt: skip


def in_state(state: SequenceState) -> Sequence:
    sequence = Sequence(NewSequence("a", (1,)), 0, frozenset())
    for step in WAYS[state]:
        sequence.move_to(step)
    return sequence


@pytest.mark.parametrize("before", SequenceState)
@pytest.mark.parametrize("after", SequenceState)
def test_every_transition_is_allowed_or_raises(before: SequenceState, after: SequenceState) -> None:
    sequence = in_state(before)
    if (before, after) in ALLOWED:
        sequence.move_to(after)
        assert sequence.state is after
        return
    with pytest.raises(SequenceStateError, match=f"sequence a is {before.name} and can't be {after.name}"):
        sequence.move_to(after)
    assert sequence.state is before


def test_a_sequence_is_parked_then_ready_then_runs_and_ends(
    gated_loads: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[SequenceState] = []
    move_to = Sequence.move_to

    def recorded(sequence: Sequence, state: SequenceState) -> None:
        move_to(sequence, state)
        moves.append(state)

    monkeypatch.setattr(Sequence, "move_to", recorded)
    model = PagedModel(gated_loads(1))
    model.add(spec("a", adapter="x"))
    assert moves == [PARKED]
    model.run_until_idle()
    assert moves == [PARKED, READY, RUNNING, ENDED]
    assert set(pairwise(moves)) <= ALLOWED


def test_time_counts_only_while_it_is_parked() -> None:
    sequence = in_state(PARKED)
    sequence.parked_at -= 2.0
    sequence.move_to(READY)
    waited = sequence.adapter_ms
    assert waited >= 2000
    sequence.move_to(RUNNING)
    sequence.move_to(ENDED)
    assert sequence.adapter_ms == waited
