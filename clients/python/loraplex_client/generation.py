"""Answers: a stream's pieces and the whole answer, which `recovery` makes of events; scores, and served models."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from loraplex_client.chat import ToolCall, ToolCallPart, message_of


class FinishReason(enum.StrEnum):
    """The reason of an answer's end: its limit of tokens or context, the model's own end, or a stop of the request.

    TOOL_CALLS is the model's own end after calls of tools.
    """

    LENGTH = "length"
    END = "end"
    STOP = "stop"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (token id, log probability)."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    """A choice of an answer. `stop` is the stop string or stop token id that ended it, if any.

    Of a chat, its reasoning and its calls of tools are not in `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """Return the choice as a message of the chat, for its next turn."""
        return message_of(self.text, self.reasoning, self.tool_calls)


@dataclass(frozen=True)
class Usage:
    """Token counts over all choices; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """The times that the router measured: waiting for a worker, waiting for the adapter, first token, the rest."""

    queue_s: float
    adapter_s: float
    ttft_s: float
    decode_s: float


@dataclass(frozen=True)
class Generation:
    """A finished request. `adapter_revision` is the immutable revision that served it, empty for the base model.

    For several adapters it is the digest of the set, and `adapters` has their revisions, each with its weight.
    `continuations` counts how often the work went on elsewhere after a loss.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    adapter_revision: str
    continuations: int
    request_id: str
    # Log probabilities of every prompt token but the first, if requested.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()
    # The first choice as an object of the response_format, where one was given.
    parsed: Any = None

    @property
    def reasoning(self) -> str:
        """Return the first choice's reasoning."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the first choice's calls of tools."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """Return the first choice as a message of the chat, for its next turn."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """Return the first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the first choice's token ids."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Return the reason of the first choice's end."""
        return self.choices[0].finish_reason

    @property
    def stop(self) -> str | int | None:
        """Return the stop string or stop token id that ended the first choice, if any."""
        return self.choices[0].stop


@dataclass(frozen=True)
class Piece:
    """The content of a stream's message: `offset` tokens of this choice came before.

    The last piece of a choice adds nothing and carries the whole choice in `ended`, while other choices may go on. The
    last piece of a stream adds nothing and carries the whole answer in `finished`.
    """

    text: str
    token_ids: tuple[int, ...]
    offset: int
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: Generation | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()
    ended: Choice | None = None


@dataclass(frozen=True)
class ContinuationScore:
    """A continuation: its ids, the log probability of each, their sum, whether each is the likeliest at its place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum: float
    greedy: tuple[bool, ...]

    @property
    def is_greedy(self) -> bool:
        """Return whether the model's greedy answer begins with the continuation."""
        return all(self.greedy)


@dataclass(frozen=True)
class Scores:
    """The scores of a prompt's continuations, in their order; see Generation for the other fields."""

    scores: tuple[ContinuationScore, ...]
    usage: Usage
    adapter_revision: str
    request_id: str
    adapters: tuple[tuple[str, float], ...] = ()

    @property
    def best(self) -> int:
        """Return the number of the continuation with the highest sum."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].sum)


@dataclass(frozen=True)
class ServedModel:
    """A base model that the router serves; `context_length` counts tokens of prompt and answer together.

    `tasks` are those of generate, embed and classify that it does without an adapter, `labels` its own classifier's.
    """

    name: str
    digest: str
    context_length: int
    tasks: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
