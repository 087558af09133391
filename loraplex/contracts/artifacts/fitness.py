"""Statements about a revision: the calibration of its decisions, and how far its answers on a quantized base are from
those on the original base, its fitness certificates.

An adapter's own prompts are judged by whole answers: by how many are right, where the prompts have expected answers,
else by how many are equal. Prompts that were drawn from the base are judged by tokens, as free text is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.contracts.artifacts import ArtifactError

# Prompts that an adapter is measured with on a quantized base. The SDK puts them there from a file
# `certificate_prompts.jsonl` beside it.
PROMPTS_FIELD = "loraplex_certificate_prompts"
# Maximum number of prompts that come with an adapter, and of a prompt's and of an answer's characters.
_PROMPTS, _CHARACTERS = 64, 4096
_ROLES = ("system", "developer", "user", "assistant")
_SURROGATE = re.compile("[\ud800-\udfff]")
# The normal distribution's quantile of a 95% interval.
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or a chat's messages, each with `role` and `content`; and the expected answer, empty if there is none."""

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    answer: str = ""


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Parse the prompts that an adapter is certified with; None is none. Raises ArtifactError."""
    if value is None:
        return ()
    if not isinstance(value, list) or not 0 < len(value) <= _PROMPTS:
        raise ArtifactError(PROMPTS_FIELD, f"is not a list of 1 to {_PROMPTS} prompts")
    prompts = tuple(_prompt(f"{PROMPTS_FIELD}[{index}]", item) for index, item in enumerate(value))
    answered = [bool(prompt.answer) for prompt in prompts]
    if any(answered) and not all(answered):
        raise ArtifactError(
            f"{PROMPTS_FIELD}[{answered.index(False)}]", "has no answer, but others do; give all of them one, or none"
        )
    return prompts


def _prompt(field: str, item: Any) -> Prompt:
    if isinstance(item, str):
        return Prompt(_text(field, item))
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise ArtifactError(field, "is neither a text nor an object with prompt or messages")
    answer = _text(f"{field}.answer", item["answer"]) if item.get("answer") is not None else ""
    if "prompt" in item:
        return Prompt(_text(f"{field}.prompt", item["prompt"]), answer=answer)
    messages = item["messages"]
    if not isinstance(messages, list) or not messages:
        raise ArtifactError(f"{field}.messages", "is not a list of messages")
    parsed = tuple(_message(f"{field}.messages[{index}]", message) for index, message in enumerate(messages))
    if sum(len(message["content"]) for message in parsed) > _CHARACTERS:
        raise ArtifactError(f"{field}.messages", f"have more than {_CHARACTERS} characters")
    return Prompt(messages=parsed, answer=answer)


def _message(field: str, message: Any) -> Mapping[str, str]:
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        raise ArtifactError(field, "is not an object with role and content alone")
    if message["role"] not in _ROLES:
        raise ArtifactError(f"{field}.role", f"is not one of {', '.join(_ROLES)}")
    return {"role": message["role"], "content": _text(f"{field}.content", message["content"])}


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _CHARACTERS:
        raise ArtifactError(field, f"is not a text of 1 to {_CHARACTERS} characters")
    if _SURROGATE.search(value):
        raise ArtifactError(field, "has half of a surrogate pair, which is not a character")
    return value


def is_right(answer: str, expected: str) -> bool:
    """Tell whether an answer is the expected one: the same text, without white space around it, or the same JSON."""
    if answer.strip() == expected.strip():
        return True
    try:
        values = json.loads(answer), json.loads(expected)
    except (ValueError, RecursionError):
        return False
    # Compare texts of JSON: in Python 1 and True are equal.
    first, second = (json.dumps(value, sort_keys=True) for value in values)
    return first == second


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a share, given `count` of `total` (Wilson 1927)."""
    share, z2 = count / total, _Z * _Z / total
    middle, half = share + z2 / 2, _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured differences between the greedy answers to `prompts` prompts on the original and the quantized base.

    `agreement` is the share of the original answers' `tokens` that are the best token on the quantized base too, after
    the same tokens. The divergences (Kullback-Leibler) are those of the next token's distribution on the quantized base
    from that on the original, in nats. `drawn`: the prompts were drawn from the base, since none came with the adapter.

    `same_answers` counts the whole answers that are equal; None in certificates of before they were counted. Of
    `expected_answers` prompts the right answer is known; `right_original` and `right_quantized` gave it.
    """

    prompts: int
    drawn: bool
    tokens: int
    agreement: float
    mean_kl: float
    max_kl: float
    same_answers: int | None = None
    expected_answers: int = 0
    right_original: int = 0
    right_quantized: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for figures that no measurement gives."""
        if self.prompts < 1 or self.tokens < 1:
            raise ValueError("prompts and tokens are counts from 1")
        if not 0 <= self.agreement <= 1:
            raise ValueError(f"agreement {self.agreement} is not a share from 0 to 1")
        if not 0 <= self.mean_kl <= self.max_kl < math.inf:
            raise ValueError(f"mean_kl {self.mean_kl} and max_kl {self.max_kl} are not a mean and a maximum from 0")
        for name, of in (
            ("same_answers", self.prompts),
            ("expected_answers", self.prompts),
            ("right_original", self.expected_answers),
            ("right_quantized", self.expected_answers),
        ):
            if (getattr(self, name) or 0) > of:
                raise ValueError(f"{name} {getattr(self, name)} is more than {of}")

    @property
    def by_answers(self) -> bool:
        """Return whether whole answers are judged, instead of tokens."""
        return not self.drawn and self.same_answers is not None

    @property
    def judged(self) -> tuple[int, int]:
        """Return the count that is judged, and of how many: right answers, equal ones, or equal tokens."""
        if not self.by_answers:
            return round(self.agreement * self.tokens), self.tokens
        if self.expected_answers:
            return self.right_quantized, self.expected_answers
        return self.same_answers or 0, self.prompts


@dataclass(frozen=True, slots=True)
class CalibrationFigures:
    """The temperature of decisions, and its effect on `questions` whose right labels are known.

    `ece`: expected calibration error; `nll`: mean negative log likelihood of the right labels, in nats.
    """

    temperature: float
    questions: int
    ece_before: float
    ece_after: float
    nll_before: float
    nll_after: float

    def __post_init__(self) -> None:
        """Raise ValueError for figures that no fit gives."""
        shares = all(0 <= error <= 1 for error in (self.ece_before, self.ece_after))
        if not (0 < self.temperature < math.inf and self.questions >= 1 and shares):
            raise ValueError("has a temperature above 0, questions from 1, and ece_before and ece_after from 0 to 1")
        if not 0 <= self.nll_after <= self.nll_before < math.inf:
            raise ValueError(f"nll_after {self.nll_after} is not from 0 to nll_before {self.nll_before}")


@dataclass(frozen=True, slots=True)
class Breach:
    """The limits that figures break, with both numbers, and whether more prompts could hardly change that."""

    text: str
    certain: bool


@dataclass(frozen=True, slots=True)
class FitnessLimits:
    """The limits that an adapter on a quantized base must keep.

    With prompts of its own `max_drop`, the largest share of the answers that may be lost: of right ones, or of equal
    ones where no answers are expected. Otherwise the least agreement, and the largest mean divergence in nats.
    """

    min_agreement: float
    max_kl: float
    max_drop: float

    def breach(self, figures: Figures) -> Breach | None:
        """Return which limits the figures break; None: they keep all.

        Answers beyond the limit are certain where the 95% interval of their share is, too. Drawn prompts are not what
        the adapter is used for, so they never are.
        """
        if figures.by_answers:
            return self._breach_of_answers(figures)
        breaches = []
        if figures.agreement < self.min_agreement:
            breaches.append(f"greedy agreement {figures.agreement:.3g} is below {self.min_agreement:g}")
        if figures.mean_kl > self.max_kl:
            breaches.append(f"mean divergence {figures.mean_kl:.3g} nats is above {self.max_kl:g}")
        return Breach(", ".join(breaches), not figures.drawn) if breaches else None

    def _breach_of_answers(self, figures: Figures) -> Breach | None:
        kept, total = figures.judged
        before, words = total, f"{kept} of {total} answers are the same"
        if figures.expected_answers:
            before, words = figures.right_original, f"{kept} of {total} answers are right"
            if not before:
                return Breach(f"{words}, and none on the original: see whether the expected answers fit", certain=False)
            words += f", {before} on the original"
        least = before - self.max_drop * total
        if kept >= least - 1e-9:  # a drop of 0.05 allows 1 of 20, whatever the rounding
            return None
        low, high = wilson_interval(kept, total)
        drop = f"a drop of {(before - kept) / total:.3g} is above {self.max_drop:g}"
        return Breach(f"{words} (95% interval {low:.2f} to {high:.2f}): {drop}", certain=high * total < least)
