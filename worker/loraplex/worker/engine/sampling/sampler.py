"""Choosing the next token of each row by its own parameters: greedy, or seeded sampling within its limits.

    logits ──▶ grammar ──▶ adjustments ──▶ greedy: the best
                                      └──▶ / temperature ──▶ limits ──▶ + noise of (seed, choice, position): the best

A batch of plain greedy rows costs one pass over the logits, with grammars one more.

    adjustments     + logit_bias ──▶ repetition_penalty ──▶ frequency and presence penalty ──▶ banned ids, and all but
                    allowed_token_ids, to -inf
    limits          top_k, top_p, min_p, top_n_sigma and typical_p, each of the tokens that the one before kept

The repetition penalty (Keskar et al. 2019, CTRL, section 4.1; as in transformers) counts tokens of prompt and answer;
the other two (as OpenAI's API defines them) count the answer's alone, ids of earlier attempts included.

The noise is a pure function of (seed, choice, position, token id), without a generator's state: a row draws the same
noise alone and in any batch, after a preemption, on another worker after a crash, on the CPU and on CUDA.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.device import dtype_name, upload
from loraplex.worker.engine.sampling.adjustments import Adjustments, adjust_logits
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.grammars import GrammarState
from loraplex.worker.engine_api import Failure

if TYPE_CHECKING:
    from llguidance import LLExecutor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Masks:
    """The ids that may come next, of rows with a grammar: a bit for each id, int32 [words]; and rows that fail."""

    allowed: Mapping[Row, np.ndarray]
    failures: Mapping[Row, Failure]


NO_MASKS = Masks({}, {})

# Maximum processor time in seconds that a step looks for what formats force: texts of some four sequences.
_FORCED_S = 0.002


class MaskFiller:
    """Fills masks in threads of its own, which do not hold the interpreter's lock."""

    def __init__(self) -> None:
        # Made when the first sequence with a grammar comes.
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def begin(self, batch: Batch) -> Future[Masks] | None:
        """Begin to fill the masks of a batch, whose ids are all known; None where no row needs one."""
        constrained = [
            (row, grammar)
            for row in batch.rows
            if (grammar := row.sequence.grammar) is not None and row.samples and row.live
        ]
        if not constrained:
            return None
        if self._thread is None or self._executor is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            from llguidance import LLExecutor  # not at the top: without grammars it may be absent

            self._executor = LLExecutor()
        return self._thread.submit(_fill, self._executor, constrained)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _fill(executor: LLExecutor, rows: list[tuple[Row, GrammarState]]) -> Masks:
    words = rows[0][1].vocabulary.words
    masks = np.zeros((len(rows), words), dtype=np.int32)
    matchers = [(grammar.matcher, index) for index, (row, grammar) in enumerate(rows) if not row.place]
    try:
        executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, words * 4, len(rows))
    except Exception:
        _log.exception("the masks of a batch could not be filled: its rows with a grammar fail")
        masks[:] = 0
    allowed: dict[Row, np.ndarray] = {}
    failures: dict[Row, Failure] = {}
    at, looks_s = rows[0][1], _FORCED_S
    for (row, grammar), mask in zip(rows, masks, strict=True):
        if not row.place:
            at = grammar
        else:
            # A copy: a draft must not change the state of the answer, whatever becomes of it.
            at = grammar.copy() if row.place == 1 else at
            if failure := at.advance(row.drafted[-1]):
                failures[row] = failure
                continue
            at.fill(mask)
        at.trim(mask, row.banned_ids)
        if mask.any() and not at.matcher.is_error():
            allowed[row] = mask
            if grammar.looks_for_forced and row.place == len(row.draft) and (row.place or not grammar.forced):
                began = time.thread_time()
                grammar.forced = (*row.draft, *at.forced_ids(mask, began + looks_s))
                looks_s -= time.thread_time() - began
        else:
            failures[row] = at.problem()
    return Masks(allowed, failures)


def forbid_ids(logits: Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Set logits [rows, vocab] in place to -inf where a row's mask, a bit for each id, int32 [words], has none."""
    constrained = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not constrained:
        return
    if logits.device.type == "cpu":
        from loraplex.kernels.logits import apply_masks  # numba is there only where the CPU computes

        rows, bits = zip(*constrained, strict=True)
        apply_masks(logits, rows, bits)
    else:
        forbid_with_torch(logits, masks)


def forbid_with_torch(logits: Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Do the same where at least one row has a mask, on any device; masks are uploaded packed: 16 KiB for 128k ids."""
    everything = np.full_like(next(mask for mask in masks if mask is not None), -1)
    words = upload(np.stack([everything if mask is None else mask for mask in masks]), logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> places) & 1
    logits.masked_fill_(allowed.view(len(masks), -1)[:, : logits.shape[-1]] == 0, float("-inf"))


_KEY = struct.Struct("<QQQ")
_LANES = struct.Struct("<ii")


def row_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Return two signed 32-bit integers, a hash of a position in an answer."""
    digest = hashlib.blake2b(_KEY.pack(seed, choice, position), digest_size=8).digest()
    first, second = _LANES.unpack(digest)
    return first, second


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Compute standard Gumbel noise: keys [rows, 2] int32 and token ids [rows or 1, n] int32 to float32 [rows, n].

    The token with the largest logit plus noise is a draw from softmax(logits) (the Gumbel-max trick).
    """
    bits = _mix(_mix(ids + keys[:, :1]).add_(keys[:, 1:]))
    # 31 bits as a number in (0, 1); small numbers, which give large noise, keep their precision.
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers in place, by a bijection in which each input bit flips about half of the output bits.

    The constants are those of lowbias32 (https://nullprogram.com/blog/2018/07/31/). Shifts are logical: int32 keeps its
    sign bit otherwise.
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


_OFF = float("-inf")


def reduced(reduction: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return the reduction of rows [rows, width], each of which has the same bits alone and among others.

    torch divides the sum of a lone row with more than 32,768 numbers among its threads, and of several rows the rows.
    """
    return reduction(rows) if len(rows) != 1 else reduction(rows.expand(2, -1))[:1]


def log_totals(scores: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials [rows, 1] of scores [rows, vocab]."""
    return reduced(lambda rows: rows.logsumexp(-1, keepdim=True), scores)


def limits_likeliest(sampling: SamplingParams) -> bool:
    """Tell whether `smallest_kept` cuts any token of a row."""
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.top_n_sigma)


def smallest_kept(scores: Tensor, values: Tensor, samplings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return the smallest score that all limits but typical_p keep [rows, 1], and whether `values` suffice [rows].

    `values` [rows, width] are the largest of scores [rows, vocab], in descending order. Kept are the top_k largest; of
    those the fewest that together reach top_p of their probability (nucleus sampling, Holtzman et al. 2020); of those
    the ones with at least min_p of the largest's probability (Nguyen et al. 2024); and of those the ones whose score is
    at most top_n_sigma standard deviations of all scores below the largest (Tang et al. 2024). Ties with the smallest
    kept score are kept.
    """
    vocab, width = scores.shape[-1], values.shape[-1]
    top_k = upload([min(sampling.top_k or vocab, vocab) for sampling in samplings], scores.device)[:, None]
    # Where top_p is off, 2 is above any sum, so that rounding does not cut the tail.
    top_p = upload([sampling.top_p if sampling.top_p < 1 else 2.0 for sampling in samplings], scores.device)[:, None]
    min_p = [math.log(sampling.min_p) if sampling.min_p > 0 else _OFF for sampling in samplings]
    ranks = torch.arange(width, device=scores.device)
    among_k = values.masked_fill(ranks >= top_k, _OFF)
    # Probabilities are relative to the top_k tokens, which are all tokens where top_k is off.
    total = torch.where(top_k <= width, log_totals(among_k), log_totals(scores))
    before = (among_k - total).exp_().cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    keep = ((before < top_p) & (ranks < top_k)).sum(-1, keepdim=True)
    smallest = values.gather(-1, keep - 1).maximum(values[:, :1] + upload(min_p, scores.device)[:, None])
    if any(sampling.top_n_sigma for sampling in samplings):
        sigmas = upload([sampling.top_n_sigma for sampling in samplings], scores.device)[:, None]
        lowest = values[:, :1] - sigmas * _deviation(scores)
        smallest = torch.where(sigmas > 0, smallest.maximum(lowest), smallest)
    if width == vocab:
        return smallest, torch.ones(len(samplings), dtype=torch.bool, device=scores.device)
    decided = (top_k <= width) | (top_k == vocab)
    # Beyond `values` there may be ties with their smallest.
    return smallest, (decided & (smallest > values[:, -1:]))[:, 0]


def _deviation(scores: Tensor) -> Tensor:
    """Return the standard deviation [rows, 1] of the finite scores of each row; those of forbidden ids are -inf."""
    finite = scores.isfinite()
    count = finite.sum(-1, keepdim=True)

    def mean_of(values: Tensor) -> Tensor:
        return reduced(lambda rows: rows.sum(-1, keepdim=True), values.masked_fill(~finite, 0.0)) / count

    return mean_of((scores - mean_of(scores)).square()).sqrt()


def mask_atypical(scores: Tensor, samplings: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor]:
    """Return scores [rows, vocab] with -inf where typical_p cuts, and whether `width` tokens suffice [rows].

    Kept are the tokens whose information is closest to the entropy, the fewest that together reach typical_p of the
    probability (locally typical sampling, Meister et al. 2022), and ties with the last of them.
    """
    mass = upload([sampling.typical_p if sampling.typical_p < 1 else 2.0 for sampling in samplings], scores.device)
    logprobs = scores.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -reduced(lambda rows: rows.nansum(-1, keepdim=True), logprobs * probabilities)
    distance = (-logprobs - entropy).abs_()
    ordered, order = distance.topk(width, dim=-1, largest=False)
    short = (probabilities.gather(-1, order).cumsum_(-1) < mass[:, None]).sum(-1, keepdim=True)
    farthest = ordered.gather(-1, short.clamp(max=width - 1))
    enough = (short < width) | (width == scores.shape[-1])
    return scores.masked_fill(distance > farthest, _OFF), enough[:, 0]


# Numbers of likeliest tokens that are sorted: for a small top_k, and for any other limit. Where they are too few for a
# row (a flat distribution and a high top_p), the number is multiplied by _WIDER until they suffice.
_FEW = 128
_LIKELY = 1024
_WIDER = 8
# Bounds of the temperature, which keep a float32 difference of logits divided by it finite.
COLDEST, HOTTEST = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of one row's draw besides its logits. `position` is the token's position in its sequence."""

    sampling: SamplingParams
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


def sample_with_torch(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """See `sampling.step.sample`; grammars count already."""
    chosen = best_of_rows(logits)
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
        if random:
            count = len(random)
            # The largest is subtracted first, so that a tiny temperature does not make finite logits infinite.
            picked[:count] = _sample_random(scores[:count].sub_(best[:count, None]), some[:count])
        chosen[index] = picked.masked_fill(~best.isfinite() | (chosen[index] < 0), -1)
    return chosen


def best_of_rows(logits: Tensor) -> Tensor:
    """Return the best id of each row, or -1 where the largest logit is not finite, or one is not a number."""
    if logits.device.type == "cpu":
        from loraplex.kernels.logits import best_ids  # numba is there only where the CPU computes

        return best_ids(logits, dtype_name(logits.dtype))
    return best_with_torch(logits)


def best_with_torch(logits: Tensor) -> Tensor:
    """Do the same on any device."""
    best, chosen = logits.max(dim=-1)  # NaN if there is any
    return chosen.masked_fill(~best.isfinite(), -1)


def _sample_random(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw an id [rows] from scores [rows, vocab] whose largest is 0; changes the scores."""
    device, vocab = scores.device, scores.shape[-1]
    scores.div_(_temperatures(draws, device))
    keys = [row_key(draw.sampling.seed, draw.choice, draw.position) for draw in draws]
    keys_tensor = upload(keys, device, torch.int32)
    chosen = torch.empty(len(draws), dtype=torch.int64, device=device)

    def draw(index: Tensor, samplings: Sequence[SamplingParams], look: _Look) -> tuple[Tensor, Tensor]:
        return _draw_among(scores[index], samplings, keys_tensor[index], look)

    _fill_by_look(chosen, draws, vocab, draw)
    return chosen


def drawn_scores(logits: Tensor, draws: Sequence[Draw], ids: Tensor) -> Tensor:
    """Return scores [rows, vocab] whose softmax is the distribution that `ids` [rows] were drawn from.

    They are -inf where a limit cuts; those of greedy rows are the adjusted logits. Grammars count already.
    """
    scores = logits.to(torch.float32, copy=True)
    adjust_logits(scores, [draw.adjustments for draw in draws], [draw.banned_ids for draw in draws])
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        index, some = upload(random, logits.device), [draws[row] for row in random]
        own, drawn = ids[index][:, None], scores[index]
        drawn = drawn.sub_(drawn.amax(-1, keepdim=True)).div_(_temperatures(some, logits.device))
        limited = torch.empty_like(drawn)
        _fill_by_look(limited, some, logits.shape[-1], lambda index, *limits: _limited(drawn[index], *limits))
        # Triton's sums round otherwise: what it chose at the edge of a limit was kept.
        scores[index] = limited.scatter_(-1, own, drawn.gather(-1, own))
    return scores


def _temperatures(draws: Sequence[Draw], device: torch.device) -> Tensor:
    return upload([min(max(draw.sampling.temperature, COLDEST), HOTTEST) for draw in draws], device)[:, None]


def _fill_by_look(
    results: Tensor,
    draws: Sequence[Draw],
    vocab: int,
    compute: Callable[[Tensor, Sequence[SamplingParams], _Look], tuple[Tensor, Tensor]],
) -> None:
    """Fill results [rows, ...] with what is computed of rows by their limits, until the likeliest tokens suffice.

    `compute` returns the results of such rows, and whether the number of tokens sufficed [rows].
    """
    by_look: dict[_Look, list[int]] = {}
    for row, draw in enumerate(draws):
        by_look.setdefault(_look(draw.sampling, vocab), []).append(row)
    while by_look:
        look, rows = by_look.popitem()
        index = upload(rows, results.device)
        results[index], decided = compute(index, [draws[row].sampling for row in rows], look)
        if look.width in (0, vocab):
            continue
        undecided = [row for row, done in zip(rows, decided.tolist(), strict=True) if not done]
        if undecided:
            wider = replace(look, width=min(look.width * _WIDER, vocab))
            by_look.setdefault(wider, []).extend(undecided)


def _look(sampling: SamplingParams, vocab: int) -> _Look:
    """Return what to sort for a row; must not depend on other rows, or its result might."""
    likely = limits_likeliest(sampling)
    if sampling.typical_p < 1:
        return _Look(min(_LIKELY, vocab), likely, typical=True)
    if 0 < sampling.top_k <= _FEW // 2:
        return _Look(min(_FEW, vocab), likely)
    return _Look(min(_LIKELY, vocab) if likely else 0, likely)


def _draw_among(
    scores: Tensor, samplings: Sequence[SamplingParams], keys: Tensor, look: _Look
) -> tuple[Tensor, Tensor]:
    """Draw ids [rows] from scores [rows, vocab]; also return whether `look.width` tokens sufficed [rows]."""
    if look.likely and not look.typical:  # the usual case, in which noise is computed of the likeliest alone
        values, ids = scores.topk(look.width, dim=-1)
        smallest, enough = smallest_kept(scores, values, samplings)
        drawn = values.masked_fill(values < smallest, _OFF) + gumbel_noise(keys, ids.int())
        return ids.gather(-1, drawn.max(-1, keepdim=True).indices)[:, 0], enough
    scores, enough = _limited(scores, samplings, look)
    every_id = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)[None]
    return (scores + gumbel_noise(keys, every_id)).max(-1).indices, enough


def _limited(scores: Tensor, samplings: Sequence[SamplingParams], look: _Look) -> tuple[Tensor, Tensor]:
    """Return scores [rows, vocab] with -inf where a limit cuts, and whether `look.width` tokens sufficed [rows]."""
    enough = torch.ones(len(samplings), dtype=torch.bool, device=scores.device)
    if look.likely:
        smallest, enough = smallest_kept(scores, scores.topk(look.width, dim=-1).values, samplings)
        scores = scores.masked_fill(scores < smallest, _OFF)
    if look.typical:
        scores, decided = mask_atypical(scores, samplings, look.width)
        enough = enough & decided
    return scores, enough
