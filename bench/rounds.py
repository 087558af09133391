"""Runs several cases in turn, A B A B, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.limit import Step
from bench.report import progress


@dataclass(frozen=True)
class Timed:
    """Tokens that a run answered, and the seconds it took; of our engine also the steps it ran."""

    tokens: int
    seconds: float
    steps: tuple[Step, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Its throughput."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Case:
    """Something to be timed. `run` gets a number that no other run of the benchmark gets, to seed its prompts with."""

    name: str
    run: Callable[[int], Timed]


class Rounds:
    """What each round's runs gave, by case."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Timed]] = {}

    def run(self, cases: Sequence[Case], rounds: int, between: Callable[[], None] = lambda: None) -> None:
        """Run every case once a round, after one round that warms up and is not kept; `between` before each run."""
        number = 0
        for turn in range(rounds + 1):
            for case in cases:
                between()
                number += 1
                timed = case.run(number)
                which = f"round {turn} of {rounds}" if turn else "warming up"
                progress(f"{which}: {case.name}: {timed.tokens_per_s:.1f} tokens/s")
                if turn:
                    self.runs.setdefault(case.name, []).append(timed)

    def ratio(self, ours: str, other: str) -> float:
        """The throughput of one case over another's: the median of the rounds' ratios."""
        pairs = zip(self.runs[ours], self.runs[other], strict=True)
        return median(one.tokens_per_s / two.tokens_per_s for one, two in pairs)

    def rows(self) -> list[Mapping[str, Any]]:
        """Rows of a report: the median throughput, and the spread from lowest to highest."""
        rows: list[Mapping[str, Any]] = []
        for name, timed in self.runs.items():
            rates = [one.tokens_per_s for one in timed]
            rows.append(
                {
                    "case": name,
                    "unit": "tokens/s",
                    "median": median(rates),
                    "low": min(rates),
                    "high": max(rates),
                    "runs": len(rates),
                }
            )
        return rows
