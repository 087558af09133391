"""Choosing the next token of each row by its own parameters: greedy, or seeded sampling within its limits.

    logits ──▶ grammar ──▶ adjustments ──▶ greedy: the best
                                      └──▶ / temperature ──▶ limits ──▶ + noise of (seed, choice, position): the best

A batch of plain greedy rows costs one pass over the logits, with grammars one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from worker.engine.device.transfer import upload
from worker.engine.sampling.adjustments import Adjustments, adjust_logits
from worker.engine.sampling.allowed import forbid_ids
from worker.engine.sampling.limits import limits_likeliest, mask_atypical, smallest_kept
from worker.engine.sampling.noise import gumbel_noise, row_key
from worker.engine_api import Sampling

# Numbers of likeliest tokens that are sorted: for a small top_k, and for any other limit. Where they are too few for a
# row (a flat distribution and a high top_p), the number is multiplied by _WIDER until they suffice.
_FEW = 128
_LIKELY = 1024
_WIDER = 8
# Bounds of the temperature, which keep a float32 difference of logits divided by it finite.
_COLDEST, _HOTTEST = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of one row's draw besides its logits. `position` is the token's position in its sequence."""

    sampling: Sampling
    choice: int
    position: int
    banned_ids: frozenset[int] = frozenset()
    adjustments: Adjustments | None = None
    # The ids that the answer's grammar allows: a bit for each, int32 [words]; None: all.
    allowed: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class _Look:
    """The limits of a row, and the number of likeliest tokens sorted for them; width 0 where no limit applies."""

    width: int
    likely: bool = False
    typical: bool = False


def sample(logits: Tensor, draws: Sequence[Draw], *, wait: bool = True) -> Tensor:
    """Choose a token id for each row of logits [rows, vocab]: int64 [rows], -1 where a row's logits are NaN.

    A row's result does not depend on the other rows. `logits` become -inf where a row's grammar forbids an id, and are
    not changed otherwise. Without `wait` the host never waits for the device, at the cost of sorting all tokens of rows
    with limits: whether fewer suffice is known on the device.
    """
    forbid_ids(logits, [draw.allowed for draw in draws])
    best, chosen = logits.max(dim=-1)
    # max returns NaN if there is any; where all logits are -inf there is nothing to choose from either.
    usable = best.isfinite()
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    adjusted = [
        row
        for row, draw in enumerate(draws)
        if not draw.sampling.temperature > 0 and (draw.adjustments or draw.banned_ids)
    ]
    if random or adjusted:
        index = upload(random + adjusted, logits.device)
        some = [draws[row] for row in random + adjusted]
        scores = logits[index].float()
        adjust_logits(scores, [draw.adjustments for draw in some], [draw.banned_ids for draw in some])
        best, picked = scores.max(dim=-1)
        usable[index] &= best.isfinite()
        if random:
            count = len(random)
            # The largest is subtracted first, so that a tiny temperature does not make finite logits infinite.
            picked[:count] = _sample_random(scores[:count].sub_(best[:count, None]), some[:count], wait)
        chosen[index] = picked
    return chosen.masked_fill(~usable, -1)


def _sample_random(scores: Tensor, draws: Sequence[Draw], wait: bool) -> Tensor:
    """Draw an id [rows] from scores [rows, vocab] whose largest is 0; changes the scores."""
    device, vocab = scores.device, scores.shape[-1]
    temperature = upload([min(max(draw.sampling.temperature, _COLDEST), _HOTTEST) for draw in draws], device)
    scores.div_(temperature[:, None])
    keys = [row_key(draw.sampling.seed, draw.choice, draw.position) for draw in draws]
    keys_tensor = upload(keys, device, torch.int32)
    chosen = torch.empty(len(draws), dtype=torch.int64, device=device)
    by_look: dict[_Look, list[int]] = {}
    for row, draw in enumerate(draws):
        look = _look(draw.sampling, vocab)
        by_look.setdefault(look if wait or not look.width else replace(look, width=vocab), []).append(row)
    while by_look:
        look, rows = by_look.popitem()
        index = upload(rows, device)
        ids, decided = _draw_among(scores[index], [draws[row].sampling for row in rows], keys_tensor[index], look)
        chosen[index] = ids
        if look.width in (0, vocab):
            continue
        undecided = [row for row, done in zip(rows, decided.tolist(), strict=True) if not done]
        if undecided:
            wider = replace(look, width=min(look.width * _WIDER, vocab))
            by_look.setdefault(wider, []).extend(undecided)
    return chosen


def _look(sampling: Sampling, vocab: int) -> _Look:
    """Return what to sort for a row; must not depend on other rows, or its result might."""
    likely = limits_likeliest(sampling)
    if sampling.typical_p < 1:
        return _Look(min(_LIKELY, vocab), likely, typical=True)
    if 0 < sampling.top_k <= _FEW // 2:
        return _Look(min(_FEW, vocab), likely)
    return _Look(min(_LIKELY, vocab) if likely else 0, likely)


def _draw_among(scores: Tensor, samplings: Sequence[Sampling], keys: Tensor, look: _Look) -> tuple[Tensor, Tensor]:
    """Draw ids [rows] from scores [rows, vocab]; also return whether `look.width` tokens sufficed [rows]."""
    enough = torch.ones(len(samplings), dtype=torch.bool, device=scores.device)
    if look.likely:
        values, ids = scores.topk(look.width, dim=-1)
        smallest, enough = smallest_kept(scores, values, samplings)
        if not look.typical:
            drawn = values.masked_fill(values < smallest, float("-inf")) + gumbel_noise(keys, ids.int())
            return ids.gather(-1, drawn.max(-1, keepdim=True).indices)[:, 0], enough
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if look.typical:
        scores, decided = mask_atypical(scores, samplings, look.width)
        enough = enough & decided
    every_id = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)[None]
    return (scores + gumbel_noise(keys, every_id)).max(-1).indices, enough
