"""Requests and their answers' messages, inside the router; `loraplex.router.api` makes them from the wire, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.options import (
    NO_DRAFTS,
    DraftCounts,
    FinishReason,
    Pooling,
    SamplingParams,
    Task,
    TokenLogprobs,
)
from loraplex.runtime.rpc.errors import RateLimits


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's message made; `arguments` is a JSON object, or any text in place of one."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A turn of a chat; its text is `content`, or `parts`."""

    role: str
    content: str = ""
    parts: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema, or empty.

    `strict`: a schema that cannot be enforced in full is refused; otherwise arguments keep to what can be.
    """

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


class ToolMode(StrEnum):
    """The rule for calls of tools in an answer: as the model likes, none, or at least one."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with its tools; `tool_name` is the only tool that may be called, where a request names one."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_mode: ToolMode = ToolMode.AUTO
    tool_name: str = ""
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    # A JSON object of further variables for the template, or empty.
    template_args: str = ""
    # Maximum tokens of reasoning; None: no limit.
    thinking_token_budget: int | None = None


# Tokens of an answer where neither request nor adapter nor model sets a maximum; fewer where the context ends before.
DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Stopping:
    """Conditions that end an answer.

    `max_tokens` None: the adapter's number, the model's, or `default_max_tokens`, capped by the context. With
    `cap_max_tokens` the context caps a request's own number too, which is refused otherwise.
    """

    max_tokens: int | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    cap_max_tokens: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """A part of a weighted set of adapters: the adapter's name, or in a Summary its revision's."""

    adapter: str
    weight: float


def adapter_names(adapter: AdapterRef | None) -> tuple[str, tuple[WeightedAdapter, ...]]:
    """Return the revision of a job's adapter, or the digest of a set, and the set's parts; empty for the base model."""
    if adapter is None:
        return "", ()
    return adapter.revision, tuple(WeightedAdapter(part.adapter.revision, part.weight) for part in adapter.parts)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of turning a prompt into ids; None is the default of the prompt's kind.

    `truncate_to` is the maximum number of tokens that are kept, the last ones; 0: as many as the context leaves.
    """

    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    truncate_to: int | None = None


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client. `prompt` is a text, token ids, or a chat."""

    tenant: str
    prompt: Prompt
    prompt_field: str
    request_id: str = ""
    model: str = ""
    adapter: str = ""
    # A weighted set instead of `adapter`.
    adapters: tuple[WeightedAdapter, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # The names of its fields that the client has set; the model may have values for the others.
    sampling_set: frozenset[str] = frozenset()
    seed: int | None = None
    # Texts that the answers cannot have; their ids go into the job's sampling.
    bad_words: tuple[str, ...] = ()
    stopping: Stopping = field(default_factory=Stopping)
    skip_special_tokens: bool = True
    # True if the tokens that make a stop string are delivered too, as ids.
    keep_stop: bool = False
    # True if the prompt's text comes in front of each answer.
    echo: bool = False
    stream_interval: int = 1
    n: int = 1
    # Number of candidates from which the n with the best mean log probability are chosen; n by default.
    best_of: int = 1
    logprobs: int | None = None
    # Ids whose log probabilities are wanted, as many as `logprobs`; empty: those of the likeliest ids.
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    # The first prompt token whose log probabilities are wanted, counted from 0.
    prompt_logprobs_start: int = 0
    prompt_options: PromptOptions = PromptOptions()
    # Rank among the tenant's own requests; higher goes first.
    priority: int = 0
    # Whether workers may draft tokens.
    speculate: bool = True
    # The conversation or user whose requests get the same revision under a rollout; empty: the request alone.
    session_id: str = ""
    # True if the base model may answer where the prompt does not have the adapter's invocation.
    allow_inactive: bool = False
    # Number of the prompt's ids before a continuation that is scored: the adapter is invoked among these. None: of all.
    scored_from: int | None = None
    # The grammar that the answers keep to, and the field of the request that it was made of; empty: none.
    grammar: str = ""
    format_field: str = ""
    # Hash of the whole message: two requests with the same fingerprint are the same request.
    fingerprint: str = ""
    # Time of the wall clock in seconds that a chat template sees, also where the request is resumed.
    rendered_at_s: float = 0.0
    # W3C trace context of the request's span; empty: it is not traced.
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """The part of a choice that the client has already; finished: its end too."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False
    # Bytes of its text in UTF-8, an echoed prompt included; None: the client has the text of these ids.
    text_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of every prompt token but the first."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call of a tool: the first has its id and name, and each the next characters of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next tokens of an answer and the text that they add; `logprobs` of each, where the request asks for them.

    Reasoning and calls of tools are not in `text`. `text_lengths` goes with the log probabilities: the number of
    characters that each token adds, where it is known.
    """

    offset: int
    token_ids: tuple[int, ...]
    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    text_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer; with STOP, the string or token that ended it, with CONTENT_FILTER, the hook's reason."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    choice: int = 0
    refusal: str = ""


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
    # Parts of a weighted set; `adapter_revision` is then the digest of the set.
    adapters: tuple[WeightedAdapter, ...] = ()
    # Paths of the parts of tools' schemas that calls need not keep to.
    not_enforced: tuple[str, ...] = ()
    drafts: DraftCounts = NO_DRAFTS
    # Whether the prompt invoked the activated adapter that the request names; None: it names another adapter, or none.
    activated: bool | None = None
    # The caller's limits, of a call without a stream.
    rate_limits: RateLimits = field(default_factory=dict)


Event = PromptLogprobs | Delta | Finished | Summary


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a stream; the first has the resume token."""

    event: Event
    resume_token: str = ""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are encoded as one sequence."""

    first: str
    second: str


# A text, a pair of texts, or the ids of one.
EncodeInput = str | TextPair | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """A client's request for a vector of each of its inputs; other fields as in Request.

    `fields` has the name of each input in the client's message. `truncate` cuts texts that are too long.
    """

    tenant: str
    task: Task
    inputs: tuple[EncodeInput, ...]
    fields: tuple[str, ...]
    pooling: Pooling = ""
    request_id: str = ""
    model: str = ""
    adapter: str = ""
    adapters: tuple[WeightedAdapter, ...] = ()
    truncate: bool = False
    priority: int = 0
    traceparent: str = ""
