"""Sampling on CUDA: one Triton kernel chooses the next ids of all rows, in place of sorting the vocabulary.

The kernel computes what sampler.py defines, and gives the same ids. A limit keeps the scores from a threshold on, which
is found by counting: the scores' bits, read as integers in the same order, are searched four bits at a time.

    threshold    ????????  ──▶  5???????  ──▶  5c??????  ──▶ ...      a pass over the row weighs what is above each of
                                                                     the 16 values of the next four bits

It is the smallest threshold with less above it than top_k tokens, or top_p of the probability. For typical_p the tokens
that the other limits keep are ordered by their distance from the entropy in the same way: of a score s that is
|s - mean| with the mean of all scores, weighted by their probabilities. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.worker.engine.device import KernelCall, upload
from loraplex.worker.engine.sampling.sampler import COLDEST, HOTTEST, Draw, adjust_logits, row_key

# Columns that a program reads at once.
_COLUMNS = 1024
# Numbers of a row's parameters: temperature, top_p, log of min_p, top_n_sigma, typical_p, in float32; top_k, the two
# keys of the noise.
_PARAMETERS: tl.constexpr = tl.constexpr(8)
# What a threshold is of: the number of the scores above it, their probability, or that of the nearer ones to the mean.
_COUNT: tl.constexpr = tl.constexpr(0)
_MASS: tl.constexpr = tl.constexpr(1)
_TYPICAL: tl.constexpr = tl.constexpr(2)


@triton.jit
def _float(parameters, index: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(parameters + index).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, at, vocab, best, temperature, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return columns of a row, their scores below the best and by temperature, and the scores' bits in order."""
    columns = at + tl.arange(0, COLUMNS)
    numbers = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    # + 0: minus zero equals zero, and so do their bits afterwards.
    scores = tl.math.div_rn(numbers - best, tl.zeros([COLUMNS], tl.float32) + temperature) + 0.0
    bits = scores.to(tl.uint32, bitcast=True)
    return columns, scores, tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _nearness(scores, mean):  # type: ignore[no-untyped-def]
    """Return bits that are the larger, the nearer a score is to the mean."""
    return tl.abs(scores - mean).to(tl.uint32, bitcast=True) ^ 0xFFFFFFFF


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    logits, vocab, best, temperature, least, lowest, mean, thresholds, OF: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the number of scores, or the sum of their exponentials, above each of 16 thresholds."""
    sums = tl.zeros([COLUMNS, 16], tl.float32)
    for at in range(0, vocab, COLUMNS):
        columns, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
        weights = tl.where(columns < vocab, 1.0, 0.0) if OF == _COUNT else tl.exp(scores)
        if OF == _TYPICAL:
            weights = tl.where((bits >= least) & (scores >= lowest), weights, 0.0)
            bits = _nearness(scores, mean)
        sums += tl.where(bits[:, None] > thresholds[None, :], weights[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _typical_mean(logits, vocab, best, temperature, least, lowest, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mean of the kept scores, weighted by their exponentials, and the sum of these."""
    masses = tl.zeros([COLUMNS], tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, vocab, COLUMNS):
        _, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
        kept = (bits >= least) & (scores >= lowest) & (scores > float("-inf"))
        masses += tl.where(kept, tl.exp(scores), 0.0)
        sums += tl.where(kept, tl.exp(scores) * scores, 0.0)
    mass = tl.sum(masses, 0)
    return tl.sum(sums, 0) / mass, mass


@triton.jit
def _threshold(  # type: ignore[no-untyped-def]
    logits, vocab, best, temperature, least, lowest, mean, target, OF: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the bits of the smallest threshold with less than `target` above it."""
    found = tl.zeros([16], tl.uint32)
    digits = tl.arange(0, 16).to(tl.uint32)
    ones = tl.full([16], 1, tl.uint32)
    for step in range(8):
        lower = ones * (28 - 4 * step)
        # The largest threshold that begins with each digit.
        thresholds = found | (digits << lower) | ((ones << lower) - ones)
        above = _weigh(logits, vocab, best, temperature, least, lowest, mean, thresholds, OF, COLUMNS)
        found = found | (tl.sum((above >= target).to(tl.uint32), 0) << lower)
    return tl.max(found, 0)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """Hash 32-bit integers as sampler.gumbel_noise does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(columns, first_key, second_key):  # type: ignore[no-untyped-def]
    """Return sampler.gumbel_noise of token ids."""
    bits = _mix(_mix(columns.to(tl.uint32) + first_key) + second_key) & 0x7FFFFFFF
    uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    # log1p(-uniform), exact for small numbers as well (Kahan): their rounding in 1 - uniform is divided out.
    rest = 1.0 - uniform
    rounded = rest - 1.0
    log1p = tl.where(rounded == 0.0, -uniform, tl.log(rest) * tl.where(rounded == 0.0, 1.0, -uniform / rounded))
    return -tl.log(-log1p)


@triton.jit
def _deviation(logits, vocab, best, temperature, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the standard deviation of the finite scores."""
    count = tl.zeros([COLUMNS], tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, vocab, COLUMNS):
        _, scores, _ = _load(logits, at, vocab, best, temperature, COLUMNS)
        count += (scores > float("-inf")).to(tl.float32)
        sums += tl.where(scores > float("-inf"), scores, 0.0)
    number = tl.sum(count, 0)
    mean = tl.sum(sums, 0) / number
    squares = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, vocab, COLUMNS):
        _, scores, _ = _load(logits, at, vocab, best, temperature, COLUMNS)
        squares += tl.where(scores > float("-inf"), (scores - mean) * (scores - mean), 0.0)
    return tl.sqrt(tl.sum(squares, 0) / number)


@triton.jit
def _draw(logits, parameters, vocab, best, temperature, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the id of a row whose best logit is finite: the largest of what the limits keep and its noise."""
    top_p, lowest, sigmas = _float(parameters, 1), _float(parameters, 2), _float(parameters, 3)
    typical_p, top_k = _float(parameters, 4), tl.load(parameters + 5)
    first_key = tl.load(parameters + 6).to(tl.uint32, bitcast=True)
    second_key = tl.load(parameters + 7).to(tl.uint32, bitcast=True)
    nothing = tl.zeros([16], tl.uint32)
    least = tl.max(nothing, 0)
    if top_k > 0:
        target = top_k.to(tl.float32)
        least = _threshold(logits, vocab, best, temperature, least, lowest, 0.0, target, _COUNT, COLUMNS)
    if top_p < 1:
        total = tl.max(_weigh(logits, vocab, best, temperature, least, lowest, 0.0, nothing + least, _MASS, COLUMNS), 0)
        if top_k > 0:
            # Of the scores that equal the smallest of the top_k, as many as belong to them.
            above = tl.max(
                _weigh(logits, vocab, best, temperature, least, lowest, 0.0, nothing + least, _COUNT, COLUMNS), 0
            )
            bits = tl.where(least >= 0x80000000, least ^ 0x80000000, least ^ 0xFFFFFFFF)
            total += (top_k.to(tl.float32) - above) * tl.exp(bits.to(tl.float32, bitcast=True))
        by_mass = _threshold(logits, vocab, best, temperature, least, lowest, 0.0, top_p * total, _MASS, COLUMNS)
        least = tl.maximum(least, by_mass)
    if sigmas > 0:
        lowest = tl.maximum(lowest, -sigmas * _deviation(logits, vocab, best, temperature, COLUMNS))
    nearest, mean = tl.max(nothing, 0), 0.0
    if typical_p < 1:
        mean, mass = _typical_mean(logits, vocab, best, temperature, least, lowest, COLUMNS)
        nearest = _threshold(logits, vocab, best, temperature, least, lowest, mean, typical_p * mass, _TYPICAL, COLUMNS)
    tops = tl.full([COLUMNS], float("-inf"), tl.float32)
    places = tl.zeros([COLUMNS], tl.int32)
    for at in range(0, vocab, COLUMNS):
        columns, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
        drawn = scores + _noise(columns, first_key, second_key)
        better = (columns < vocab) & (bits >= least) & (scores >= lowest) & (drawn > tops)
        better = better & (_nearness(scores, mean) >= nearest)
        places = tl.where(better, columns, places)
        tops = tl.where(better, drawn, tops)
    return tl.min(tl.where(tops == tl.max(tops, 0), places, vocab), 0)


@triton.jit
def choose_ids(ids, logits, parameters, vocab, row_stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Choose the id of a row; -1 where a number is NaN or the best one is not finite. Grid: row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    parameters += row * _PARAMETERS
    temperature = _float(parameters, 0)
    tops = tl.full([COLUMNS], float("-inf"), tl.float32)
    places = tl.zeros([COLUMNS], tl.int32)
    strange = tl.zeros([COLUMNS], tl.int32)
    for at in range(0, vocab, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        numbers = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        strange |= (numbers != numbers).to(tl.int32)  # noqa: PLR0124 - NaN
        places = tl.where(numbers > tops, columns, places)
        tops = tl.where(numbers > tops, numbers, tops)
    best = tl.max(tops, 0)
    chosen = tl.min(tl.where(tops == best, places, vocab), 0)
    usable = (tl.max(strange, 0) == 0) & (best > float("-inf")) & (best < float("inf"))
    if usable & (temperature > 0):
        chosen = _draw(logits, parameters, vocab, best, temperature, COLUMNS)
    tl.store(ids + row, tl.where(usable, chosen, -1).to(tl.int64))


# Rows may begin anywhere: another alignment would compile a kernel while requests wait.
@triton.jit(do_not_specialize_on_alignment=["scores"])
def sum_exponentials(totals, scores, vocab, row_stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the logarithm of the sum of a row's exponentials. Grid: row."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * row_stride
    tops = tl.full([COLUMNS], float("-inf"), tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, vocab, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        numbers = tl.load(scores + columns, mask=columns < vocab, other=float("-inf"))
        higher = tl.maximum(tops, numbers)
        # Where there is no finite number yet, -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(tops - base) + tl.exp(numbers - base)
        tops = higher
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(totals + row, tl.log(tl.sum(sums * tl.exp(tops - base), 0)) + base)


def totals_call(totals: Tensor, scores: Tensor) -> KernelCall:
    """Return the launch that fills `totals` [rows] float32 of scores [rows, vocab] float32; see log_totals."""
    return KernelCall(
        sum_exponentials,
        (len(scores),),
        {"totals": totals, "scores": scores, "vocab": scores.shape[1], "row_stride": scores.stride(0)},
        {"COLUMNS": _COLUMNS},
        warps=8,
        stages=2,
    )


def log_totals(scores: Tensor) -> Tensor:
    """Return logsumexp [rows] of float32 scores [rows, vocab]; unlike torch's, a row's bits are its own."""
    totals = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    totals_call(totals, scores).launch()
    return totals


def choose_call(ids: Tensor, logits: Tensor, draws: Sequence[Draw]) -> KernelCall:
    """Return the launch that chooses `ids` [rows] int64 from logits [rows, vocab]; see step.sample."""
    vocab = logits.shape[-1]
    return KernelCall(
        choose_ids,
        (len(draws),),
        {
            "ids": ids, "logits": logits, "parameters": upload(_parameters(draws, vocab), logits.device),
            "vocab": vocab, "row_stride": logits.stride(0),
        },
        {"COLUMNS": _COLUMNS},
        warps=8,
        stages=2,
    )  # fmt: skip


def _parameters(draws: Sequence[Draw], vocab: int) -> np.ndarray:
    """Return the rows' parameters [rows, 8] int32, the first five of them the bits of float32."""
    numbers = np.zeros((len(draws), _PARAMETERS.value), dtype=np.int32)
    for row, draw in zip(numbers, draws, strict=True):
        sampling = draw.sampling
        temperature = min(max(sampling.temperature, COLDEST), HOTTEST) if sampling.temperature > 0 else 0.0
        log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else float("-inf")
        limits = sampling.top_p, log_min_p, sampling.top_n_sigma, sampling.typical_p
        row[:5].view(np.float32)[:] = temperature, *limits
        row[5] = sampling.top_k if sampling.top_k < vocab else 0
        row[6:] = row_key(sampling.seed, draw.choice, draw.position)
    return numbers


def sample_with_triton(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Do what step.sample does with logits whose forbidden ids are -inf; the host never waits for the device."""
    scores, ids = logits, torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    if any(draw.adjustments or draw.banned_ids for draw in draws):
        scores = logits.to(torch.float32, copy=True)
        adjust_logits(scores, [draw.adjustments for draw in draws], [draw.banned_ids for draw in draws])
    choose_call(ids, scores, draws).launch()
    if scores is not logits:
        # A number that is none counts though the adjustments have replaced it.
        ids.masked_fill_(logits.amax(-1).isfinite().logical_not(), -1)
    return ids
