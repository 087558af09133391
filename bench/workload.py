"""The requests of bench.engine: many short answers and a few long ones, so that batches empty unevenly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_LONG_EVERY = 8


@dataclass(frozen=True)
class Request:
    """A prompt, the number of tokens to answer, and the adapter's number (None for the base model).

    With a `json_schema`, which every answer keeps to, `tokens` is the maximum. With `invoked_at` the adapter is an
    activated one, and this id of the prompt its invocation.
    """

    prompt_ids: tuple[int, ...]
    tokens: int
    adapter: int | None = None
    json_schema: str | None = None
    invoked_at: int = 0


@dataclass(frozen=True)
class Workload:
    """The sizes of a workload: requests, tokens of a prompt, tokens of a short and of a long answer (every eighth)."""

    requests: int = 32
    prompt: int = 64
    short: int = 10
    long: int = 100

    def draw(self, seed: int, vocabulary: int, adapters: int = 0) -> list[Request]:
        """Draw requests with random prompts; request i uses adapter (i + i // 8) mod `adapters`.

        So the long answers use different adapters too. Two draws must not share a seed: the second would find its
        prompts in the prefix cache.
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
    """Return the total tokens of the requests' answers."""
    return sum(request.tokens for request in requests)
