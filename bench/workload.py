"""What the engine is asked in bench.engine: many short answers and a few long ones, so that batches empty unevenly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_LONG_EVERY = 8


@dataclass(frozen=True)
class Request:
    """One prompt, how many tokens to answer, and which adapter's answer it is (None: the base model's)."""

    prompt_ids: tuple[int, ...]
    tokens: int
    adapter: int | None


@dataclass(frozen=True)
class Workload:
    """How much is asked: requests, their prompts' tokens, and the answers' tokens (every eighth is long)."""

    requests: int = 32
    prompt: int = 64
    short: int = 10
    long: int = 100

    def draw(self, seed: int, vocabulary: int, adapters: int = 0) -> list[Request]:
        """Random prompts; request i uses adapter (i + i // 8) mod `adapters`, so that the long ones differ too.

        Two draws must not share a seed: the second would find its prompts in the prefix cache.
        """
        chance = random.Random(seed)
        return [
            Request(
                tuple(chance.randrange(5, vocabulary) for _ in range(self.prompt)),
                self.long if i % _LONG_EVERY == 0 else self.short,
                (i + i // _LONG_EVERY) % adapters if adapters else None,
            )
            for i in range(self.requests)
        ]


def answered_tokens(requests: Sequence[Request]) -> int:
    """The tokens that these requests are answered with."""
    return sum(request.tokens for request in requests)
