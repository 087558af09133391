"""Short runs of what `make chaos` runs long: seeds that have failed once are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.checker import check
from tests.chaos.history import read_history
from tests.chaos.plan import Kind, make_plan
from tests.chaos.report import as_json, as_lines
from tests.chaos.run import run

# One of each family that is quick to mend; the long run has them all.
SHORT = (Kind.WORKER_KILL, Kind.ENGINE_KILL, Kind.ROUTER_KILL_FULL, Kind.REDIS_WIPE, Kind.REDIS_FULL, Kind.LINK_CUT)


# Failed once: tests/e2e/test_adapter_faults.py has what it found (an answer that has begun), made small.
LIED_TO = (Kind.STORE_LIES, Kind.WORKER_KILL)


@pytest.mark.parametrize(("seed", "kinds"), [(1, SHORT), (23, LIED_TO)])
async def test_no_token_is_lost_repeated_or_misplaced(tmp_path: Path, seed: int, kinds: Sequence[Kind]) -> None:
    plan = make_plan(12 * len(kinds), len(kinds), seed, kinds=kinds)
    history = tmp_path / "history.jsonl"
    await run(plan, tmp_path / "cluster", history)
    verdict = check(read_history(history))
    print("\n".join(as_lines(verdict)))
    assert verdict.holds, as_json(verdict)
    assert sum(verdict.faults.values()) == len(kinds)
    assert sum(len(gaps) for gaps in verdict.gaps.values()) > 0, "no fault hit anything"
