"""Paged attention against one plain softmax per query in float64: windows, grouped heads, scattered blocks."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention.cpu import cpu_plan
from loraplex.worker.engine.attention.paged import AttentionContext, KvCache, LayerCall, fitting_blocks, paged_attention
from loraplex.worker.engine.model.layouts import step_layout
from loraplex.worker.engine.model.runner import step_inputs
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.attention_batches import quantized

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2
CPU = torch.device("cpu")


class Oracle:
    """Sequences with all keys and values they ever had, beside a paged cache that computes the same."""

    def __init__(self, blocks: int = 64, block_size: int = 4, *, int8: bool = False) -> None:
        shape = KvShape(LAYERS, KV_HEADS, DIM, DIM)
        self.cache = KvCache(shape, blocks, block_size, torch.float32, CPU, int8=int8)
        self.free = list(range(blocks))
        random.Random(3).shuffle(self.free)
        self.keys: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def sequence(self, name: str, length: int) -> Sequence:
        sequence = Sequence(NewSequence(name, tuple(range(1, length + 1))), 0, frozenset())
        needed = -(-length // self.cache.block_size)
        sequence.block_table = [self.free.pop() for _ in range(needed)]
        self.keys[name] = torch.empty(LAYERS, 0, KV_HEADS, DIM)
        self.values[name] = torch.empty(LAYERS, 0, KV_HEADS, DIM)
        return sequence

    def step(self, rows: list[tuple[Sequence, int]], window: int | None = None, **score: Any) -> None:
        """Compute the next `count` tokens of each sequence, the single ones first; compare all outputs."""
        rows.sort(key=lambda row: row[1] > 1)
        batch = Batch(
            tuple(Row(sequence, sequence.computed, count, True) for sequence, count in rows),
            sum(count == 1 for _, count in rows),
            sum(count for _, count in rows),
        )
        inputs = step_inputs(step_layout(batch, self.cache.block_size), self.cache, CPU)
        context = AttentionContext()
        with context.during(inputs.attention):
            for layer in range(LAYERS):
                q, k, v = (torch.randn(1, heads, batch.tokens, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
                module: Any = SimpleNamespace(layer_idx=layer, attention_context=context)
                out, _ = paged_attention(module, q, k, v, None, scaling=0.3, sliding_window=window, **score)
                assert out.shape == (1, batch.tokens, HEADS, DIM)
                qkv = (q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1))
                self._compare(batch, layer, qkv, out[0], window, **score)
        for sequence, count in rows:
            sequence.computed += count

    def _compare(
        self,
        batch: Batch,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        window: int | None,
        **score: Any,
    ) -> None:
        q, k, v = qkv
        first = 0
        for row in batch.rows:
            name, stop = row.sequence.sequence_id, first + row.count
            keys = torch.cat([self.keys[name][layer, : row.start], self._kept(k[first:stop])])
            values = torch.cat([self.values[name][layer, : row.start], self._kept(v[first:stop])])
            ends = [row.start + index + 1 for index in range(row.count)]
            begins = [0 if window is None else max(0, end - window) for end in ends]
            expected = [
                one_query(query, keys[begin:end], values[begin:end], **score)
                for query, begin, end in zip(q[first:stop], begins, ends, strict=True)
            ]
            torch.testing.assert_close(out[first:stop].double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
            self._remember(name, layer, keys, values)
            first = stop

    def _kept(self, numbers: Tensor) -> Tensor:
        """Keys or values as the cache gives them back."""
        if not self.cache.scales:
            return numbers
        codes, scales = quantized(numbers)
        return codes * scales[..., None]

    def _remember(self, name: str, layer: int, keys: Tensor, values: Tensor) -> None:
        for store, tensor in ((self.keys, keys), (self.values, values)):
            if store[name].shape[1] < len(tensor):
                store[name] = torch.cat(
                    [store[name], torch.zeros(LAYERS, len(tensor) - store[name].shape[1], KV_HEADS, DIM)], 1
                )
            store[name][layer, : len(tensor)] = tensor


def one_query(
    query: Tensor, keys: Tensor, values: Tensor, softcap: float | None = None, s_aux: Tensor | None = None
) -> Tensor:
    """Attention of one query [heads, dim] over keys and values [n, kv_heads, dim]."""
    shared = HEADS // KV_HEADS
    keys, values = (tensor.double().repeat_interleave(shared, dim=1) for tensor in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query.double(), keys) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double()[:, None]], 1)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(keys)], values)


@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize(("block_size", "int8"), [(1, False), (4, False), (16, False), (4, True)])
def test_chunks_beside_decodes(window: int | None, block_size: int, int8: bool) -> None:
    torch.manual_seed(0)
    oracle = Oracle(blocks=400, block_size=block_size, int8=int8)
    a, b, c, d = (oracle.sequence(name, 80) for name in "abcd")
    oracle.step([(a, 7), (b, 1)], window)
    oracle.step([(a, 1), (b, 1), (c, 33)], window)
    oracle.step([(a, 5), (b, 1), (c, 20), (d, 2)], window)
    for _ in range(6):
        oracle.step([(a, 1), (b, 1), (c, 1), (d, 1)], window)
    oracle.step([(d, 40)], window)
    oracle.step([(c, 1)], window)


@pytest.mark.parametrize(
    ("window", "int8"),
    [
        (None, False),
        (100, False),
        (100, True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((3, False), (64, False), (333, False), (None, True))
        ),
    ],
)
def test_long_chunks(window: int | None, int8: bool) -> None:
    """Longer than a block of queries, one more and one less; from the beginning and later; few tokens over many."""
    torch.manual_seed(5)
    oracle = Oracle(blocks=400, int8=int8)
    a, b = oracle.sequence("a", 560), oracle.sequence("b", 400)
    for count in (150, 64, 65, 63, 7, 8, 1, 130, 2):
        oracle.step([(a, count), (b, 1)], window)
    oracle.step([(b, 300)], window)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcaps_and_sinks(window: int | None, softcap: float | None, sinks: bool) -> None:
    torch.manual_seed(4)
    score = {"softcap": softcap, "s_aux": torch.randn(HEADS) if sinks else None}
    oracle = Oracle(blocks=100)
    a, b, c = (oracle.sequence(name, 60) for name in "abc")
    oracle.step([(a, 7), (b, 1)], window, **score)
    oracle.step([(a, 1), (b, 30), (c, 3)], window, **score)
    oracle.step([(a, 5), (b, 1), (c, 1)], window, **score)
    oracle.step([(a, 1), (b, 1), (c, 1)], window, **score)


def test_decodes_of_very_uneven_lengths() -> None:
    """They are gathered in groups, and come back in their order."""
    torch.manual_seed(1)
    oracle = Oracle(blocks=200)
    lengths = [90, 3, 40, 1, 88, 17, 2, 44]
    sequences = [oracle.sequence(f"s{number}", 100) for number in range(len(lengths))]
    oracle.step(list(zip(sequences, lengths, strict=True)))
    for _ in range(3):
        oracle.step([(sequence, 1) for sequence in sequences])


def test_what_an_earlier_owner_left_in_a_block_is_not_seen() -> None:
    torch.manual_seed(2)
    oracle = Oracle(blocks=12)
    for keys, values in oracle.cache.slots:
        keys[: 12 * 4] = math.nan
        values[: 12 * 4] = math.inf
    a, b = oracle.sequence("a", 20), oracle.sequence("b", 20)
    oracle.step([(a, 6), (b, 1)])
    oracle.step([(a, 1), (b, 9)])
    for _ in range(8):
        oracle.step([(a, 1), (b, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_torch(dtype: torch.dtype) -> None:
    """To the bit, for odd widths, magnitudes near the ends of float32, and numbers that are none."""
    torch.manual_seed(6)
    shape = KvShape(1, 2, 24, 7)
    cache = KvCache(shape, 4, 4, dtype, CPU, int8=True)
    key, value = (torch.randn(2, 9, dim).to(dtype).transpose(0, 1) for dim in (24, 7))
    for token, factor in enumerate((0, 1e-30, 1e-37, 1e-41, 1e30, 1e38)):
        key[token, 0] = torch.randn(24).clamp(-3, 3) * factor
    key[7, 0, 3], value[7, 1, 2], key[8, 1, 5] = math.nan, -math.inf, math.inf
    slots = torch.tensor([3, 17, 2, 7, 11, 0, 12, 8, 5])
    cpu_plan([], cache).quantize(LayerCall(0, key, key, value, 1.0), slots, cache)
    for numbers, codes, scales in zip((key, value), cache.slots[0], cache.scales[0], strict=True):
        expected, expected_scales = quantized(numbers)
        sound = expected_scales.isfinite()
        assert int(sound.sum()) == (16 if numbers is key else 17)
        assert torch.equal(scales[slots][sound], expected_scales[sound])
        assert torch.equal(codes[slots][sound], expected[sound])
        assert not scales[slots][~sound].isfinite().any()


def test_what_would_be_ignored_is_refused() -> None:
    oracle = Oracle()
    tensor = torch.zeros(1, 2, 1, DIM)
    context = AttentionContext()
    module: Any = SimpleNamespace(layer_idx=0, attention_context=context)
    with pytest.raises(ValueError, match="outside a step"):
        paged_attention(module, tensor, tensor, tensor, None)
    batch = Batch((Row(oracle.sequence("a", 4), 0, 1, True),), 1, 1)
    with (
        context.during(step_inputs(step_layout(batch, oracle.cache.block_size), oracle.cache, CPU).attention),
        pytest.raises(ValueError, match="with a mask"),
    ):
        paged_attention(module, tensor, tensor, tensor, torch.zeros(1))


def test_how_many_blocks_fit() -> None:
    mega = 1 << 20
    # A quarter of the memory on the CPU, and no more than the rows can use.
    assert fitting_blocks(400 * mega, 1024, 16, rows=64, context=32768, device=CPU) == 100 * mega // 16384
    assert fitting_blocks(1 << 50, 1024, 16, rows=4, context=2048, device=CPU) == 4 * 2048 // 16
    assert fitting_blocks(1 << 50, 1024, 16, rows=4, context=131072, device=CPU) == 131072 // 16
    assert fitting_blocks(1 << 50, 1024, 16, rows=4, context=131072, device=torch.device("cuda")) == 4 * 131072 // 16
    assert fitting_blocks(0, 1024, 16, rows=4, context=2048, device=CPU) == 0
