"""Batches with random numbers that attention's kernels are tested with, and what torch makes of them in float32."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention.paged import KvCache, LayerCall
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import NewSequence

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A batch: `decodes` are the positions of rows of one token, `chunks` (position of the first token, count)."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    decodes: tuple[int, ...] = (0, 5, 12)
    chunks: tuple[tuple[int, int], ...] = ((0, 9), (6, 5))
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    int8: bool = False


def cases() -> Iterator[tuple[str, Case]]:
    """Every case with its name."""
    for dim in (8, 24, 64, 80):
        yield f"dim {dim}", Case(dim=dim, value_dim=dim)
    yield "values narrower than keys", Case(dim=24, value_dim=16)
    for heads, kv_heads in ((1, 1), (3, 3), (6, 1), (7, 1), (20, 1), (14, 2)):
        yield f"{heads} heads, {kv_heads} for keys", Case(heads, kv_heads)
    for block_size in (1, 3, 16):
        yield f"blocks of {block_size}", Case(block_size=block_size)
    for window in (1, 5, 8, 64):
        yield f"window {window}", Case(window=window, decodes=(0, 4, 5, 70), chunks=((0, 20), (60, 9)))
    for softcap, sinks in ((1.5, False), (None, True), (1.5, True)):
        yield f"softcap {softcap}, sinks {sinks}", Case(softcap=softcap, sinks=sinks)
        yield f"window 5, softcap {softcap}, sinks {sinks}", Case(window=5, softcap=softcap, sinks=sinks)
    # Splits of 128 positions, and longer ones where 32 of those are not enough.
    splits = Case(2, 1, 16, 16, decodes=(126, 127, 128, 255, 256, 600), chunks=(), sinks=True)
    yield "splits", splits
    yield "splits, window 130", replace(splits, window=130)
    yield "longer splits", Case(1, 1, 16, 16, decodes=(4200,), chunks=())
    # Tiles of 128 lanes: the tokens of one, one less, one more.
    for heads in (1, 4):
        tokens = 128 // heads
        yield (
            f"chunk edges, {heads} heads",
            Case(
                heads,
                1,
                decodes=(3,),
                chunks=((0, tokens), (0, tokens - 1), (7, tokens + 1), (2, 2 * tokens), (130, 2)),
            ),
        )
    int8 = Case(dim=8, value_dim=8, int8=True)
    yield "int8", int8
    yield "int8, window 5, softcap 1.5, sinks", replace(int8, window=5, softcap=1.5, sinks=True)


def quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of keys or values [..., dim] and their scales [...], by torch."""
    scales = numbers.float().abs().amax(-1).clamp(min=2.0**-119) / 127
    return (numbers.float() / scales[..., None]).round().to(torch.int8), scales


class Numbers:
    """Random numbers of a case: in float32 for torch, and in `dtype` on `device` for the kernels."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self._generator = torch.Generator().manual_seed(7)
        self.batch, blocks = _batch(case)
        shape = KvShape(1, case.kv_heads, case.dim, case.value_dim)
        self.exact = KvCache(shape, blocks, case.block_size, torch.float32, CPU, int8=False)
        self.cache = KvCache(shape, blocks, case.block_size, dtype, device, int8=case.int8)
        owned = [slot for row in self.batch.rows for slot in _slots(row, case.block_size)]
        for index, (one, other) in enumerate(zip(self.exact.slots[0], self.cache.slots[0], strict=True)):
            # Blocks of other batches must not matter to the kernels.
            one.zero_()
            one[owned] = self._normal(len(owned), case.kv_heads, one.shape[-1])
            if case.int8:
                codes, scales = quantized(one[owned])
                one[owned] = codes * scales[..., None]
                other.fill_(127)
                other[owned] = codes.to(device)
                self.cache.scales[0][index].fill_(math.nan)
                self.cache.scales[0][index][owned] = scales.to(device)
            else:
                other.fill_(math.nan)
                other[owned] = one[owned].to(device, dtype)
        # Heads before tokens, the order of transformers.
        self.query = self._normal(case.heads, self.batch.tokens, case.dim).transpose(0, 1)
        self.sinks = self._normal(case.heads)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype).float()

    def in_torch(self) -> Tensor:
        """The attention of every token, [tokens, heads, dim] in float32: token by token, head by head."""
        case, out, token = self.case, [], 0
        for row in self.batch.rows:
            slots = _slots(row, case.block_size)
            for position in range(row.start, row.start + row.count):
                first = 0 if case.window is None else max(0, position + 1 - case.window)
                seen = slots[first : position + 1]
                keys, values = (
                    tensor[seen].repeat_interleave(case.heads // case.kv_heads, 1) for tensor in self.exact.slots[0]
                )
                scores = torch.einsum("hd,phd->hp", self.query[token], keys) * 0.3
                if case.softcap is not None:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                if case.sinks:
                    scores = torch.cat([scores, self.sinks[:, None]], 1)
                weights = scores.softmax(1)[:, : len(seen)]
                out.append(torch.einsum("hp,phd->hd", weights, values))
                token += 1
        return torch.stack(out)

    def call(self, tokens: int) -> LayerCall:
        """The kernels' attention of the first tokens. Their keys and values are to come from the cache."""
        query, sinks = (tensor.to(self.device, self.dtype) for tensor in (self.query[:tokens], self.sinks))
        new = query[:, : self.case.kv_heads]
        return LayerCall(
            0,
            query,
            new,
            new[..., : self.case.value_dim],
            0.3,
            self.case.window,
            self.case.softcap,
            sinks if self.case.sinks else None,
        )


def _batch(case: Case) -> tuple[Batch, int]:
    spans = [(start, 1) for start in case.decodes] + list(case.chunks)
    needed = [-(-(start + count) // case.block_size) for start, count in spans]
    blocks = sum(needed) + 3
    free = list(range(blocks))
    random.Random(11).shuffle(free)
    rows = []
    for (start, count), blocks_of_row in zip(spans, needed, strict=True):
        sequence = Sequence(NewSequence("a", (1,) * (start + count)), 0, frozenset())
        sequence.block_table = [free.pop() for _ in range(blocks_of_row)]
        rows.append(Row(sequence, start, count, True))
    return Batch(tuple(rows), len(case.decodes), sum(count for _, count in spans)), blocks


def _slots(row: Row, block_size: int) -> list[int]:
    table = row.sequence.block_table
    return [table[at // block_size] * block_size + at % block_size for at in range(row.start + row.count)]
