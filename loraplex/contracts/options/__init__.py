"""Declares what router, queue and engine name alike: a request's options, why its answer ended, log probabilities.

The public message (`loraplex.inference.v1.Sampling`), the queue and the engine name the fields of sampling alike, so a
new field is declared here once and read by name everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

Task = Literal["embed", "classify"]
# Pooling of hidden states; empty: the model's own. "cls" is the first token's hidden state, "last" the last token's.
Pooling = Literal["", "cls", "mean", "last"]
# Maximum number of token ids whose logits a request may change, and the largest change of one.
LOGIT_BIASES = 300
LOGIT_BIAS_LIMIT = 100.0
# Maximum number of token ids that a request may restrict its answer to.
ALLOWED_TOKEN_IDS = 4_096
# Maximum number of token sequences that a request forbids, two for each of its bad words, and of the ids in one.
BAD_WORDS = 128
BAD_WORD_IDS = 512


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
class DraftCounts:
    """The drafts of next tokens that were checked: steps with one, tokens proposed, and those of them that came."""

    steps: int = 0
    tokens: int = 0
    accepted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Return the mean number of tokens of such a step, the one after the accepted ones included; 0 without any."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.steps + other.steps, self.tokens + other.tokens, self.accepted + other.accepted)


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request. Temperature 0 is greedy; the other defaults change nothing.

    First what changes the logits, greedy or not: `logit_bias` is added to those of single token ids; then the
    repetition penalty (ids of prompt and answer), the frequency and the presence penalty (ids of the answer alone);
    ids outside of `allowed_token_ids` cannot come.
    Then temperature, top_k, top_p, min_p, top_n_sigma and typical_p, in this order.
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
    # The seed of the noise, 64 bits.
    seed: int = 0
    # 0: no limit.
    top_n_sigma: float = _in_range(0.0, 0, 100)
    # The token ids that can come, ascending; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    # Token sequences that an answer cannot have: the last id of one cannot come after its other ids.
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    # Log probabilities are of the distribution that tokens are drawn from, instead of the model's own.
    processed_logprobs: bool = False

    @property
    def penalizes(self) -> bool:
        """Tell whether the choice of a token depends on the ids before it."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusts_logits(self) -> bool:
        """Tell whether the logits themselves change, and with them greedy answers."""
        return self.penalizes or bool(self.logit_bias) or bool(self.allowed_token_ids)


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """Options that end an answer; counts are of the whole answer, over all attempts."""

    # 0: the prompt's log probabilities or its vector are all that is asked for.
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    # With it neither the model's end tokens nor `end_ids`, those of the adapter, end the answer.
    ignore_eos: bool = False
    end_ids: tuple[int, ...] = ()


RANGES: dict[str, Range] = {
    declared.name: declared.metadata["range"] for declared in fields(SamplingParams) if "range" in declared.metadata
}


def check_sampling(params: SamplingParams) -> None:
    """Raise OutOfRangeError for the first field whose value means nothing."""
    for name, accepted in RANGES.items():
        accepted.check(name, getattr(params, name))
    if len(params.allowed_token_ids) > ALLOWED_TOKEN_IDS:
        number = len(params.allowed_token_ids)
        raise OutOfRangeError("allowed_token_ids", f"{number} ids; at most {ALLOWED_TOKEN_IDS}")
    if len(params.bad_word_ids) > BAD_WORDS:
        raise OutOfRangeError("bad_words", f"{len(params.bad_word_ids)} token sequences; at most {BAD_WORDS}")
    if not all(0 < len(ids) <= BAD_WORD_IDS for ids in params.bad_word_ids):
        raise OutOfRangeError("bad_words", f"a word has 1 to {BAD_WORD_IDS} tokens")
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


class FinishReason(StrEnum):
    """The reason of an answer's end."""

    LENGTH = "length"
    END = "end"
    # A stop token; a stop string is the router's to see.
    STOP = "stop"
    # Of an engine alone: the answer's format is complete, and nothing may follow; or the answer has failed.
    COMPLETE = "complete"
    FAILED = "failed"
    # Of a router alone: the answer has calls of tools; or a content hook refused what comes next.
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


# Reasons that clients get.
CLIENT_REASONS = tuple(one for one in FinishReason if one.name not in {"COMPLETE", "FAILED"})


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (id, log probability), best first.

    Both are the model's own, of its logits before bias, penalties, temperature and limits, unless `processed_logprobs`.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
