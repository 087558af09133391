"""Sampling on CUDA: Triton kernels choose the next ids of all rows, in place of sorting the vocabulary.

The kernels compute what sampler.py defines, and give the same ids. A limit keeps the scores from a threshold on, which
is found by counting: the logits' bits, read as integers in the same order, are searched four bits at a time.

    threshold    ????????  ──▶  5???????  ──▶  5c??????  ──▶ ...      a launch over the rows weighs what is above each
                                                                     of the 16 values of the next four bits

It is the smallest threshold with less above it than top_k tokens, or top_p of the probability. For typical_p the tokens
that the other limits keep are ordered by their distance from the entropy in the same way: of a score s that is
|s - mean| with the mean of all scores, weighted by their probabilities. Imported only where there is Triton.

A row is cut into parts of the vocabulary, each a program's, which leave their sums in the row's memory. The programs of
the next launch add them up first, in the order of the parts, so that a row's bits are its own:

    begin  │  weigh, 4 or 8 times for top_k  │  moments  │  weigh for top_p  │  ...  │  draw  │  finish

Launches that no row needs are left out. bfloat16 has four digits of four bits, others eight.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, compile-time ones in capitals
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
from loraplex.worker.engine.sampling.adjustments import adjust_logits
from loraplex.worker.engine.sampling.sampler import COLDEST, HOTTEST, Draw, row_key

# Columns that a program reads at once, and all that it reads: so many programs share a row as its vocabulary has parts.
_COLUMNS = 1024
PART = 8192
# Numbers of a row's parameters: temperature, top_p, log of min_p, top_n_sigma, typical_p, in float32; top_k, the two
# keys of the noise.
_PARAMETERS: tl.constexpr = tl.constexpr(8)
# What a threshold is of: the number of the scores above it, their probability, or that of the nearer ones to the mean.
_COUNT: tl.constexpr = tl.constexpr(0)
_MASS: tl.constexpr = tl.constexpr(1)
_TYPICAL: tl.constexpr = tl.constexpr(2)
# Maximum number of passes of a search: the digits of 32 bits.
_PASSES: tl.constexpr = tl.constexpr(8)
# The numbers of a part, in float32: its best logit and that one's id; number, sum and squared differences of the finite
# scores; the exponentials above top_k's threshold; those of all kept scores, and by score; the best draw and its id.
_TOP: tl.constexpr = tl.constexpr(0)
_PLACE: tl.constexpr = tl.constexpr(1)
_FINITE: tl.constexpr = tl.constexpr(2)
_SUM: tl.constexpr = tl.constexpr(3)
_SQUARES: tl.constexpr = tl.constexpr(4)
_ABOVE: tl.constexpr = tl.constexpr(5)
_KEPT: tl.constexpr = tl.constexpr(6)
_KEPT_SUM: tl.constexpr = tl.constexpr(7)
_DRAWN: tl.constexpr = tl.constexpr(8)
_DRAWN_PLACE: tl.constexpr = tl.constexpr(9)
# Then 16 sums of each pass of the three searches.
_SUMS: tl.constexpr = tl.constexpr(16)
_WIDTH: tl.constexpr = tl.constexpr(16 + 3 * 8 * 16)
# The bits, in order, of minus infinity.
_LEAST_KEY: tl.constexpr = tl.constexpr(0x007FFFFF)


@triton.jit
def _float(parameters, index: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(parameters + index).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, at, vocab, best, temperature, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return columns of a row, their scores below the best and by temperature, and the logits' bits in order."""
    columns = at + tl.arange(0, COLUMNS)
    # + 0: minus zero equals zero, and so do their bits afterwards.
    numbers = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32) + 0.0
    bits = numbers.to(tl.uint32, bitcast=True)
    scores = tl.math.div_rn(numbers - best, tl.zeros([COLUMNS], tl.float32) + temperature)
    return columns, scores, tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _score(key, best, temperature, PASSES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the score of the logit with these bits in order [n], of which the first four times PASSES are given."""
    if PASSES == 4:
        key = tl.where(key < 0x80000000, key | 0xFFFF, key)
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    score = tl.math.div_rn(bits.to(tl.float32, bitcast=True) - best, tl.zeros_like(bits).to(tl.float32) + temperature)
    return tl.where(key > _LEAST_KEY, score, float("-inf"))


@triton.jit
def _nearness(scores, mean):  # type: ignore[no-untyped-def]
    """Return bits that are the larger, the nearer a score is to the mean."""
    return tl.abs(scores - mean).to(tl.uint32, bitcast=True) ^ 0xFFFFFFFF


@triton.jit
def _of_parts(work, slot: tl.constexpr, parts, other, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return one of the numbers of all parts of a row [PARTS]."""
    part = tl.arange(0, PARTS)
    return tl.load(work + part * _WIDTH + slot, mask=part < parts, other=other)


@triton.jit
def _weights(work, search: tl.constexpr, step, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what the parts of a row have above the 16 thresholds of a pass."""
    part, digit = tl.arange(0, PARTS), tl.arange(0, 16)
    sums = work + _SUMS + (search * _PASSES + step) * 16 + part[:, None] * _WIDTH + digit[None, :]
    return tl.sum(tl.load(sums, mask=(part < parts)[:, None], other=0.0), 0)


@triton.jit
def _found(work, founds, search: tl.constexpr, step, target, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits that are known after a pass [16, all the same]: of the smallest with less than `target` above."""
    digits = tl.zeros([16], tl.uint32) + tl.sum((_weights(work, search, step, parts, PARTS) >= target).to(tl.uint32), 0)
    before = tl.load(founds + search * _PASSES + step - 1 + tl.zeros([16], tl.int32), mask=step > 0, other=0)
    return before.to(tl.uint32, bitcast=True) | (digits << (tl.zeros([16], tl.uint32) + 28 - 4 * step))


@triton.jit
def _most_count(work, founds, parameters, parts, PASSES: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bits [16] of top_k's threshold, 0 where it is off."""
    least, top_k = tl.zeros([16], tl.uint32), tl.load(parameters + 5)
    if top_k > 0:
        least = _found(work, founds, _COUNT, PASSES - 1, top_k.to(tl.float32), parts, PARTS)
    return least


@triton.jit
def _most_mass(  # type: ignore[no-untyped-def]
    work, parameters, least, best, temperature, parts, PASSES: tl.constexpr, PARTS: tl.constexpr
):
    """Return the sum of exponentials that top_p keeps of the top_k, whose threshold is `least`."""
    top_p, top_k = _float(parameters, 1), tl.load(parameters + 5)
    total = tl.sum(_of_parts(work, _ABOVE, parts, 0.0, PARTS), 0)
    if top_k > 0:
        # Of the scores that equal the smallest of the top_k, as many as belong to them.
        weights = _weights(work, _COUNT, PASSES - 1, parts, PARTS)
        own = tl.arange(0, 16).to(tl.uint32) == ((least >> (32 - 4 * PASSES)) & 15)
        above = tl.sum(tl.where(own, weights, 0.0), 0)
        total += (top_k.to(tl.float32) - above) * tl.exp(tl.max(_score(least, best, temperature, PASSES), 0))
    return top_p * total


@triton.jit
def _smallest(  # type: ignore[no-untyped-def]
    work, founds, parameters, best, temperature, parts, PASSES: tl.constexpr, PARTS: tl.constexpr
):
    """Return the smallest score that all limits but typical_p keep."""
    top_p, lowest, sigmas = _float(parameters, 1), _float(parameters, 2), _float(parameters, 3)
    least = _most_count(work, founds, parameters, parts, PASSES, PARTS)
    if top_p < 1:
        target = _most_mass(work, parameters, least, best, temperature, parts, PASSES, PARTS)
        least = tl.maximum(least, _found(work, founds, _MASS, PASSES - 1, target, parts, PARTS))
    if sigmas > 0:
        count, sums = _of_parts(work, _FINITE, parts, 0.0, PARTS), _of_parts(work, _SUM, parts, 0.0, PARTS)
        number = tl.sum(count, 0)
        apart = sums / tl.maximum(count, 1.0) - tl.sum(sums, 0) / number
        squares = _of_parts(work, _SQUARES, parts, 0.0, PARTS) + count * apart * apart
        lowest = tl.maximum(lowest, -sigmas * tl.sqrt(tl.sum(squares, 0) / number))
    return tl.maximum(lowest, tl.max(_score(least, best, temperature, PASSES), 0))


@triton.jit
def _kept(work, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of the kept scores' exponentials, and the mean of these scores, weighted by them."""
    mass = tl.sum(_of_parts(work, _KEPT, parts, 0.0, PARTS), 0)
    return mass, tl.sum(_of_parts(work, _KEPT_SUM, parts, 0.0, PARTS), 0) / mass


@triton.jit
def _row(work, founds, logits, parameters, row_stride, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the addresses of the program's row, its best logit, and the temperature: 0 where no id is drawn."""
    row = tl.program_id(0)
    work += row.to(tl.int64) * parts * _WIDTH
    parameters += row * _PARAMETERS
    best = tl.max(_of_parts(work, _TOP, parts, float("-inf"), PARTS), 0)
    usable = (best > float("-inf")) & (best < float("inf"))
    temperature = tl.where(usable, _float(parameters, 0), 0.0)
    return work, founds + row * 3 * _PASSES, logits + row.to(tl.int64) * row_stride, parameters, best, temperature


@triton.jit
def begin_parts(work, logits, vocab, row_stride, parts, PART: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the best logit of a part, infinity where a number is NaN, and its id. Grid: row, part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * row_stride
    work += (row * parts + part) * _WIDTH
    tops = tl.full([COLUMNS], float("-inf"), tl.float32)
    places = tl.zeros([COLUMNS], tl.int32)
    for at in range(part * PART, tl.minimum(part * PART + PART, vocab), COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        numbers = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        numbers = tl.where(numbers != numbers, float("inf"), numbers)  # noqa: PLR0124 - NaN
        places = tl.where(numbers > tops, columns, places)
        tops = tl.where(numbers > tops, numbers, tops)
    best = tl.max(tops, 0)
    tl.store(work + _TOP, best)
    tl.store(work + _PLACE, tl.min(tl.where(tops == best, places, vocab), 0).to(tl.float32))


# Not specialized by the pass: each would be a kernel of its own.
@triton.jit(do_not_specialize=["step"])
def weigh_parts(  # type: ignore[no-untyped-def]
    work, founds, logits, parameters, vocab, row_stride, parts, step,
    SEARCH: tl.constexpr, PASSES: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write what a part has above each of 16 thresholds: a number of scores, or exponentials. Grid: row, part."""
    work, founds, logits, parameters, best, temperature = _row(
        work, founds, logits, parameters, row_stride, parts, PARTS
    )
    if SEARCH == _COUNT:
        target = tl.load(parameters + 5).to(tl.float32)
        off = target <= 0
    else:
        target = _float(parameters, 1 if SEARCH == _MASS else 4)
        off = target >= 1
    if off | (temperature <= 0):
        return
    smallest, mean = 0.0, 0.0
    if SEARCH == _MASS:
        least = _most_count(work, founds, parameters, parts, PASSES, PARTS)
        target = _most_mass(work, parameters, least, best, temperature, parts, PASSES, PARTS)
    if SEARCH == _TYPICAL:
        smallest = _smallest(work, founds, parameters, best, temperature, parts, PASSES, PARTS)
        mass, mean = _kept(work, parts, PARTS)
        target *= mass
    known = tl.zeros([16], tl.uint32)
    if step > 0:
        known = _found(work, founds, SEARCH, step - 1, target, parts, PARTS)
        if tl.program_id(1) == 0:
            tl.store(founds + SEARCH * _PASSES + step - 1, tl.max(known, 0).to(tl.int32, bitcast=True))
    ones = tl.full([16], 1, tl.uint32)
    lower = ones * (28 - 4 * step).to(tl.uint32)
    # The largest threshold that begins with each digit.
    thresholds = known | (tl.arange(0, 16).to(tl.uint32) << lower) | ((ones << lower) - ones)
    sums = tl.zeros([COLUMNS, 16], tl.float32)
    part = tl.program_id(1)
    for at in range(part * PART, tl.minimum(part * PART + PART, vocab), COLUMNS):
        columns, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
        weights = tl.where(columns < vocab, 1.0, 0.0) if SEARCH == _COUNT else tl.exp(scores)
        if SEARCH == _TYPICAL:
            weights = tl.where(scores >= smallest, weights, 0.0)
            bits = _nearness(scores, mean)
        sums += tl.where(bits[:, None] > thresholds[None, :], weights[:, None], 0.0)
    places = work + part * _WIDTH + _SUMS + (SEARCH * _PASSES + step) * 16
    tl.store(places + tl.arange(0, 16), tl.sum(sums, 0))


@triton.jit
def sum_parts(  # type: ignore[no-untyped-def]
    work, founds, logits, parameters, vocab, row_stride, parts,
    KEPT: tl.constexpr, PASSES: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write a part's sums over its scores, with KEPT over those that all limits but typical_p keep. Grid: row, part."""
    work, founds, logits, parameters, best, temperature = _row(
        work, founds, logits, parameters, row_stride, parts, PARTS
    )
    if temperature <= 0:
        return
    part = tl.program_id(1)
    begin, stop = part * PART, tl.minimum(part * PART + PART, vocab)
    own = work + part * _WIDTH
    counts, sums = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    masses = tl.zeros([COLUMNS], tl.float32)
    if KEPT:
        smallest = _smallest(work, founds, parameters, best, temperature, parts, PASSES, PARTS)
        for at in range(begin, stop, COLUMNS):
            _, scores, _ = _load(logits, at, vocab, best, temperature, COLUMNS)
            kept = (scores >= smallest) & (scores > float("-inf"))
            masses += tl.where(kept, tl.exp(scores), 0.0)
            sums += tl.where(kept, tl.exp(scores) * scores, 0.0)
        tl.store(own + _KEPT, tl.sum(masses, 0))
        tl.store(own + _KEPT_SUM, tl.sum(sums, 0))
    else:
        least = tl.max(_most_count(work, founds, parameters, parts, PASSES, PARTS), 0)
        for at in range(begin, stop, COLUMNS):
            _, scores, bits = _load(logits, at, vocab, best, temperature, COLUMNS)
            counts += (scores > float("-inf")).to(tl.float32)
            sums += tl.where(scores > float("-inf"), scores, 0.0)
            masses += tl.where(bits > least, tl.exp(scores), 0.0)
        count, total = tl.sum(counts, 0), tl.sum(sums, 0)
        mean = total / tl.maximum(count, 1.0)
        squares = tl.zeros([COLUMNS], tl.float32)
        for at in range(begin, stop, COLUMNS):
            _, scores, _ = _load(logits, at, vocab, best, temperature, COLUMNS)
            squares += tl.where(scores > float("-inf"), (scores - mean) * (scores - mean), 0.0)
        tl.store(own + _FINITE, count)
        tl.store(own + _SUM, total)
        tl.store(own + _SQUARES, tl.sum(squares, 0))
        tl.store(own + _ABOVE, tl.sum(masses, 0))


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
def draw_parts(  # type: ignore[no-untyped-def]
    work, founds, logits, parameters, vocab, row_stride, parts,
    PASSES: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write a part's largest of what the limits keep and its noise, and its id. Grid: row, part."""
    work, founds, logits, parameters, best, temperature = _row(
        work, founds, logits, parameters, row_stride, parts, PARTS
    )
    if temperature <= 0:
        return
    first_key = tl.load(parameters + 6).to(tl.uint32, bitcast=True)
    second_key = tl.load(parameters + 7).to(tl.uint32, bitcast=True)
    smallest = _smallest(work, founds, parameters, best, temperature, parts, PASSES, PARTS)
    typical_p, nearest, mean = _float(parameters, 4), tl.zeros([16], tl.uint32), 0.0
    if typical_p < 1:
        mass, mean = _kept(work, parts, PARTS)
        nearest = _found(work, founds, _TYPICAL, _PASSES - 1, typical_p * mass, parts, PARTS)
    nearest = tl.max(nearest, 0)
    tops = tl.full([COLUMNS], float("-inf"), tl.float32)
    places = tl.zeros([COLUMNS], tl.int32)
    part = tl.program_id(1)
    for at in range(part * PART, tl.minimum(part * PART + PART, vocab), COLUMNS):
        columns, scores, _ = _load(logits, at, vocab, best, temperature, COLUMNS)
        drawn = scores + _noise(columns, first_key, second_key)
        better = (columns < vocab) & (scores >= smallest) & (drawn > tops) & (_nearness(scores, mean) >= nearest)
        places = tl.where(better, columns, places)
        tops = tl.where(better, drawn, tops)
    top, own = tl.max(tops, 0), work + part * _WIDTH
    tl.store(own + _DRAWN, top)
    tl.store(own + _DRAWN_PLACE, tl.min(tl.where(tops == top, places, vocab), 0).to(tl.float32))


@triton.jit
def finish_rows(ids, work, parameters, vocab, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the id of a row; -1 where a number is NaN or the best one is not finite. Grid: row."""
    row = tl.program_id(0)
    work += row.to(tl.int64) * parts * _WIDTH
    tops = _of_parts(work, _TOP, parts, float("-inf"), PARTS)
    places = _of_parts(work, _PLACE, parts, 0.0, PARTS)
    best = tl.max(tops, 0)
    usable = (best > float("-inf")) & (best < float("inf"))
    if usable & (_float(parameters + row * _PARAMETERS, 0) > 0):
        tops = _of_parts(work, _DRAWN, parts, float("-inf"), PARTS)
        places = _of_parts(work, _DRAWN_PLACE, parts, 0.0, PARTS)
        best = tl.max(tops, 0)
    chosen = tl.min(tl.where(tops == best, places.to(tl.int32), vocab), 0)
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


def choose_calls(ids: Tensor, logits: Tensor, draws: Sequence[Draw]) -> list[KernelCall]:
    """Return the launches that choose `ids` [rows] int64 from logits [rows, vocab]; see step.sample."""
    (rows, vocab), parts = logits.shape, triton.cdiv(logits.shape[1], PART)
    grid, samplings = (rows, parts), [draw.sampling for draw in draws if draw.sampling.temperature > 0]
    passes = 4 if logits.dtype == torch.bfloat16 else _PASSES.value
    work = torch.empty(rows, parts, _WIDTH.value, dtype=torch.float32, device=logits.device)
    founds = torch.empty(rows, 3 * _PASSES.value, dtype=torch.int32, device=logits.device)
    parameters = upload(_parameters(draws, vocab), logits.device)
    sizes = {"vocab": vocab, "parts": parts}
    row = sizes | {"work": work, "logits": logits, "row_stride": logits.stride(0)}
    of_row, columns = row | {"founds": founds, "parameters": parameters}, {"PART": PART, "COLUMNS": _COLUMNS}
    tile = {"PARTS": triton.next_power_of_2(parts)}
    constants = columns | tile | {"PASSES": passes}

    def search(of: int, passes: int) -> list[KernelCall]:
        return [
            KernelCall(weigh_parts, grid, of_row | {"step": step}, constants | {"SEARCH": of}, warps=8, stages=2)
            for step in range(passes)
        ]

    def sums(*, kept: bool) -> list[KernelCall]:
        return [KernelCall(sum_parts, grid, of_row, constants | {"KEPT": kept}, warps=8, stages=2)]

    calls = [KernelCall(begin_parts, grid, row, columns, warps=8, stages=2)]
    if any(0 < sampling.top_k < vocab for sampling in samplings):
        calls += search(_COUNT.value, passes)
    if any(sampling.top_p < 1 or sampling.top_n_sigma > 0 for sampling in samplings):
        calls += sums(kept=False)
    if any(sampling.top_p < 1 for sampling in samplings):
        calls += search(_MASS.value, passes)
    if any(sampling.typical_p < 1 for sampling in samplings):
        calls += [*sums(kept=True), *search(_TYPICAL.value, _PASSES.value)]
    if samplings:
        calls.append(KernelCall(draw_parts, grid, of_row, constants, warps=8, stages=2))
    last = sizes | {"ids": ids, "work": work, "parameters": parameters}
    return [*calls, KernelCall(finish_rows, (rows,), last, tile, warps=1, stages=1)]


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
    for call in choose_calls(ids, scores, draws):
        call.launch()
    if scores is not logits:
        # A number that is none counts though the adjustments have replaced it.
        ids.masked_fill_(logits.amax(-1).isfinite().logical_not(), -1)
    return ids
