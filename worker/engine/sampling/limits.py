"""Sampling limits: top_k, top_p, min_p and typical_p, in this order, each of the tokens that the one before kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.device.transfer import upload
from worker.engine_api import Sampling

_OFF = float("-inf")


def limits_likeliest(sampling: Sampling) -> bool:
    """Tell whether `smallest_kept` cuts any token of a row."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)


def smallest_kept(scores: Tensor, values: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Return the smallest score that top_k, top_p and min_p keep [rows, 1], and whether `values` suffice [rows].

    `values` [rows, width] are the largest of scores [rows, vocab], in descending order. Kept are the top_k largest; of
    those the fewest that together reach top_p of their probability (nucleus sampling, Holtzman et al. 2020); and of
    those the ones with at least min_p of the largest's probability (Nguyen et al. 2024). Ties with the smallest kept
    score are kept.
    """
    vocab, width = scores.shape[-1], values.shape[-1]
    top_k = upload([min(sampling.top_k or vocab, vocab) for sampling in samplings], scores.device)[:, None]
    # Where top_p is off, 2 is above any sum, so that rounding does not cut the tail.
    top_p = upload([sampling.top_p if sampling.top_p < 1 else 2.0 for sampling in samplings], scores.device)[:, None]
    min_p = [math.log(sampling.min_p) if sampling.min_p > 0 else _OFF for sampling in samplings]
    ranks = torch.arange(width, device=scores.device)
    among_k = values.masked_fill(ranks >= top_k, _OFF)
    # Probabilities are relative to the top_k tokens, which are all tokens where top_k is off.
    everything = scores.logsumexp(-1, keepdim=True)
    total = torch.where(top_k <= width, among_k.logsumexp(-1, keepdim=True), everything)
    before = (among_k - total).exp_().cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    keep = ((before < top_p) & (ranks < top_k)).sum(-1, keepdim=True)
    smallest = values.gather(-1, keep - 1).maximum(values[:, :1] + upload(min_p, scores.device)[:, None])
    if width == vocab:
        return smallest, torch.ones(len(samplings), dtype=torch.bool, device=scores.device)
    decided = (top_k <= width) | (top_k == vocab)
    # Beyond `values` there may be ties with their smallest.
    return smallest, (decided & (smallest > values[:, -1:]))[:, 0]


def mask_atypical(scores: Tensor, samplings: Sequence[Sampling], width: int) -> tuple[Tensor, Tensor]:
    """Return scores [rows, vocab] with -inf where typical_p cuts, and whether `width` tokens suffice [rows].

    Kept are the tokens whose information is closest to the entropy, the fewest that together reach typical_p of the
    probability (locally typical sampling, Meister et al. 2022), and ties with the last of them.
    """
    mass = upload([sampling.typical_p if sampling.typical_p < 1 else 2.0 for sampling in samplings], scores.device)
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -(logprobs * probabilities).nansum(-1, keepdim=True)
    distance = (-logprobs - entropy).abs_()
    ordered, order = distance.topk(width, dim=-1, largest=False)
    short = (probabilities.gather(-1, order).cumsum_(-1) < mass[:, None]).sum(-1, keepdim=True)
    farthest = ordered.gather(-1, short.clamp(max=width - 1))
    enough = (short < width) | (width == scores.shape[-1])
    return scores.masked_fill(distance > farthest, _OFF), enough[:, 0]
