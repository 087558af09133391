"""The parts of an answer that engine, worker and router name alike: why it ended, and tokens' log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishKind(StrEnum):
    """The engine's reason for the end of an answer."""

    LENGTH = "length"
    END = "end"
    STOP_TOKEN = "stop_token"
    # The answer's format is complete, and nothing may follow.
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (id, log probability), best first.

    Both are the model's own: of its logits before bias, penalties, temperature and limits.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
