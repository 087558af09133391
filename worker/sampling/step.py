"""What a step's logits give: the next id of every row that samples, and the log probabilities that were asked for.

A row's fault, NaN logits or an exception, ends that row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from worker.sampling.adjustments import Adjustments
from worker.sampling.logprobs import token_logprobs
from worker.sampling.sampler import Draw, sample
from worker.scheduling.batch import Batch, Row
from worker.scheduling.contract import Failure, TokenLogprobs

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NAN_LOGITS = Failure("INTERNAL", "NAN_LOGITS", "the model, with this adapter, gave logits that are not numbers")
_SAMPLING_FAILED = Failure("INTERNAL", "SAMPLING_FAILED", "the next token could not be chosen")


@dataclass(frozen=True, slots=True)
class Sampled:
    """One id for each row that samples, in order; of the sequences in `failures` it means nothing.

    `logprobs` has an entry for each id, or none at all where no row asks for them.
    """

    ids: list[int]
    failures: dict[str, Failure]
    logprobs: list[TokenLogprobs | None]


def sample_step(logits: Tensor, batch: Batch) -> Sampled:
    """Choose from logits [wanted, vocab], in the order of the rows: their prompt positions, then the one that samples.

    What the prompt positions tell is kept in the rows' sequences.
    """
    failures: dict[str, Failure] = {}
    rows = [row for row in batch.rows if row.samples]
    if len(rows) < len(logits):
        logits = _take_prompts(logits, batch, failures)
    chosen = _each_alone(lambda index, few: sample(logits[index], [_draw(row) for row in few]), rows, failures)
    for row, token in zip(rows, chosen, strict=True):
        if token is None:
            failures.setdefault(row.sequence.sequence_id, _NAN_LOGITS)
    ids = [token or 0 for token in chosen]
    return Sampled(ids, failures, _logprobs(logits, rows, ids, failures))


def _take_prompts(logits: Tensor, batch: Batch, failures: dict[str, Failure]) -> Tensor:
    """Keep what the logits tell of prompts; those of the rows that sample are left [rows, vocab]."""
    at = 0
    samples = []
    for row in batch.rows:
        positions = row.prompt_positions
        if positions:
            sequence, part = row.sequence, logits[at : at + len(positions)]
            following = sequence.ids[positions.start + 1 : positions.stop + 1]
            counts = [sequence.spec.prompt_logprobs or 0] * len(positions)
            try:
                sequence.prompt_logprobs += token_logprobs(part, following, counts)
            except Exception:
                _fail(row, failures)
            at += len(positions)
        if row.samples:
            samples.append(at)
            at += 1
    return logits[samples]


def _logprobs(
    logits: Tensor, rows: list[Row], ids: list[int], failures: dict[str, Failure]
) -> list[TokenLogprobs | None]:
    asking = [index for index, row in enumerate(rows) if row.sequence.spec.logprobs is not None]
    if not asking:
        return []
    told: list[TokenLogprobs | None] = [None] * len(rows)

    def tell(part: slice, few: list[Row]) -> list[TokenLogprobs | None]:
        counts = [row.sequence.spec.logprobs or 0 for row in few]
        return [*token_logprobs(logits[asking[part]], [ids[index] for index in asking[part]], counts)]

    for index, one in zip(asking, _each_alone(tell, [rows[index] for index in asking], failures), strict=True):
        told[index] = one
    return told


def _each_alone(
    choose: Callable[[slice, list[Row]], list[_T | None]], rows: list[Row], failures: dict[str, Failure]
) -> list[_T | None]:
    """`choose` of all rows at once; where that raises, of each row, so that only the one at fault ends."""
    try:
        return choose(slice(0, len(rows)), rows)
    except Exception:
        _log.exception("sampling a batch failed; each row is sampled alone")
    results: list[_T | None] = []
    for index, row in enumerate(rows):
        try:
            results += choose(slice(index, index + 1), [row])
        except Exception:
            _fail(row, failures)
            results.append(None)
    return results


def _fail(row: Row, failures: dict[str, Failure]) -> None:
    _log.exception("sampling failed for sequence %s", row.sequence.sequence_id)
    failures[row.sequence.sequence_id] = _SAMPLING_FAILED


def _draw(row: Row) -> Draw:
    sequence = row.sequence
    spec = sequence.spec
    adjustments: Adjustments | None = None
    if spec.sampling.adjusts_logits:
        adjustments = sequence.engine_state = sequence.engine_state or Adjustments(
            spec.sampling, sequence.prompt_length
        )
        adjustments.catch_up(sequence.ids)
    return Draw(spec.sampling, spec.choice, row.start + row.count, sequence.banned_ids(), adjustments)
