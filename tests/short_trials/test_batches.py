"""The short form of `make batches`: 60 lines, and one kill each of a runner, a router and a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.batches.arena import Arena


@pytest.mark.timeout(120)
async def test_each_line_is_answered_and_charged_once_through_kills(tmp_path: Path) -> None:
    async with Arena.open(tmp_path, seed=1, step_ms=20) as arena:
        verdict = await arena.run(lines=60, kills=3, tokens=50)
    assert verdict.is_right, str(verdict)
