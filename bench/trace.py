"""The published multi-LoRA trace (S-LoRA's, MLSys 2024), drawn in its order from one seed.

adapter = floor(n * power(alpha))      alpha 1 is uniform, small is skewed
prompt, answer = uniform lengths
gap = Gamma(shape 1 / cv^2, scale cv^2 / rate)
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from bench.workload import Request

SEED = 42


@dataclass(frozen=True)
class Trace:
    """A trace's parameters: `adapters` in use, lengths in [low, high), requests a second, coefficient of variation.

    A closed loop ignores the rate.
    """

    adapters: int
    requests: int
    lengths: tuple[int, int]
    alpha: float = 1.0
    rate: float = 1.0
    cv: float = 1.0


@dataclass(frozen=True)
class Arrival:
    """A request and its arrival time in seconds from the start."""

    at_s: float
    request: Request


def draw(trace: Trace, vocabulary: int, prompts: int) -> list[Arrival]:
    """Draw the trace's requests. `prompts` seeds their ids; with different seeds, runs share no prefix."""
    state = np.random.RandomState(SEED)
    adapters = np.floor(trace.adapters * state.power(trace.alpha, trace.requests)).astype(int)
    inputs = state.randint(*trace.lengths, trace.requests)
    outputs = state.randint(*trace.lengths, trace.requests)
    gaps = state.gamma(1 / trace.cv**2, trace.cv**2 / trace.rate, trace.requests)
    chance = random.Random(prompts)
    return [
        Arrival(float(at_s), Request(random_ids(chance, int(tokens), vocabulary), int(answer), int(adapter)))
        for at_s, adapter, tokens, answer in zip(np.cumsum(gaps), adapters, inputs, outputs, strict=True)
    ]


def random_ids(chance: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    """Draw `count` token ids from 5 on; lower ids may be special tokens."""
    return tuple(chance.randrange(5, vocabulary) for _ in range(count))


def random_request(seed: int, prompt: int, tokens: int, adapter: int, vocabulary: int) -> Request:
    """Draw a single request."""
    return Request(random_ids(random.Random(seed), prompt, vocabulary), tokens, adapter)
