"""Log probabilities of tokens under the model itself: before bias, penalties, temperature and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor

from worker.engine.device.transfer import download
from worker.engine_api import TokenLogprobs

# To be called when the device has come so far.
PendingLogprobs = Callable[[], list[TokenLogprobs]]

# A long prompt's logits are looked at in parts: float32 copies of all of them may be gigabytes.
_ROWS_AT_ONCE = 64


def token_logprobs(logits: Tensor, ids: Tensor, alternatives: Sequence[int]) -> PendingLogprobs:
    """Of each row of the model's logits [rows, vocab], its id's log probability and its `alternatives` likeliest.

    `ids` [rows] int64 lie on the same device.
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
