"""What a run gave, as one process tells another."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.run import simulate


@dataclass(frozen=True)
class Told:
    """What one seed gave, as one process tells another."""

    wrong: str
    ends: dict[str, int]
    fired: list[str]
    numbers: dict[str, float] = field(default_factory=dict)


def tell(seed: int) -> Told:
    """Run a seed."""
    try:
        outcome = simulate(seed)
    except Exception as error:  # the run itself broke: as bad as a broken invariant
        return Told(f"seed {seed}: {type(error).__name__}: {error}", {}, [])
    numbers = {
        "tokens": outcome.tokens,
        "attempts": outcome.attempts,
        "resumes": outcome.resumes,
        "virtual seconds": outcome.seconds,
    }
    wrong = str(outcome) if outcome.wrong else ""
    return Told(
        wrong, {str(end): count for end, count in outcome.ends.items()}, [str(kind) for kind in outcome.fired], numbers
    )
