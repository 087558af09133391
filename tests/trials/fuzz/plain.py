"""Fuzzes a target by seeded changes alone."""

from __future__ import annotations

import random
import time
import traceback
from itertools import islice

from tests.trials.fuzz.mutations import mutants
from tests.trials.fuzz.target import Target


def fuzz(
    target: Target, draw: random.Random, runs: int | None = None, seconds: float = float("inf")
) -> tuple[int, list[str]]:
    """Try out so many texts, or for so long; return their number and the first finding of each kind and place."""
    found: dict[tuple[str, str, int | None], str] = {}
    made, ends_at = 0, time.monotonic() + seconds
    for data in islice(mutants(target.seeds, target.words, draw, target.change), runs):
        if time.monotonic() > ends_at:
            break
        made += 1
        try:
            target.try_out(data)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            kind = (type(error).__name__, place.filename, place.lineno)
            found.setdefault(kind, f"{kind[0]} at {kind[1]}:{kind[2]}: {str(error)[:200]}; data: {data[:400]!r}")
    return made, list(found.values())
