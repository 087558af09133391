"""Attention of a decode step by the KV cache's dtype, on the CPU: `python -m bench.kv_cache`.

8 rows of 1,500 tokens, in the 24 layers of qwen2-0.4b: keys and values are written, and attended to. The dtypes that
are computed in, each with a KV cache of its own dtype and of int8, in turn; the medians in milliseconds.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from bench.models import QWEN2_04B
from loraplex.contracts.artifacts.families import INT8, KvShape
from loraplex.worker.engine.attention.cpu import cpu_plan
from loraplex.worker.engine.attention.paged import AttentionStep, KvCache, LayerCall, RowBlocks

_ROWS, _TOKENS, _BLOCK_SIZE, _ROUNDS = 8, 1500, 16, 15


class _Step:
    """A decode step's attention in all layers, over random keys and values."""

    def __init__(self, dtype: torch.dtype, kept: str) -> None:
        shape, blocks = QWEN2_04B, -(-(_TOKENS + 1) // _BLOCK_SIZE)
        kv = KvShape(shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
        self.token_bytes = kv.token_bytes(dtype.itemsize, kept)
        self._cache = KvCache(kv, _ROWS * blocks, _BLOCK_SIZE, dtype, torch.device("cpu"), int8=kept == INT8)
        for pair in (*self._cache.slots, *self._cache.scales):
            for numbers in pair:
                numbers.random_(-100, 100)
        self._query = torch.randn(_ROWS, shape.heads, shape.head_dim, dtype=dtype)
        self._new = torch.randn(_ROWS, shape.kv_heads, shape.head_dim, dtype=dtype)
        self._tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(_ROWS)]
        self._slots = torch.tensor([row * blocks * _BLOCK_SIZE + _TOKENS for row in range(_ROWS)])

    def run(self) -> float:
        """Return the milliseconds of a step."""
        rows = [RowBlocks(_TOKENS, 1, table[: _TOKENS // _BLOCK_SIZE + 1]) for table in self._tables]
        plan = cpu_plan(rows, self._cache)
        step, scaling = AttentionStep(self._cache, self._slots, plan), self._query.shape[-1] ** -0.5
        start = time.perf_counter()
        for layer in range(QWEN2_04B.layers):
            step.attend(LayerCall(layer, self._query, self._new, self._new, scaling))
        return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Time all cases in turn and print their medians."""
    steps = {(dtype, kept): _Step(dtype, kept) for dtype in (torch.float32, torch.bfloat16) for kept in ("", INT8)}
    times: dict[tuple[torch.dtype, str], list[float]] = {case: [] for case in steps}
    for number in range(_ROUNDS + 1):
        for case, step in steps.items():
            taken = step.run()
            if number:  # the first one compiles
                times[case].append(taken)
    for (dtype, kept), step in steps.items():
        name = str(dtype).removeprefix("torch.")
        taken = median(times[dtype, kept])
        ratio = median(own / other for own, other in zip(times[dtype, ""], times[dtype, kept], strict=True))
        print(f"{name}, KV cache of {kept or name}: {step.token_bytes} bytes a token, {taken:.1f} ms, {ratio:.2f}x")


if __name__ == "__main__":
    main()
