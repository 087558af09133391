"""The short form of `make forged`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.trials.forged.run import attack

SEED = 16
TRIES = 90


async def test_no_forgery_is_accepted_and_each_is_audited() -> None:
    with tempfile.TemporaryDirectory(prefix="f-") as directory:  # a short path, for Valkey's socket
        result = await attack(Path(directory), TRIES, SEED)
    assert result.holds, result
    assert result.tries >= TRIES
