"""Sampling of one step: the next id of each row that samples, and the log probabilities that requests asked for.

Everything is launched on the device at once and read by the host later: the next step may overwrite the logits, and use
the ids as its inputs, before the host has them. NaN logits or an exception fail their own row only; out of memory fails
no row, and is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from loraplex.contracts.options import TokenLogprobs
from loraplex.worker.engine.device import download, is_out_of_memory, record_event, upload
from loraplex.worker.engine.sampling.adjustments import Adjustments
from loraplex.worker.engine.sampling.sampler import (
    NO_MASKS,
    Draw,
    Masks,
    drawn_scores,
    forbid_ids,
    log_totals,
    sample_with_torch,
)
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine_api import Failure

# Return the log probabilities of tokens, and the vector of a text; called when the step is done on the device.
PendingLogprobs = Callable[[], list[TokenLogprobs]]
PendingVector = Callable[[], tuple[float, ...] | Failure]

# Maximum number of rows of logits that are converted to float32 together: all rows of a long prompt may be gigabytes.
_ROWS_AT_ONCE = 64
_OFF = float("-inf")


def token_logprobs(logits: Tensor, ids: Tensor, alternatives: Sequence[int | tuple[int, ...]]) -> PendingLogprobs:
    """Compute the log probability of each row's id and of its `alternatives`, of logits [rows, vocab].

    These are so many likeliest ids, or the ids that are named. `ids` [rows] int64 are on the same device.
    """
    parts = []
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        parts.append(_part(logits[part].float(), ids[part], alternatives[part]))
    return lambda: [*chain.from_iterable(part() for part in parts)]


def _log_totals(scores: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials [rows, 1] of float32 scores [rows, vocab]."""
    if scores.device.type == "cuda":
        from loraplex.worker.engine.sampling.cuda import log_totals as with_triton  # Triton is there only with CUDA

        return with_triton(scores)[:, None]
    return log_totals(scores)


def _part(scores: Tensor, ids: Tensor, alternatives: Sequence[int | tuple[int, ...]]) -> PendingLogprobs:
    total = _log_totals(scores)
    counts = [one if isinstance(one, int) else len(one) for one in alternatives]
    named = [(row, one) for row, one in enumerate(alternatives) if isinstance(one, tuple)]
    most = max([count for one, count in zip(alternatives, counts, strict=True) if isinstance(one, int)], default=0)
    best = scores.topk(min(most, scores.shape[-1]), dim=-1).indices
    if named:
        best = nn.functional.pad(best, (0, max(0, max(counts) - most)))
        for row, one in named:
            best[row, : len(one)] = upload(one, scores.device, torch.int64)
    own, values = (download(scores.gather(-1, at) - total) for at in (ids[:, None], best))
    best = download(best)
    return lambda: [
        # Tokens that cannot come are no alternatives.
        TokenLogprobs(logprob, tuple(pair for pair in zip(tokens[:count], told[:count], strict=True) if pair[1] > _OFF))
        for (logprob,), tokens, told, count in zip(own.tolist(), best.tolist(), values.tolist(), counts, strict=True)
    ]


_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NAN_LOGITS = Failure("INTERNAL", "NAN_LOGITS", "the model, with this adapter, gave logits that are not numbers")
_SAMPLING_FAILED = Failure("INTERNAL", "SAMPLING_FAILED", "the next token could not be chosen")


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Choose a token id for each row of logits [rows, vocab]: int64 [rows], -1 where a row's logits are NaN.

    A row's result does not depend on the other rows. `logits` become -inf where a row's grammar forbids an id, and are
    not changed otherwise. On CUDA the host does not wait for the result.
    """
    forbid_ids(logits, [draw.allowed for draw in draws])
    if logits.device.type == "cuda":
        from loraplex.worker.engine.sampling.cuda import sample_with_triton  # Triton is there only with CUDA

        return sample_with_triton(logits, draws)
    return sample_with_torch(logits, draws)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The ids of the rows that sample, in order; the ids of rows in `failures` are meaningless.

    `logprobs` has an entry for each id, or is empty where no row asks for them.
    """

    ids: list[int]
    failures: dict[Row, Failure]
    logprobs: list[TokenLogprobs | None]


@dataclass(slots=True)
class InFlight:
    """A launched step. `rows` are those of its batch that sample, `ids` [rows] their ids on the device."""

    batch: Batch
    rows: list[Row]
    ids: Tensor
    failures: dict[Row, Failure]
    host_ids: Tensor
    prompts: list[tuple[Row, PendingLogprobs]]
    logprobs: list[tuple[list[int], PendingLogprobs]]
    vectors: Sequence[tuple[Row, PendingVector]]
    done: torch.cuda.Event | None = field(default=None)

    def collect(self) -> Sampled:
        """Wait for this step, but not for later ones; prompts' log probabilities and vectors go to their sequences."""
        if self.done is not None:
            self.done.synchronize()
        ids = self.host_ids.tolist()
        for row, token in zip(self.rows, ids, strict=True):
            if token < 0:
                self.failures.setdefault(row, _NAN_LOGITS)
        for row, read in self.prompts:
            if row.live:
                row.sequence.prompt_logprobs += read()
        for row, read_vector in self.vectors:
            vector = read_vector()
            if isinstance(vector, Failure):
                self.failures.setdefault(row, vector)
            elif row.live:
                row.sequence.vector = vector
        logprobs: list[TokenLogprobs | None] = [None] * len(ids) if self.logprobs else []
        for places, read in self.logprobs:
            for place, logprob in zip(places, read(), strict=True):
                logprobs[place] = logprob
        return Sampled(ids, self.failures, logprobs)


def launch_sampling(
    logits: Tensor,
    batch: Batch,
    masks: Masks = NO_MASKS,
    vectors: Sequence[tuple[Row, PendingVector]] = (),
) -> InFlight:
    """Sample from logits [wanted, vocab], which has, row by row, prompt positions, then the position that samples.

    `masks` are of the batch's rows with a grammar; `vectors` are read when the step is collected. The host never waits
    for a CUDA device.
    """
    failures = dict(masks.failures)
    rows = [row for row in batch.rows if row.samples]
    prompts: list[tuple[Row, PendingLogprobs]] = []
    if len(rows) < len(logits):
        logits, prompts = _take_prompts(logits, batch, failures)
    # Log probabilities are those before the grammar, which changes the logits.
    unchanged = logits
    if any(row.sequence.spec.logprobs is not None for row in masks.allowed):
        unchanged = logits.clone()
    sampled = _each_alone(lambda part: sample(logits[part], [_draw(row, masks) for row in rows[part]]), rows, failures)
    if len(sampled) == 1 and len(rows) == len(sampled[0][1]):
        ids = sampled[0][1]
    else:
        ids = logits.new_full((len(rows),), -1, dtype=torch.int64)
        for part, chosen in sampled:
            ids[part] = chosen
    logprobs = _logprobs(unchanged, logits, rows, ids, masks, failures)
    return InFlight(batch, rows, ids, failures, download(ids), prompts, logprobs, vectors, record_event(logits.device))


def _take_prompts(
    logits: Tensor, batch: Batch, failures: dict[Row, Failure]
) -> tuple[Tensor, list[tuple[Row, PendingLogprobs]]]:
    """Return the logits of rows that sample [rows, vocab], and the pending log probabilities of prompts."""
    at = 0
    samples = []
    pending = []
    for row in batch.rows:
        positions = row.prompt_positions
        if positions:
            sequence, part = row.sequence, logits[at : at + len(positions)]
            following = sequence.ids[positions.start + 1 : positions.stop + 1]
            counts = [sequence.spec.prompt_logprobs or 0] * len(positions)
            try:
                pending.append((row, token_logprobs(part, upload(following, logits.device), counts)))
            except Exception as error:
                _fail(row, error, failures)
            at += len(positions)
        if row.samples:
            samples.append(at)
            at += 1
    return logits[upload(samples, logits.device, torch.int64)], pending


def _logprobs(
    raw: Tensor, drawn_from: Tensor, rows: Sequence[Row], ids: Tensor, masks: Masks, failures: dict[Row, Failure]
) -> list[tuple[list[int], PendingLogprobs]]:
    asking = [index for index, row in enumerate(rows) if row.sequence.spec.logprobs is not None]
    if not asking:
        return []

    def launch(part: slice) -> PendingLogprobs:
        index = upload(asking[part], ids.device)
        specs = [rows[place].sequence.spec for place in asking[part]]
        wanted = [spec.logprob_token_ids or spec.logprobs or 0 for spec in specs]
        scores, own = raw[index], ids[index].clamp(min=0)
        if some := [at for at, spec in enumerate(specs) if spec.sampling.processed_logprobs]:
            scores, at = scores.float(), upload(some, ids.device)
            draws = [_draw(rows[asking[part][each]], masks) for each in some]
            scores[at] = drawn_scores(drawn_from[index[at]], draws, own[at])
        return token_logprobs(scores, own, wanted)

    launched = _each_alone(launch, [rows[place] for place in asking], failures)
    return [(asking[part], pending) for part, pending in launched]


def _each_alone(
    launch: Callable[[slice], _T], rows: Sequence[Row], failures: dict[Row, Failure]
) -> list[tuple[slice, _T]]:
    """Launch all rows at once; if that raises, launch each row alone, so that only the failing row ends.

    Raises out-of-memory errors.
    """
    everything = slice(0, len(rows))
    try:
        return [(everything, launch(everything))]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        _log.exception("sampling a batch failed; each row is sampled alone")
    results = []
    for index, row in enumerate(rows):
        part = slice(index, index + 1)
        try:
            results.append((part, launch(part)))
        except Exception as error:
            _fail(row, error, failures)
    return results


def _fail(row: Row, error: Exception, failures: dict[Row, Failure]) -> None:
    """Record the row's failure; raises the error if it means out of memory."""
    if is_out_of_memory(error):
        raise error
    _log.exception("sampling failed for sequence %s", row.sequence.sequence_id)
    failures[row] = _SAMPLING_FAILED


def _draw(row: Row, masks: Masks) -> Draw:
    sequence = row.sequence
    spec = sequence.spec
    adjustments: Adjustments | None = None
    if spec.sampling.adjusts_logits:
        adjustments = sequence.engine_state = sequence.engine_state or Adjustments(
            spec.sampling, sequence.prompt_length
        )
        adjustments.catch_up(sequence.ids)
        adjustments = adjustments.after(row.drafted)
    allowed = masks.allowed.get(row)
    # The mask forbids the banned ids as well, where the grammar allows others.
    banned = row.banned_ids if allowed is None else frozenset[int]()
    return Draw(spec.sampling, spec.choice, row.start + row.count, banned, adjustments, allowed)
