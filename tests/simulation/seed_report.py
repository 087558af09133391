"""The result of one seed, small enough to be sent from one process to another."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.run import simulate


@dataclass(frozen=True)
class SeedReport:
    """The result of one seed: `wrong` is empty where every invariant held."""

    wrong: str
    ends: dict[str, int]
    fired: list[str]
    numbers: dict[str, float] = field(default_factory=dict)


def report_seed(seed: int) -> SeedReport:
    """Run a seed; an exception of the run itself is as bad as a broken invariant."""
    try:
        outcome = simulate(seed)
    except Exception as error:
        return SeedReport(f"seed {seed}: {type(error).__name__}: {error}", {}, [])
    numbers = {
        "tokens": outcome.tokens,
        "attempts": outcome.attempts,
        "resumes": outcome.resumes,
        "comparisons of API keys": outcome.keys_compared,
        "virtual seconds": outcome.seconds,
    }
    wrong = str(outcome) if outcome.wrong else ""
    return SeedReport(
        wrong, {str(end): count for end, count in outcome.ends.items()}, [str(kind) for kind in outcome.fired], numbers
    )
