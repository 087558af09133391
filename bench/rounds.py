"""Runs several cases in turn, A B A B, so that other load of the machine affects all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.limit import Step
from bench.report import progress


@dataclass(frozen=True)
class Timed:
    """A timed run: its answered tokens and its seconds; for our engine also its steps."""

    tokens: int
    seconds: float
    steps: tuple[Step, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Case:
    """A benchmark case to be timed. `run` takes a number, unique in the benchmark, as the seed of its prompts."""

    name: str
    run: Callable[[int], Timed]


class Rounds:
    """The timed runs of all rounds, by case."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Timed]] = {}
        # Runs of all cases, warm-ups included: the number of the last one.
        self._runs = 0

    def tokens_per_s(self, case: str) -> float:
        """Return the median throughput of a case."""
        return median(run.tokens_per_s for run in self.runs[case])

    def fastest(self, cases: Iterable[str]) -> str | None:
        """Return the case with the highest median throughput; None where none of them was run."""
        return max((case for case in cases if case in self.runs), key=self.tokens_per_s, default=None)

    def run(
        self,
        cases: Sequence[Case],
        rounds: int,
        between: Callable[[], None] = lambda: None,
        *,
        first_turn: int = 0,
    ) -> None:
        """Run every case once a round, and `between` before each run.

        Turn 0 is a warm-up, whose times are dropped; it is left out where `first_turn` is 1.
        """
        for turn in range(first_turn, rounds + 1):
            for case in cases:
                between()
                self._runs += 1
                timed = case.run(self._runs)
                which = f"round {turn} of {rounds}" if turn else "warming up"
                progress(f"{which}: {case.name}: {timed.tokens_per_s:.1f} tokens/s")
                if turn:
                    self.runs.setdefault(case.name, []).append(timed)

    def ratio(self, ours: str, other: str) -> float:
        """Return a case's throughput over another's: the median of the rounds' ratios."""
        pairs = zip(self.runs[ours], self.runs[other], strict=True)
        return median(run.tokens_per_s / other_run.tokens_per_s for run, other_run in pairs)

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of a report: the median throughput, and the spread from lowest to highest."""
        rows: list[Mapping[str, Any]] = []
        for name, timed in self.runs.items():
            rates = [run.tokens_per_s for run in timed]
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
