"""The number of prompt tokens that a step computes beside its decodes, from the measured times of earlier steps.

The gaps between an answer's tokens are as long as the steps, prompts included. The target is a time between tokens that
a reader of the stream does not feel; within it a prompt's chunk is as large as fits. The time of a step is predicted
from its rows, with unit costs that are learned from earlier steps:

    step    = decodes + chunks
    decodes = fixed + rows + positions that they attend to
    chunks  = fixed + tokens + positions that the tokens attend to + positions that are read for them

Where the CPU computes, times are the threads' mean processor time: beside other work gaps are longer, by what that
takes. Chunks sized by the wall clock were so small there that the fixed costs of steps took most of the processor.

Where the decodes alone take about as long as the target, chunks get a multiple of the decodes' time. Without decodes
nobody waits for a token, and only step_tokens and the maximum time of a step limit the chunks.

Comments say what happened without a constant on the simulated machines of tests/worker/engine/test_chunk_sizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from math import exp, log
from operator import mul

from loraplex.worker.engine.scheduling.batch import Batch, Row

# Predicted time of a step with a chunk, as a share of the target: one step in a hundred takes 1.3 times as long as
# predicted where nothing else runs on the machine, and the target is for all but one gap in a hundred.
_AIMED_SHARE = 0.7
# Minimum time of a step with a chunk, as a multiple of its decodes' time, where that is longer than the aim.
_STRETCH = 1.75
# Maximum predicted time of a step, in seconds: liveness allows 0.5.
_LONGEST_STEP_S = 0.4
# Maximum tokens of a process's first chunks, while their cost is unknown: more of a large model's might take longer
# than liveness allows.
_FIRST_TOKENS = 64
# Minimum time of a step's chunks, as a multiple of the chunks' fixed cost. On CUDA a step with a chunk is no graph;
# its fixed cost alone may exceed the target. Without: 4 tokens a step on a simulated GPU.
_LEAST_USE = 1.5
# Minimum tokens of a step's first chunk, so that a prompt always advances, and the divisor of the other chunks: the
# kernels' calls are recorded for each number of tokens up to 64, which takes 2 ms in the step that has it first.
_LEAST_CHUNK = 4
# Maximum number of consecutive steps with decodes and a chunk; the next step has no chunk, and measures the decodes.
# Without: gaps longer than promised, since the decodes' costs get outdated.
_UNMEASURED_STEPS = 32
# Minimum share of a step's time that counts as its chunks' where its decodes were predicted to take all: without,
# the time of the chunks would have no logarithm.
_LEAST_REMAINDER = 0.1
# Maximum prediction error that a step's costs are corrected by, as a logarithm. Without: after slow first steps, chunks
# are half as long as they should be for a whole prompt, and gaps of a machine that gets slower are too long.
_MOST_ERROR = log(2)
# Variances of logarithms, relative to 1 for the costs at the start: of a measured time, and per squared error added to
# the costs'. Without the first, gaps follow single steps' noise; without the other, a slow first step is not forgotten.
_NOISE_VARIANCE, _ERROR_DRIFT = 0.02, 0.1

# Unit costs before the first step, relative to each other. Decodes: fixed, a row, a position. Chunks: fixed, a token, a
# position that a token attends to, a position that is read for all of the chunk's tokens. Measured on CPUs with models
# of 28 M to 0.4 B parameters.
_DECODE_SHAPE = (1.0, 0.02, 0.0001)
_CHUNK_SHAPE = (8.0, 1.0, 1 / 1500, 1 / 250)


class ChunkSizer:
    """Learns the unit costs of steps, and tells how many prompt tokens fit into the next one. O(rows) per step.

    `target_s` is the time between an answer's tokens, in seconds, that 99 of 100 gaps beside a prompt keep within.
    """

    def __init__(self, target_s: float) -> None:
        self._aim_s = _AIMED_SHARE * target_s
        self._decodes = _Costs(_DECODE_SHAPE)
        self._chunks = _Costs(_CHUNK_SHAPE)
        # Steps with chunks beside decodes since the last step of decodes alone.
        self._unmeasured = 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step's measured time."""
        if seconds <= 0:  # the clock did not move
            return
        decodes = _decode_load([row.start for row in batch.rows[: batch.decodes]])
        if batch.decodes == len(batch.rows):
            self._decodes.learn(decodes, seconds)
            self._unmeasured = 0
        else:
            decode_s = self._decodes.seconds(decodes) if batch.decodes else 0.0
            chunk_s = max(seconds - decode_s, _LEAST_REMAINDER * seconds)
            self._chunks.learn(_chunk_load(batch.rows[batch.decodes :]), chunk_s)

    def budget(self, tokens: int, decodes: Ids[int], prompts: int) -> ChunkBudget:
        """Return what the chunks of the next step may take, at most `tokens`, with `prompts` to be prefilled.

        `decodes` are the positions of the sequences that decode in the step.
        """
        if not self._chunks.known:
            tokens = min(tokens, _FIRST_TOKENS)
        if not decodes:
            return ChunkBudget(tokens, self._chunks, _LONGEST_STEP_S)
        if not prompts:
            return ChunkBudget(0)
        if not self._decodes.known or self._unmeasured >= _UNMEASURED_STEPS:
            self._unmeasured = 0
            return ChunkBudget(0)
        self._unmeasured += 1
        decode_s = self._decodes.seconds(_decode_load(decodes))
        # Rows that wait for their prefill make no tokens: where the target cannot be kept, each prompt adds as much.
        over_s = max(0.0, _STRETCH * decode_s - self._aim_s)
        spare_s = self._aim_s + prompts * over_s - decode_s
        least_s = _LEAST_USE * self._chunks.seconds((1.0, 0.0, 0.0, 0.0))
        return ChunkBudget(tokens, self._chunks, min(max(spare_s, least_s), _LONGEST_STEP_S - decode_s))


class ChunkBudget:
    """The tokens left for the chunks of a step, and, where costs are given, the seconds left."""

    def __init__(self, tokens: int, costs: _Costs | None = None, seconds: float = 0.0) -> None:
        self._tokens = self._limit = max(0, tokens)
        self._taken = 0
        self._costs = costs
        self._seconds = seconds
        self._begun = False

    def room_for(self, chunks: int) -> bool:
        """Return whether each of so many further chunks might get a token."""
        if self._tokens < chunks or self._costs is None or (chunks == 1 and not self._begun):
            return self._tokens >= chunks
        least_s = self._costs.seconds(_load(0, _LEAST_CHUNK, fixed=False))
        fixed_s = 0.0 if self._begun else self._costs.seconds((1.0, 0.0, 0.0, 0.0))
        return fixed_s + chunks * least_s <= self._seconds

    def split(self, parts: int) -> ChunkBudget:
        """Set one of `parts` equal parts aside; `join` takes back what is left of it."""
        part = ChunkBudget(-(-self._tokens // parts), self._costs, self._seconds / parts)
        part._begun = self._begun
        self._tokens -= part._tokens
        self._seconds -= part._seconds
        return part

    def join(self, part: ChunkBudget) -> None:
        """Take back what is left of a part that was set aside."""
        self._tokens += part._limit - part._taken
        self._seconds += part._seconds
        self._begun = part._begun

    def take(self, start: int, asked: int) -> int:
        """Take the tokens of a sequence's chunk from position `start` on, at most `asked`, and return their number.

        The first chunk gets at least one token; after a chunk of 0 tokens nothing is left.
        """
        most = min(asked, self._tokens)
        count = most if self._costs is None else self._fitting(self._costs, start, asked, most)
        self._tokens -= count or self._tokens
        self._taken += count
        if self._costs and count:
            self._seconds -= self._costs.seconds(_load(start, count, fixed=not self._begun))
            self._begun = True
        return count

    def _fitting(self, costs: _Costs, start: int, asked: int, most: int) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if costs.seconds(_load(start, middle, fixed=not self._begun)) <= self._seconds:
                low = middle
            else:
                high = middle - 1
        count = low if low == asked else low - low % _LEAST_CHUNK
        return count if self._begun else max(count, min(_LEAST_CHUNK, most))


class _Costs:
    """The unit costs of a load, in seconds; a load is the number of units of each kind.

    They are learned by a Kalman filter over the costs' logarithms, whose covariance tells which costs an error is due
    to. The first step gives the scale of all; later ones tell the costs apart and follow changes of the speed.
    """

    def __init__(self, shape: tuple[float, ...]) -> None:
        self._units = list(shape)
        kinds = range(len(shape))
        # One variance for all costs together, and one for each alone.
        self._covariance = [[1.0 + (i == j) for j in kinds] for i in kinds]
        self.known = False

    def seconds(self, load: tuple[float, ...]) -> float:
        """Predict the time of a load; 0 before the first step."""
        return sum(map(mul, self._units, load)) if self.known else 0.0

    def learn(self, load: tuple[float, ...], seconds: float) -> None:
        """Learn from a load's measured time."""
        expected = sum(map(mul, self._units, load))
        if not self.known:
            self.known = True
            self._units = [unit * seconds / expected for unit in self._units]
            expected = seconds
        shares = [unit * amount / expected for unit, amount in zip(self._units, load, strict=True)]
        towards = [sum(map(mul, line, shares)) for line in self._covariance]
        variance = sum(map(mul, towards, shares)) + _NOISE_VARIANCE
        error = max(-_MOST_ERROR, min(log(seconds / expected), _MOST_ERROR))
        self._units = [unit * exp(error / variance * part) for unit, part in zip(self._units, towards, strict=True)]
        drift = _ERROR_DRIFT * error**2
        for i, line in enumerate(self._covariance):
            for j, value in enumerate(line):
                line[j] = value - towards[i] * towards[j] / variance + drift


def _decode_load(positions: Ids[int]) -> tuple[float, ...]:
    return 1.0, len(positions), sum(positions)


def _chunk_load(rows: Iterable[Row]) -> tuple[float, ...]:
    loads = [_load(row.start, row.count, fixed=False) for row in rows]
    return 1.0, *(sum(amounts) for amounts in list(zip(*loads, strict=True))[1:])


def _load(start: int, count: int, *, fixed: bool) -> tuple[float, ...]:
    """Return a chunk's load; `fixed` for the first of its step, which includes the fixed cost of all."""
    return float(fixed), count, count * start + count * (count + 1) / 2, start + count
