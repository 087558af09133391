"""Fitness certificates: how far an adapter's answers on a quantized base are from those on the original base.

The prompts that an adapter is measured with may come with it, in the field `loraplex_certificate_prompts` of its
adapter_config.json (the SDK puts them there from a file `certificate_prompts.jsonl` beside it). As a part of the
configuration they are a part of the revision's digest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from artifacts.errors import ArtifactError

PROMPTS_FIELD = "loraplex_certificate_prompts"
# Maximum number of prompts that come with an adapter, and of a prompt's characters.
_PROMPTS, _PROMPT_CHARACTERS = 64, 4096
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured differences, over `tokens` tokens of the greedy answers to `prompts` prompts on the original base.

    `agreement` is the share of these that are the best token on the quantized base too, after the same tokens. The
    divergences (Kullback-Leibler) are those of the next token's distribution on the quantized base from that on the
    original, in nats. `drawn`: the prompts were drawn from the base, since none came with the adapter.
    """

    prompts: int
    drawn: bool
    tokens: int
    agreement: float
    mean_kl: float
    max_kl: float

    def __post_init__(self) -> None:
        """Raise ValueError for figures that no measurement gives."""
        if self.prompts < 1 or self.tokens < 1:
            raise ValueError("prompts and tokens are counts from 1")
        if not 0 <= self.agreement <= 1:
            raise ValueError(f"agreement {self.agreement} is not a share from 0 to 1")
        if not 0 <= self.mean_kl <= self.max_kl < math.inf:
            raise ValueError(f"mean_kl {self.mean_kl} and max_kl {self.max_kl} are not a mean and a maximum from 0")


@dataclass(frozen=True, slots=True)
class FitnessLimits:
    """The limits that an adapter on a quantized base must keep: least agreement, largest mean divergence in nats."""

    min_agreement: float
    max_kl: float

    def breach(self, figures: Figures) -> str:
        """Return which limits the figures break, with both numbers; empty: none."""
        breaches = []
        if figures.agreement < self.min_agreement:
            breaches.append(f"greedy agreement {figures.agreement:.3g} is below {self.min_agreement:g}")
        if figures.mean_kl > self.max_kl:
            breaches.append(f"mean divergence {figures.mean_kl:.3g} nats is above {self.max_kl:g}")
        return ", ".join(breaches)


def parse_prompts(value: Any) -> tuple[str, ...]:
    """Parse the field's value; None is no prompts. Raises ArtifactError."""
    if value is None:
        return ()
    if not isinstance(value, list) or not 0 < len(value) <= _PROMPTS:
        raise ArtifactError(PROMPTS_FIELD, f"is not a list of 1 to {_PROMPTS} prompts")
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str) or not 0 < len(prompt) <= _PROMPT_CHARACTERS:
            raise ArtifactError(f"{PROMPTS_FIELD}[{index}]", f"is not a text of 1 to {_PROMPT_CHARACTERS} characters")
        if _SURROGATE.search(prompt):
            raise ArtifactError(f"{PROMPTS_FIELD}[{index}]", "has half of a surrogate pair, which is no character")
    return tuple(value)
