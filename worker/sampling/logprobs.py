"""Log probabilities of tokens under the model itself: before bias, penalties, temperature and limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.scheduling.contract import TokenLogprobs

# A long prompt's logits are looked at in parts: float32 copies of all of them may be gigabytes.
_ROWS_AT_ONCE = 64


def token_logprobs(logits: Tensor, ids: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row of the model's logits [rows, vocab], its id's log probability and its `alternatives` likeliest."""
    told: list[TokenLogprobs] = []
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        told += _part(logits[part].float(), ids[part], alternatives[part])
    return told


def _part(scores: Tensor, ids: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprobs]:
    total = scores.logsumexp(-1, keepdim=True)
    own = (scores.gather(-1, torch.tensor(ids, device=scores.device)[:, None]) - total)[:, 0].tolist()
    values, best = scores.topk(min(max(alternatives), scores.shape[-1]), dim=-1)
    likeliest = zip(best.tolist(), (values - total).tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(tokens[:count], logprobs[:count], strict=True)))
        for logprob, (tokens, logprobs), count in zip(own, likeliest, alternatives, strict=True)
    ]
