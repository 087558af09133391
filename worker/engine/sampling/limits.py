"""Which tokens may be drawn: top_k, top_p, min_p and typical_p, in this order, each among what the one before left."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.device.transfer import upload
from worker.engine_api import Sampling

_OFF = float("-inf")


def smallest_kept(scores: Tensor, values: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The smallest score that top_k, top_p and min_p keep [rows, 1], and [rows] whether `values` were enough to tell.

    `values` [rows, width] are the largest of scores [rows, vocab], in order. Kept are the top_k largest; of those the
    first ones that together reach top_p of their probability (Holtzman et al. 2020); and of those the ones with min_p
    of the largest's probability (Nguyen et al. 2024). What equals the smallest that is kept is kept too.
    """
    vocab, width = scores.shape[-1], values.shape[-1]
    top_k = upload([min(one.top_k or vocab, vocab) for one in samplings], scores.device)[:, None]
    # Above what any sum reaches where it is off: rounding must not cut the tail.
    top_p = upload([one.top_p if one.top_p < 1 else 2.0 for one in samplings], scores.device)[:, None]
    min_p = [math.log(one.min_p) if one.min_p > 0 else _OFF for one in samplings]
    ranks = torch.arange(width, device=scores.device)
    among_k = values.masked_fill(ranks >= top_k, _OFF)
    # The probability is of the top_k alone, which are all tokens where it is off.
    everything = scores.logsumexp(-1, keepdim=True)
    total = torch.where(top_k <= width, among_k.logsumexp(-1, keepdim=True), everything)
    before = (among_k - total).exp_().cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    keep = ((before < top_p) & (ranks < top_k)).sum(-1, keepdim=True)
    smallest = values.gather(-1, keep - 1).maximum(values[:, :1] + upload(min_p, scores.device)[:, None])
    if width == vocab:
        return smallest, torch.ones(len(samplings), dtype=torch.bool, device=scores.device)
    known = (top_k <= width) | (top_k == vocab)
    # Below the smallest of `values` may lie others that equal it.
    return smallest, (known & (smallest > values[:, -1:]))[:, 0]


def mask_atypical(scores: Tensor, samplings: Sequence[Sampling], width: int) -> tuple[Tensor, Tensor]:
    """Scores [rows, vocab] with -inf where typical_p cuts, and [rows] whether the `width` most typical tell that.

    Kept are the tokens whose information is closest to the entropy, the first ones that together reach typical_p of
    the probability (Meister et al. 2022, locally typical sampling); and what is as close as the last of them.
    """
    mass = upload([one.typical_p if one.typical_p < 1 else 2.0 for one in samplings], scores.device)
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(logprobs * probabilities).nansum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs_()
    ordered, order = distance.topk(width, dim=-1, largest=False)
    short = (probabilities.gather(-1, order).cumsum_(-1) < mass[:, None]).sum(-1, keepdim=True)
    farthest = ordered.gather(-1, short.clamp(max=width - 1))
    enough = (short < width) | (width == scores.shape[-1])
    return scores.masked_fill(distance > farthest, _OFF), enough[:, 0]
