"""How many prompt tokens a step takes beside its decodes, from how long steps have taken.

Whoever decodes beside a long prompt gets its tokens as slowly as the steps are long. So what a step is going to take is
reckoned from its rows, with costs that are learned from the steps before it:

    step    = decodes + chunks
    decodes = step's own + rows + positions that they see
    chunks  = chunks' own + tokens + positions that the tokens see + positions that are read for them

and chunks get the time that is left of a target, a multiple of what the decodes' own steps have been taking. Where
nobody decodes, nobody waits for a token, and step_tokens and the bound on a step's time are all that limits it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from math import exp, log, sqrt
from operator import mul
from statistics import median

from worker.engine.scheduling.batch import Batch, Row

# Among decodes a step aims at so many times as long as one without a prompt, and one more for every other prompt. The
# promise is 2.5 (docs/benchmarks.md); the distance is for noise: of hundreds of steps one takes half as long again.
_STRETCH = 1.75
# So many times as long it may be where a prompt that begins is done with in it: one longer gap, and then one more row
# that makes tokens, rather than several stretched ones. 64 tokens take a large model on a CPU three steps' time.
_WHOLE_STRETCH = 5.0
# Chunks get at least so many times what a step's decodes take, though these take longer than they did.
_LEAST_SHARE = 0.35
# Steps are reckoned to stay below this, because 0.5 s is what liveness allows.
_LONGEST_STEP_S = 0.4
# How many tokens the first chunks of all get, while nothing is known.
_FIRST_TOKENS = 64
# A step's chunks get at least so many times what it costs that there is one, or decodes would wait for next to no
# prefill: on CUDA a step with a chunk is no longer one graph, and alone that may be more than the aim.
_LEAST_USE = 1.5
# A step's first chunk is at least this, so that a prompt always advances. Longer ones are multiples of it: mkldnn makes
# a kernel for every number of tokens that it meets, which costs the first step that has it 1 to 2 ms. From 32 tokens
# on a chunk's attention is products of matrices, which in multiples of 16 are up to twice as fast.
_GRAIN = 4
_UNROUNDED = 16
_LONG, _LONG_GRAIN = 32, 16
# So many steps with decodes, one after the other, may have a chunk; then one has none and tells what decodes take.
_UNMEASURED_STEPS = 32
# Of how many decodes' own steps the median is what decodes are used to.
_REMEMBERED_STEPS = 15
# Of a step's time its chunks are taken to have had this, though its decodes should have taken longer than all of it.
_LEAST_REMAINDER = 0.1
# What a step is taken to last, though the clock did not move.
_SHORTEST_S = 1e-6
# The logarithm of how much longer or shorter a step takes than was reckoned counts for no more than this: it is a
# hiccup of the machine, or else seen again.
_MOST_ERROR = log(2)
# Decodes that were so far off are measured again in the next step, so many times at most.
_SURPRISE, _MOST_MEASURED = log(1.4), 4
# Variances of the costs' logarithms: of all together and of each alone, at first and what a step adds; what an error
# adds, times its square, so that all is learned again from a machine that has changed; of a step's time; and at most.
_SCALE_VARIANCE, _SHAPE_VARIANCE, _SCALE_DRIFT, _SHAPE_DRIFT = 1.0, 1.0, 1e-3, 1e-4
_ERROR_DRIFT, _NOISE_VARIANCE, _MOST_VARIANCE = 0.1, 0.02, 2.0

# Of what a first step took: its own part, a row, a position seen. And for a chunk: its own part, a token, a position
# that a token sees, a position that is read for all of the chunk's tokens. Measured on CPUs, 28 M to 0.4 B parameters.
_DECODE_SHAPE = (1.0, 0.02, 0.0001)
_CHUNK_SHAPE = (8.0, 1.0, 1 / 1500, 1 / 250)


class ChunkSizer:
    """Learns what steps cost, and says how much prompt fits into the next one. O(rows) a step."""

    def __init__(self) -> None:
        self._decodes = _Costs(_DECODE_SHAPE)
        self._chunks = _Costs(_CHUNK_SHAPE)
        self._decode_steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        # Steps since one without a chunk; and of these how many were to measure, one after the other.
        self._unmeasured = 0
        self._measured = 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step with this batch has taken so long."""
        decodes = _decode_load([row.start for row in batch.rows[: batch.decodes]])
        if batch.decodes == len(batch.rows):
            self._decodes.learn(decodes, seconds)
            self._decode_steps.append(seconds)
            self._unmeasured = _UNMEASURED_STEPS if abs(self._decodes.error) > _SURPRISE else 0
        else:
            taken = self._decodes.seconds(decodes) if batch.decodes else 0.0
            chunks = max(seconds - taken, _LEAST_REMAINDER * seconds)
            self._chunks.learn(_chunk_load(batch.rows[batch.decodes :]), chunks)

    def budget(self, tokens: int, decodes: Ids[int], prompts: int) -> ChunkBudget:
        """What the chunks of a step may take, at most so many tokens, while so many prompts want to be prefilled.

        `decodes` are the positions of the sequences that decode meanwhile.
        """
        if not self._chunks.known:
            tokens = min(tokens, _FIRST_TOKENS)
        if not decodes:
            return ChunkBudget(tokens, self._chunks, _LONGEST_STEP_S, _LONGEST_STEP_S, _LONGEST_STEP_S)
        if not prompts:
            return ChunkBudget(0)
        if not self._decode_steps or (self._unmeasured >= _UNMEASURED_STEPS and self._measured < _MOST_MEASURED):
            self._unmeasured = 0
            self._measured += 1
            return ChunkBudget(0)
        self._unmeasured = self._unmeasured % _UNMEASURED_STEPS + 1
        self._measured = 0
        now = self._decodes.seconds(_decode_load(decodes))
        # Rows that wait for their prefill make no tokens: each but one may take as long as a step of decodes.
        stretch = _STRETCH + prompts - 1
        usual = min(median(self._decode_steps), now)
        spare = max(stretch * usual - now, _LEAST_SHARE * now)
        longest = _LONGEST_STEP_S - now
        return ChunkBudget(tokens, self._chunks, spare, min(max(spare, _WHOLE_STRETCH * usual - now), longest), longest)


class ChunkBudget:
    """What is left of a step for chunks: `tokens`, and, where costs are given, seconds.

    A prompt that begins and ends in it may take `whole` seconds. The first chunk may take more than `seconds`, up to
    `longest`, where too few of them were for its tokens.
    """

    def __init__(
        self, tokens: int, costs: _Costs | None = None, seconds: float = 0.0, whole: float = 0.0, longest: float = 0.0
    ) -> None:
        self._tokens = max(0, tokens)
        self._costs = costs
        self._seconds = seconds
        self._whole = whole
        self._longest = longest
        self._begun = False

    @property
    def any(self) -> bool:
        """Whether a chunk might get anything."""
        if self._tokens == 0 or self._costs is None or not self._begun:
            return self._tokens > 0
        return self._costs.seconds(_load(0, _GRAIN, own=False)) <= max(self._seconds, self._whole)

    def take(self, start: int, wanted: int, *, begins: bool) -> int:
        """How many tokens of a sequence are computed from position `start` on; `begins`: none of them were before.

        0 only where another goes before it; nobody gets anything after it.
        """
        most = min(wanted, self._tokens)
        count = most if self._costs is None else self._fitting(self._costs, start, wanted, most, begins=begins)
        self._tokens -= count or self._tokens
        if self._costs and count:
            seconds = self._costs.seconds(_load(start, count, own=not self._begun))
            self._seconds -= seconds
            self._whole -= seconds
            self._begun = True
        return count

    def _fitting(self, costs: _Costs, start: int, wanted: int, most: int, *, begins: bool) -> int:
        if begins and most == wanted and costs.seconds(_load(start, wanted, own=not self._begun)) <= self._whole:
            return wanted
        seconds = min(self._seconds, self._longest)
        if not self._begun:
            own = costs.seconds((1.0, 0.0, 0.0, 0.0))
            seconds = min(max(seconds, _LEAST_USE * own), self._longest)
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if costs.seconds(_load(start, middle, own=not self._begun)) <= seconds:
                low = middle
            else:
                high = middle - 1
        count = low if low == wanted or low < _UNROUNDED else low - low % (_GRAIN if low < _LONG else _LONG_GRAIN)
        return count if self._begun else max(count, min(_GRAIN, most))


class StepTimer:
    """How long each step takes of those that are launched one after the other, perhaps before the last is collected."""

    def __init__(self) -> None:
        self._launches: deque[float] = deque()
        self._collected = 0.0

    def launched(self, at: float) -> None:
        """One more, at this time."""
        self._launches.append(at)

    def collected(self, at: float) -> float:
        """Seconds of the oldest of those that were launched: since then, or since the one before it was done."""
        began = max(self._launches.popleft(), self._collected)
        self._collected = at
        return at - began


class _Costs:
    """What each unit of a load costs, in seconds. A load is a number of units of each kind.

    A Kalman filter over the logarithms of the costs: their covariance says which of them an error is due to. A first
    step tells the scale of all; later ones tell the costs apart, and follow the machine's speed, which changes all.
    """

    def __init__(self, shape: tuple[float, ...]) -> None:
        self._units = list(shape)
        kinds = range(len(shape))
        self._covariance = [[_SCALE_VARIANCE + _SHAPE_VARIANCE * (i == j) for j in kinds] for i in kinds]
        self.known = False
        # Of the last load, as a logarithm.
        self.error = 0.0

    def seconds(self, load: tuple[float, ...]) -> float:
        """What this load is going to take; 0 while nothing is known."""
        return sum(map(mul, self._units, load)) if self.known else 0.0

    def learn(self, load: tuple[float, ...], seconds: float) -> None:
        """Take in that this load has taken so long."""
        seconds = max(seconds, _SHORTEST_S)
        expected = sum(map(mul, self._units, load))
        if not self.known:
            self.known = True
            self._units = [unit * seconds / expected for unit in self._units]
            expected = seconds
        parts = [unit * amount / expected for unit, amount in zip(self._units, load, strict=True)]
        towards = [sum(map(mul, line, parts)) for line in self._covariance]
        variance = sum(map(mul, towards, parts)) + _NOISE_VARIANCE
        self.error = max(-_MOST_ERROR, min(log(seconds / expected), _MOST_ERROR))
        self._units = [
            unit * exp(self.error / variance * share) for unit, share in zip(self._units, towards, strict=True)
        ]
        drift = _SCALE_DRIFT + _ERROR_DRIFT * self.error**2
        for i, line in enumerate(self._covariance):
            for j, value in enumerate(line):
                line[j] = value - towards[i] * towards[j] / variance + drift + _SHAPE_DRIFT * (i == j)
        # What steps do not tell gets no more uncertain than this, or the first that does would change it altogether.
        shrink = [min(1.0, sqrt(_MOST_VARIANCE / line[i])) for i, line in enumerate(self._covariance)]
        for i, line in enumerate(self._covariance):
            for j in range(len(line)):
                line[j] *= shrink[i] * shrink[j]


def _decode_load(positions: Ids[int]) -> tuple[float, ...]:
    return 1.0, len(positions), sum(positions)


def _chunk_load(rows: Iterable[Row]) -> tuple[float, ...]:
    loads = [_load(row.start, row.count, own=False) for row in rows]
    return 1.0, *(sum(amounts) for amounts in list(zip(*loads, strict=True))[1:])


def _load(start: int, count: int, *, own: bool) -> tuple[float, ...]:
    """A chunk's load; `own` where it is its step's first."""
    return float(own), count, count * start + count * (count + 1) / 2, start + count
