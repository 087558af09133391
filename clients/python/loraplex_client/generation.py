"""Answers: a stream's pieces, the whole answer, and the fold that makes both from the events of the wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from loraplex.inference.v1 import inference_pb2

from loraplex_client.errors import InternalError


class FinishReason(enum.StrEnum):
    """The reason of an answer's end: its limit of tokens or context, the model's own end, or a stop of the request."""

    LENGTH = "length"
    END = "end"
    STOP = "stop"


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's log probability, and the likeliest tokens at its place as (token id, log probability)."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Choice:
    """A choice of an answer. `stop` is the stop string or stop token id that ended it, if any."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


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

    The last piece of a stream adds nothing and carries the whole in `finished`.
    """

    text: str
    token_ids: tuple[int, ...]
    offset: int
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: Generation | None = None


_REASONS = {
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_END: FinishReason.END,
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
}


@dataclass
class _Growing:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: inference_pb2.Finished | None = None

    def finish(self) -> Choice:
        if self.end is None or self.end.reason not in _REASONS:
            raise InternalError("the stream ended without a reason known to this client")
        which = self.end.WhichOneof("stop")
        return Choice(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=_REASONS[self.end.reason],
            stop=getattr(self.end, which) if which else None,
            logprobs=tuple(self.logprobs),
        )


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
                finished=growing.end is not None,
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
                self._growing(event.finished.choice).end = event.finished
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
        if delta.offset != len(growing.token_ids):
            raise InternalError(f"the stream goes on at token {delta.offset} after {len(growing.token_ids)} tokens")
        logprobs = tuple(map(_logprobs, delta.logprobs))
        growing.texts.append(delta.text)
        growing.token_ids.extend(delta.token_ids)
        growing.logprobs.extend(logprobs)
        return Piece(delta.text, tuple(delta.token_ids), delta.offset, delta.choice, logprobs)

    def _whole(self, summary: inference_pb2.Summary) -> Piece:
        usage, timings = summary.usage, summary.timings
        choices = tuple(growing.finish() for _, growing in sorted(self._choices.items()))
        if not choices:
            raise InternalError("the stream ended without an answer")
        whole = Generation(
            choices=choices,
            usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            timings=Timings(timings.queue, timings.adapter, timings.ttft, timings.decode),
            adapter_revision=summary.adapter_revision,
            continuations=summary.continuations,
            request_id=summary.request_id,
            prompt_logprobs=self._prompt_logprobs,
            adapters=tuple((part.adapter, part.weight) for part in summary.adapters),
        )
        return Piece("", (), len(whole.token_ids), finished=whole)


def _logprobs(token: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.logprob, tuple((other.token_id, other.logprob) for other in token.alternatives))
