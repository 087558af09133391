"""Sampling on CUDA: one Triton kernel chooses the next ids of all rows, in place of sorting the vocabulary.

The kernel computes what sampler.py defines, and gives the same ids. A limit keeps the scores from a threshold on, which
is found by counting: the scores' bits, read as integers in the same order, are searched four bits at a time.

    threshold    ????????  ──▶  5???????  ──▶  5c??????  ──▶ ...      a pass over the row weighs what is above each of
                                                                     the 16 values of the next four bits

It is the smallest threshold with less above it than top_k tokens, or top_p of the probability. Typical_p, which orders
tokens by something else, is left to torch. Imported only where there is Triton.
"""

# ruff: noqa: N803 - compile-time arguments are in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.engine.device import KernelCall, upload
from worker.engine.sampling.sampler import COLDEST, HOTTEST, Draw, adjust_logits, row_key, sample_random

# Columns that a program reads at once.
_COLUMNS = 1024
# Numbers of a row's parameters: temperature, top_p, log of min_p, top_n_sigma, in float32; top_k, the noise's two keys.
_PARAMETERS: tl.constexpr = tl.constexpr(7)


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
def _weigh(logits, vocab, best, temperature, thresholds, BY_COUNT: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of scores, or the sum of their exponentials, above each of 16 thresholds."""
    sums = tl.zeros([COLUMNS, 16], tl.float32)
    for at in range(0, vocab, COLUMNS):
        columns, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
        weights = tl.where(columns < vocab, 1.0, 0.0) if BY_COUNT else tl.exp(scores)
        sums += tl.where(bits[:, None] > thresholds[None, :], weights[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _threshold(logits, vocab, best, temperature, target, BY_COUNT: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits of the smallest threshold with less than `target` above it."""
    found = tl.zeros([16], tl.uint32)
    digits = tl.arange(0, 16).to(tl.uint32)
    ones = tl.full([16], 1, tl.uint32)
    for step in range(8):
        lower = ones * (28 - 4 * step)
        # The largest threshold that begins with each digit.
        thresholds = found | (digits << lower) | ((ones << lower) - ones)
        above = _weigh(logits, vocab, best, temperature, thresholds, BY_COUNT, COLUMNS)
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
    top_k = tl.load(parameters + 4)
    first_key = tl.load(parameters + 5).to(tl.uint32, bitcast=True)
    second_key = tl.load(parameters + 6).to(tl.uint32, bitcast=True)
    nothing = tl.zeros([16], tl.uint32)
    least = tl.max(nothing, 0)
    if top_k > 0:
        least = _threshold(logits, vocab, best, temperature, top_k.to(tl.float32), True, COLUMNS)
    if top_p < 1:
        total = tl.max(_weigh(logits, vocab, best, temperature, nothing + least, False, COLUMNS), 0)
        if top_k > 0:
            # Of the scores that equal the smallest of the top_k, as many as belong to them.
            above = tl.max(_weigh(logits, vocab, best, temperature, nothing + least, True, COLUMNS), 0)
            bits = tl.where(least >= 0x80000000, least ^ 0x80000000, least ^ 0xFFFFFFFF)
            total += (top_k.to(tl.float32) - above) * tl.exp(bits.to(tl.float32, bitcast=True))
        by_mass = _threshold(logits, vocab, best, temperature, top_p * total, False, COLUMNS)
        least = tl.maximum(least, by_mass)
    if sigmas > 0:
        lowest = tl.maximum(lowest, -sigmas * _deviation(logits, vocab, best, temperature, COLUMNS))
    tops = tl.full([COLUMNS], float("-inf"), tl.float32)
    places = tl.zeros([COLUMNS], tl.int32)
    for at in range(0, vocab, COLUMNS):
        columns, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
        drawn = scores + _noise(columns, first_key, second_key)
        better = (columns < vocab) & (bits >= least) & (scores >= lowest) & (drawn > tops)
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


def choose_call(ids: Tensor, logits: Tensor, draws: Sequence[Draw]) -> KernelCall:
    """Return the launch that chooses `ids` [rows] int64 from logits [rows, vocab]; see sampler.sample."""
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
    """Return the rows' parameters [rows, 7] int32, the first four of them the bits of float32."""
    numbers = np.zeros((len(draws), _PARAMETERS.value), dtype=np.int32)
    for row, draw in zip(numbers, draws, strict=True):
        sampling = draw.sampling
        temperature = min(max(sampling.temperature, COLDEST), HOTTEST) if sampling.temperature > 0 else 0.0
        log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else float("-inf")
        row[:4].view(np.float32)[:] = temperature, sampling.top_p, log_min_p, sampling.top_n_sigma
        row[4] = sampling.top_k if sampling.top_k < vocab else 0
        row[5:] = row_key(sampling.seed, draw.choice, draw.position)
    return numbers


def sample_with_triton(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Do what sampler.sample does with logits whose forbidden ids are -inf; the host never waits for the device."""
    scores, ids = logits, torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    if any(draw.adjustments or draw.banned_ids for draw in draws):
        scores = logits.to(torch.float32, copy=True)
        adjust_logits(scores, [draw.adjustments for draw in draws], [draw.banned_ids for draw in draws])
    choose_call(ids, scores, draws).launch()
    if scores is not logits:
        # A number that is none counts though the adjustments have replaced it.
        ids.masked_fill_(logits.amax(-1).isfinite().logical_not(), -1)
    typical = [row for row, draw in enumerate(draws) if draw.sampling.typical_p < 1 and draw.sampling.temperature > 0]
    if typical:
        index = upload(typical, logits.device)
        some = scores[index].float()
        best = some.max(-1, keepdim=True).values
        picked = sample_random(some.sub_(best), [draws[row] for row in typical], wait=False)
        ids[index] = torch.where(ids[index] < 0, -1, picked)
    return ids
