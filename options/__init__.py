"""Options of a request that router, queue and engine take alike: how to sample, or which vector to encode a text to.

The public message (`loraplex.inference.v1.Sampling`), the queue and the engine name the fields of sampling alike, so a
new field is declared here once and read by name everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

Task = Literal["embed", "classify"]
# Pooling of hidden states; empty: the model's own. "cls" is the first token's hidden state, "last" the last token's.
Pooling = Literal["", "cls", "mean", "last"]
# Maximum number of token ids whose logits a request may change, and the largest change of one.
LOGIT_BIASES = 300
LOGIT_BIAS_LIMIT = 100.0


class OutOfRangeError(Exception):
    """A sampling field has a value that means nothing; `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a field takes: from `least` to `most`, without `least` itself where `above` is set."""

    least: float
    most: float
    above: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise OutOfRangeError for a value outside; NaN is outside of every range."""
        if not self.least <= value <= self.most or (self.above and value == self.least):
            accepted = "greater than {:g} and at most {:g}" if self.above else "between {:g} and {:g}"
            raise OutOfRangeError(name, f"{value:g} is not {accepted.format(self.least, self.most)}")


def _in_range(neutral: float, least: float, most: float, *, above: bool = False) -> Any:
    return field(default=neutral, metadata={"range": Range(least, most, above)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request. Temperature 0 is greedy; the other defaults change nothing.

    First what changes the logits, greedy or not: `logit_bias` is added to those of single token ids; then the
    repetition penalty (ids of prompt and answer), the frequency and the presence penalty (ids of the answer alone).
    Then temperature, top_k, top_p, min_p and typical_p, in this order.
    """

    temperature: float = _in_range(0.0, 0, 100)
    # 0: no limit.
    top_k: int = _in_range(0, 0, (1 << 32) - 1)
    top_p: float = _in_range(1.0, 0, 1, above=True)
    min_p: float = _in_range(0.0, 0, 1)
    typical_p: float = _in_range(1.0, 0, 1, above=True)
    repetition_penalty: float = _in_range(1.0, 0, 100, above=True)
    frequency_penalty: float = _in_range(0.0, -2, 2)
    presence_penalty: float = _in_range(0.0, -2, 2)
    # Pairs of token id and what is added to its logit, in the order of the ids.
    logit_bias: tuple[tuple[int, float], ...] = ()


RANGES: dict[str, Range] = {
    declared.name: declared.metadata["range"] for declared in fields(SamplingParams) if "range" in declared.metadata
}


def check_sampling(params: SamplingParams) -> None:
    """Raise OutOfRangeError for the first field whose value means nothing."""
    for name, accepted in RANGES.items():
        accepted.check(name, getattr(params, name))
    if len(params.logit_bias) > LOGIT_BIASES:
        raise OutOfRangeError("logit_bias", f"{len(params.logit_bias)} entries; at most {LOGIT_BIASES}")
    for token_id, bias in params.logit_bias:
        if not -LOGIT_BIAS_LIMIT <= bias <= LOGIT_BIAS_LIMIT:
            limit = f"{LOGIT_BIAS_LIMIT:g}"
            raise OutOfRangeError("logit_bias", f"{bias:g} for id {token_id} is not between -{limit} and {limit}")


@dataclass(frozen=True, slots=True)
class Encode:
    """The vector that a sequence asks for instead of an answer.

    "embed": the pooled hidden state of the last layer; "classify": the logits of the classifier's labels, which has its
    own pooling.
    """

    task: Task
    pooling: Pooling = ""
    # Number of tokens at the prompt's end that are the second text of a pair (token type 1); the others have type 0.
    pair_tokens: int = 0
