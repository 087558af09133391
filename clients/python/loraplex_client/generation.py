"""Answers: a stream's pieces and the whole answer, and the recovery of lost streams; scores, and served models.

The recovery has no transport, so that blocking and async streams share it:

              lost before the first message: Generate again, as `retries` says
    Generate ─┤
              lost after it: Resume with the token and the received ids, at any address that answers, until it ends
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call
from loraplex_client.chat import GrowingCalls, ToolCall, ToolCallPart, message_of
from loraplex_client.errors import (
    InternalError,
    InvalidRequestError,
    LoraplexError,
    RateLimit,
    UnavailableError,
    is_broken,
)
from loraplex_client.retries import Tries


class FinishReason(enum.StrEnum):
    """The reason of an answer's end: its limit of tokens or context, the model's own end, or a stop of the request.

    TOOL_CALLS is the model's own end after calls of tools; CONTENT_FILTER is a content hook's of the cluster.
    """

    LENGTH = "length"
    END = "end"
    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (token id, log probability)."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    """A choice of an answer. `stop` is the stop string or stop token id that ended it, if any.

    `refusal` is why a content hook ended it (CONTENT_FILTER).

    Of a chat, its reasoning and its calls of tools are not in `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    refusal: str = ""

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

    @property
    def total_tokens(self) -> int:
        """Return the tokens of the prompt and of all choices."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class SpeculativeDecoding:
    """The drafts that workers checked, over all choices: steps with one, tokens proposed, those that the model chose.

    `mean_acceptance_length` is the mean number of tokens that such a step gave.
    """

    steps: int
    draft_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float


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
    # Paths of the parts of tools' schemas that calls need not keep to.
    not_enforced: tuple[str, ...] = ()
    # Counts since the last resume; None if no draft was checked.
    speculative_decoding: SpeculativeDecoding | None = None
    # Whether the prompt invoked the activated adapter; False: the base model answered. None: it is no such adapter.
    activated: bool | None = None
    # The limits of `requests` and of `tokens` of which least is left, with this request; none: the plans have none.
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)

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

    `texts` goes with the log probabilities: what each token adds to the text, where it is known.
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
    texts: tuple[str, ...] = ()


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
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """Return the number of the continuation with the highest sum."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].sum)


@dataclass(frozen=True)
class ServedModel:
    """A base model that the router serves; `context_length` counts tokens of prompt and answer together.

    `tasks` are those of generate, embed and classify that it does without an adapter, `labels` its own classifier's.
    `max_rank` is the largest rank of an adapter that a worker takes, 0 where that is not known. `tokenizer_config` is a
    JSON object, empty unless it was asked for.
    """

    name: str
    digest: str
    context_length: int
    tasks: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    max_rank: int = 0
    tokenizer_config: str = ""

    def rank_warning(self, rank: int) -> str:
        """Return a warning if no worker serves adapters of this rank; empty if one does, or it is unknown."""
        if not 0 < self.max_rank < rank:
            return ""
        return f"its rank {rank} is above the {self.max_rank} that workers of {self.name} take (--max-rank)"


# Reasons for which one router refuses a token that another may accept: their keys or versions differ for a while.
_TOKEN_REFUSED = frozenset({"RESUME_TOKEN_INVALID", "RESUME_TOKEN_VERSION"})
_REASONS = {
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_END: FinishReason.END,
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    inference_pb2.FINISH_REASON_CONTENT_FILTER: FinishReason.CONTENT_FILTER,
}


@dataclass(frozen=True)
class Attempt:
    """The next call: its address, and its timeout in seconds."""

    address: str
    call: Call
    timeout_s: float | None


class Recovery:
    """A generation over one or more calls. Raises InternalError if a stream breaks the protocol."""

    def __init__(self, request: inference_pb2.GenerateRequest, tries: Tries) -> None:
        self._request = request
        if not request.spec.request_id:  # With an id, a repeated call takes the first over instead of running twice.
            request.spec.request_id = secrets.token_hex(8)
        self._tries = tries
        self._fold = Fold()
        self._token = ""
        # Whether the current call has brought any event.
        self._came = False
        self.whole: Generation | None = None
        self.rate_limits: Mapping[str, RateLimit] = {}

    def attempt(self) -> Attempt:
        """Return the next call."""
        address, timeout_s = self._tries.begin()
        self._came = False
        call = Call("Generate", self._request)
        if self._token:
            received = self._fold.received()
            call = Call(
                "Resume",
                inference_pb2.ResumeRequest(spec=self._request.spec, resume_token=self._token, received=received),
            )
            self._fold.resumed = True
        return Attempt(address, call, timeout_s)

    def take(self, event: inference_pb2.GenerateEvent) -> Piece | None:
        """Return the piece of an event, if it has one."""
        if not self._came:
            self._came = True
            self._tries.answered()
        self._token = event.resume_token or self._token
        piece = self._fold.take(event)
        if piece is not None and piece.finished is not None:
            self.whole = replace(piece.finished, rate_limits=self.rate_limits)
            return replace(piece, finished=self.whole)
        return piece

    def end(self) -> None:
        """Check that the answer is complete; called when a stream has ended without an error."""
        self._fold.end()

    def lost(self, error: LoraplexError) -> float:
        """Return the seconds to wait after a failed call before the next attempt. Raises if there is none."""
        if not self._is_loss(error) or self._tries.resume_attempts == 0:
            raise error
        return self._tries.failed(error)

    def _is_loss(self, error: LoraplexError) -> bool:
        """Return whether the call may succeed elsewhere or later, because the router or the way to it is lost."""
        if self._fold.begun and not self._token:  # A server that sends no resume tokens.
            return False
        if isinstance(error, UnavailableError):
            return True
        if self._tries.waits(error):
            return not self._came
        if isinstance(error, InvalidRequestError):
            return error.reason in _TOKEN_REFUSED and self._tries.count <= self._tries.others
        return is_broken(error)


@dataclass
class _Growing:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: GrowingCalls = field(default_factory=GrowingCalls)
    ended: Choice | None = None

    def end(self, finished: inference_pb2.Finished) -> Choice:
        if finished.reason not in _REASONS:
            raise InternalError("a choice ended without a reason known to this client")
        which = finished.WhichOneof("stop")
        self.ended = Choice(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=_REASONS[finished.reason],
            stop=getattr(finished, which) if which else None,
            logprobs=tuple(self.logprobs),
            reasoning="".join(self.reasoning),
            tool_calls=self.calls.whole(),
            refusal=finished.refusal,
        )
        return self.ended


class Fold:
    """Turns one stream's events into pieces. Raises InternalError where tokens are missing, doubled or unfinished."""

    def __init__(self) -> None:
        self._choices: dict[int, _Growing] = {}
        self._complete = False
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        # True after a resume, when events may repeat the content of the first stream.
        self.resumed = False

    @property
    def begun(self) -> bool:
        """Return whether anything has arrived."""
        return bool(self._choices)

    def received(self) -> list[inference_pb2.ReceivedTokens]:
        """Return what has arrived of each choice."""
        return [
            inference_pb2.ReceivedTokens(
                choice=choice,
                token_ids=growing.token_ids,
                finished=growing.ended is not None,
                text_bytes=sum(len(text.encode()) for text in growing.texts),
            )
            for choice, growing in sorted(self._choices.items())
        ]

    def take(self, event: inference_pb2.GenerateEvent) -> Piece | None:
        """Return the piece of this event, if it has one."""
        match event.WhichOneof("kind"):
            case "delta":
                return self._grow(event.delta)
            case "finished":
                return self._end(event.finished)
            case "prompt_logprobs":
                self._prompt_logprobs = tuple(map(_logprobs, event.prompt_logprobs.tokens))
            case "summary":
                self._complete = True
                return self._whole(event.summary)
        return None

    def end(self) -> None:
        """Check that the answer is complete; called when the stream has ended without an error."""
        if not self._complete:
            raise InternalError("the stream ended without a summary")

    def _growing(self, choice: int) -> _Growing:
        return self._choices.setdefault(choice, _Growing())

    def _grow(self, delta: inference_pb2.Delta) -> Piece | None:
        growing = self._growing(delta.choice)
        if self.resumed and delta.token_ids and delta.offset + len(delta.token_ids) <= len(growing.token_ids):
            return None
        if growing.ended is not None:
            raise InternalError(f"choice {delta.choice} goes on after its end")
        if delta.offset != len(growing.token_ids):
            raise InternalError(f"the stream goes on at token {delta.offset} after {len(growing.token_ids)} tokens")
        logprobs = tuple(map(_logprobs, delta.logprobs))
        growing.texts.append(delta.text)
        growing.token_ids.extend(delta.token_ids)
        growing.logprobs.extend(logprobs)
        growing.reasoning.append(delta.reasoning)
        try:
            calls = growing.calls.add(delta.tool_calls)
        except IndexError:
            raise InternalError("the stream has arguments of a call that it did not begin") from None
        return Piece(
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            offset=delta.offset,
            choice=delta.choice,
            logprobs=logprobs,
            reasoning=delta.reasoning,
            tool_calls=calls,
            texts=_texts(delta.text, delta.text_lengths),
        )

    def _end(self, finished: inference_pb2.Finished) -> Piece | None:
        growing = self._growing(finished.choice)
        if growing.ended is not None:  # a resumed stream may say it again
            return None
        return Piece("", (), len(growing.token_ids), finished.choice, ended=growing.end(finished))

    def _whole(self, summary: inference_pb2.Summary) -> Piece:
        usage, timings = summary.usage, summary.timings
        choices = tuple(growing.ended for _, growing in sorted(self._choices.items()) if growing.ended)
        if not self._choices:
            raise InternalError("the stream ended without an answer")
        if len(choices) < len(self._choices):
            raise InternalError("the stream ended before its choices did")
        whole = Generation(
            choices=choices,
            usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            timings=Timings(timings.queue, timings.adapter, timings.ttft, timings.decode),
            adapter_revision=summary.adapter_revision,
            continuations=summary.continuations,
            request_id=summary.request_id,
            prompt_logprobs=self._prompt_logprobs,
            adapters=tuple((part.adapter, part.weight) for part in summary.adapters),
            not_enforced=tuple(summary.not_enforced),
            speculative_decoding=_speculative_decoding(summary),
            activated=summary.activated if summary.HasField("activated") else None,
        )
        return Piece("", (), len(whole.token_ids), finished=whole)


def _speculative_decoding(summary: inference_pb2.Summary) -> SpeculativeDecoding | None:
    if not summary.HasField("speculative_decoding"):
        return None
    counts = summary.speculative_decoding
    return SpeculativeDecoding(counts.steps, counts.draft_tokens, counts.accepted_tokens, counts.mean_acceptance_length)


def _texts(text: str, lengths: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token; the last one's includes the rest."""
    ends = [*accumulate(lengths)][:-1]
    return tuple(text[begin:end] for begin, end in pairwise([0, *ends, len(text)])) if lengths else ()


def _logprobs(token: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.logprob, tuple((other.token_id, other.logprob) for other in token.alternatives))
