"""How long drafts are: as long as a step's tokens per second rise, by measured times and acceptance."""

from __future__ import annotations

from collections.abc import Sequence

# Weight of the newest step in a time, and the largest factor by which one step counts as longer or shorter.
_NEWEST, _MOST_FACTOR = 0.15, 1.5
# Steps after which a time is measured anew, and number of steps that make one: the first of its kind records calls.
_OUTDATED, _STEPS = 256, 2
# Minimum gain of drafts over none, as a factor: times are not that exact.
_LEAST_GAIN = 1.05
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
    """The seconds of steps by their number of rows; those not measured are as their neighbours'."""

    def __init__(self) -> None:
        # By number of rows: seconds, number of steps, and the number of the last one of all steps.
        self._times: dict[int, tuple[float, int, int]] = {}

    def observe(self, rows: int, seconds: float, step: int) -> None:
        """Learn from a step."""
        known, count, last = self._times.get(_size(rows), (seconds, 0, step))
        if count < _STEPS or step - last > _OUTDATED:
            # What delays a step makes it longer, nothing makes it shorter.
            known = min(known, seconds) if count == 1 else seconds
            count = count if count < _STEPS else 0
        else:
            known += _NEWEST * (min(max(seconds, known / _MOST_FACTOR), known * _MOST_FACTOR) - known)
        self._times[_size(rows)] = known, count + 1, step

    def measured(self, rows: int, step: int) -> bool:
        """Tell whether steps of so many rows have been measured lately."""
        _, count, last = self._times.get(_size(rows), (0.0, 0, 0))
        return count >= _STEPS and step - last <= _OUTDATED

    def seconds(self, rows: int, step: int) -> float | None:
        """Predict the time of a step; None before the first."""
        size = _size(rows)
        if self.measured(rows, step):
            return self._times[size][0]
        known = [one for one, (_, count, last) in self._times.items() if count >= _STEPS and step - last <= _OUTDATED]
        below = max((one for one in known if one < size), default=None)
        above = min((one for one in known if one > size), default=None)
        if below is None or above is None:
            nearest = below if above is None else above
            return None if nearest is None else self._times[nearest][0]
        low, high = self._times[below][0], self._times[above][0]
        return low + (high - low) * (size - below) / (above - below)


def _size(rows: int) -> int:
    """Return the number of rows that others count as: exact up to 16, then multiples of 8."""
    return rows if rows <= 16 else -(-rows // 8) * 8


class Gain:
    """The measured times of steps of decodes alone, without drafts and with them.

    Where the engine steps ahead without drafts, those with drafts are longer by the host's work.
    """

    def __init__(self) -> None:
        self._plain, self._drafting = StepTimes(), StepTimes()
        self._steps = 0

    def observe(self, rows: int, seconds: float, *, drafts: bool) -> None:
        """Learn from a step."""
        self._steps += 1
        (self._drafting if drafts else self._plain).observe(rows, seconds, self._steps)

    def lengths(self, rows: int, free: int, drafts: Sequence[tuple[int, float]]) -> list[int]:
        """Return how many ids of each draft give most tokens per second beside `rows` rows: 0 of all without a gain.

        `drafts` are their lengths, and the probability that an id of one is right where those before it are.
        """
        counts = [0] * len(drafts)
        # Without drafts a step is measured now and then: it is what the others are compared with.
        if not self._plain.measured(rows, self._steps):
            return counts
        seconds = self._plain.seconds(rows, self._steps)
        assert seconds is not None, "it was measured"
        ids = [
            (rate**place, -place, index)
            for index, (length, rate) in enumerate(drafts)
            for place in range(1, length + 1)
        ]
        ids.sort(reverse=True)
        best, kept, tokens = _LEAST_GAIN * rows / seconds, 0, float(rows)
        for count, (probability, *_) in enumerate(ids[:free], 1):
            tokens += probability
            if (speed := tokens / self._seconds(rows + count, seconds)) > best:
                best, kept = speed, count
        for _, _, index in ids[:kept]:
            counts[index] += 1
        return counts

    def _seconds(self, rows: int, least: float) -> float:
        seconds = self._drafting.seconds(rows, self._steps) or self._plain.seconds(rows, self._steps)
        return max(least, seconds or 0.0)
