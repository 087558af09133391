"""How long drafts are: as long as a step's tokens per second rise, by measured times and acceptance."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median_low

# Minimum and maximum number of the latest steps that tell a time: the first of its kind records calls.
_FEWEST, _LATEST = 2, 7
# Number of steps after which a time is measured anew, and of steps with drafts after which one without is measured.
_OUTDATED, _PLAIN_EVERY = 256, 32
# Factor of a longer time with fewer rows from which both are measured, in turn.
_DELAYED = 1.5
# Maximum number of ids that are tried where outdated times say that none pay, and where more rows were never measured.
_TRIED, _MORE = 4, 8
# Minimum gain of drafts over none, as a factor: times are not that exact.
_LEAST_GAIN = 1.1
# Weight that an acceptance keeps with each id that was checked: the last 50 count most.
_KEPT = 0.98
# Number of checked ids that the first guess of an acceptance counts as.
_FIRST_WEIGHT = 3.0


class Acceptance:
    """The probability that an id of a draft is the next one, as a decaying average."""

    def __init__(self, first: float) -> None:
        self._accepted, self._checked = first * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def rate(self) -> float:
        """Return the probability."""
        return self._accepted / self._checked

    def learn(self, checked: int, accepted: int) -> None:
        """Count ids that were checked, each of which followed right ones only."""
        kept = _KEPT**checked
        self._checked = self._checked * kept + checked
        self._accepted = self._accepted * kept + accepted


class StepTimes:
    """The seconds of the latest steps by their number of rows, of which delayed ones change no time that is told."""

    def __init__(self) -> None:
        # By number of rows: the latest, and the number of the last one of all steps.
        self._latest: dict[int, tuple[deque[float], int]] = {}

    def observe(self, rows: int, seconds: float, step: int) -> None:
        """Learn from a step."""
        latest, last = self._latest.get(_size(rows), ((), 0))
        self._latest[_size(rows)] = deque([*latest, seconds] if step - last <= _OUTDATED else [seconds], _LATEST), step

    def measured(self, rows: int, step: int) -> float | None:
        """Return the lower quartile for so many rows; None unless it has been measured lately."""
        latest, last = self._latest.get(_size(rows), ((), 0))
        return sorted(latest)[len(latest) // 4] if len(latest) >= _FEWEST and step - last <= _OUTDATED else None

    def above(self, rows: int) -> list[tuple[int, float]]:
        """Return larger numbers of rows that were measured, in order, with times that are no longer than of more."""
        sizes = [size for size, (latest, _) in self._latest.items() if size > rows and len(latest) >= _FEWEST]
        sizes.sort(reverse=True)
        times = accumulate((median_low(self._latest[size][0]) for size in sizes), min)
        return [*zip(sizes, times, strict=True)][::-1]


def _size(rows: int) -> int:
    """Return the number of rows that others count as: exact up to 32, then multiples of 8."""
    return rows if rows <= 32 else -(-rows // 8) * 8


class Gain:
    """The measured times of steps of decodes alone, without drafts and with them.

    Where the engine steps ahead without drafts, those with drafts are longer by the host's work.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = StepTimes(), StepTimes()
        # Numbers of all steps, and of the last with drafts; by rows, of those with drafts since the last without.
        self._steps = self._drafted = 0
        self._since_plain: Counter[int] = Counter()

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Learn from a step of `rows` rows and `drafted` ids of drafts."""
        self._steps += 1
        self._drafted = self._steps if drafted else self._drafted
        self._since_plain[_size(rows)] = self._since_plain[_size(rows)] + 1 if drafted else 0
        (self._drafting if drafted else self._plain).observe(rows + drafted, seconds, self._steps)

    def lengths(self, rows: int, free: int, drafts: Sequence[tuple[int, float]]) -> list[int]:
        """Return how many ids of each draft give most tokens per second beside `rows` rows: 0 of all without a gain.

        `drafts` are their lengths, and the probability that an id of one is right where those before it are.
        """
        counts = [0] * len(drafts)
        # Without drafts a step is measured now and then: it is what the others are compared with.
        seconds = self._plain.measured(rows, self._steps)
        if seconds is None or self._since_plain[_size(rows)] >= _PLAIN_EVERY:
            return counts
        above = self._drafting.above(rows)
        # More rows take no less: steps without drafts were delayed, or all steps take longer by now.
        least = min([seconds, *(time for _, time in above)])
        if seconds > _DELAYED * least and self._drafted == self._steps:
            return counts
        ids = [(rate**at, -at, index) for index, (length, rate) in enumerate(drafts) for at in range(1, length + 1)]
        ids.sort(reverse=True)
        tried = _TRIED if self._steps - self._drafted >= _OUTDATED else 0
        known = [(rows, least), *above]
        best, kept, tokens = _LEAST_GAIN * rows / least, 0, float(rows)
        for count, (probability, *_) in enumerate(ids[: min(free, known[-1][0] + _MORE - rows)], 1):
            tokens += probability
            took = least if count <= tried else max(least, _between(known, rows + count))
            if tokens / took > best:
                best, kept = tokens / took, count
        for _, _, index in ids[:kept]:
            counts[index] += 1
        return counts


def _between(known: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the time of so many rows, by the line between fewer and more, or through the fewest and the most."""
    above = bisect_left(known, (rows, 0.0))
    (low, seconds), (high, other) = (known[above - 1], known[above]) if above < len(known) else (known[0], known[-1])
    return seconds if low == high else seconds + (other - seconds) * (rows - low) / (high - low)
