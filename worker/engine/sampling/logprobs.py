"""Log probabilities of tokens under the model: before bias, penalties, temperature and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor

from worker.engine.device.transfer import download
from worker.engine_api import TokenLogprobs

# Returns the log probabilities; call it when the step is done on the device.
PendingLogprobs = Callable[[], list[TokenLogprobs]]

# Maximum number of rows of logits that are converted to float32 together: all rows of a long prompt may be gigabytes.
_ROWS_AT_ONCE = 64


def token_logprobs(logits: Tensor, ids: Tensor, alternatives: Sequence[int]) -> PendingLogprobs:
    """Compute the log probability of each row's id and of its `alternatives` likeliest ids, of logits [rows, vocab].

    `ids` [rows] int64 are on the same device.
    """
    parts = []
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        parts.append(_part(logits[part].float(), ids[part], alternatives[part]))
    return lambda: [*chain.from_iterable(part() for part in parts)]


def _part(scores: Tensor, ids: Tensor, alternatives: Sequence[int]) -> PendingLogprobs:
    total = scores.logsumexp(-1, keepdim=True)
    values, best = scores.topk(min(max(alternatives), scores.shape[-1]), dim=-1)
    own, values, best = (
        download(part) for part in ((scores.gather(-1, ids[:, None]) - total)[:, 0], values - total, best)
    )
    return lambda: [
        TokenLogprobs(logprob, tuple(zip(tokens[:count], logprobs[:count], strict=True)))
        for logprob, tokens, logprobs, count in zip(
            own.tolist(), best.tolist(), values.tolist(), alternatives, strict=True
        )
    ]
