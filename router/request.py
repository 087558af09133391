"""A request as the router's inside sees it, and what it answers. `router.api.convert` makes these from the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from artifacts.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """When to end an answer; max_tokens None: 128, capped by the context."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """One of several adapters whose changes are added up: its name, or in a Summary its revision's."""

    adapter: str
    weight: float


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. `prompt` is a text, token ids, or a chat."""

    tenant: str
    prompt: Prompt
    prompt_field: str
    request_id: str = ""
    model: str = ""
    adapter: str = ""
    # Instead of `adapter`, several.
    adapters: tuple[WeightedAdapter, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    stopping: Stopping = field(default_factory=Stopping)
    skip_special_tokens: bool = True
    stream_interval: int = 1
    n: int = 1
    # Candidates to choose the n best from, by their mean log probability; n when nobody asks.
    best_of: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Among the tenant's own requests; higher goes first.
    priority: int = 0
    # A hash of all that the client sent: two of one fingerprint are the same request.
    fingerprint: str = ""
    # The W3C trace context of its span; empty: it is not traced.
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """What a client has of one choice; finished: its end too."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False


class FinishReason(StrEnum):
    """Why an answer ended, as its client is told."""

    LENGTH = "length"
    END = "end"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (id, log probability)."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of every prompt token but the first."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The next tokens of an answer and what they add to its text; `logprobs` of each, where they were asked for."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer's end; with STOP, which string or token ended it."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The last message of a stream. Times in seconds."""

    request_id: str
    adapter_revision: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    adapter_s: float
    ttft_s: float
    decode_s: float
    continuations: int
    # Of a weighted set, whose digest `adapter_revision` then is.
    adapters: tuple[WeightedAdapter, ...] = ()


Event = PromptLogprobs | Delta | Finished | Summary


@dataclass(frozen=True, slots=True)
class Message:
    """What a client gets at once; the first of a stream has the resume token."""

    event: Event
    resume_token: str = ""
