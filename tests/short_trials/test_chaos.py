"""Short runs of what `make chaos` runs long: seeds that have failed once are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.chaos.checker import check
from tests.trials.chaos.history import read_history
from tests.trials.chaos.plan import Kind, make_plan
from tests.trials.chaos.report import as_json, as_lines
from tests.trials.chaos.run import run

# Faults of each family, those that are quick to mend; the long run has them all.
SHORT = (
    *(Kind.WORKER_KILL, Kind.ENGINE_KILL, Kind.ROUTER_KILL_FULL),
    *(Kind.REDIS_WIPE, Kind.REDIS_FULL, Kind.LINK_CUT),
)


# tests/e2e kills each part by itself, and the simulation draws faults.
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1])
async def test_no_token_is_lost_repeated_or_misplaced(tmp_path: Path, seed: int) -> None:
    plan = make_plan(8 * len(SHORT), len(SHORT), seed, kinds=SHORT)
    history = tmp_path / "history.jsonl"
    await run(plan, tmp_path / "cluster", history)
    verdict = check(read_history(history))
    print("\n".join(as_lines(verdict)))
    assert verdict.holds, as_json(verdict)
    assert sum(verdict.faults.values()) == len(SHORT)
    assert sum(len(gaps) for gaps in verdict.gaps.values()) > 0, "no fault hit anything"
