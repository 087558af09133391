"""Recovery of lost streams, without a transport, so that blocking and async streams share it.

          lost before the first message: Generate again, as `retries` says
Generate ─┤
          lost after it: Resume with the token and the received ids, at any address that answers, until it ends
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from loraplex.inference.v1 import inference_pb2

from loraplex_client.calls import Call
from loraplex_client.chat import GrowingCalls
from loraplex_client.errors import InternalError, InvalidRequestError, LoraplexError, UnavailableError, is_broken
from loraplex_client.generation import Choice, FinishReason, Generation, Piece, Timings, TokenLogprobs, Usage
from loraplex_client.retries import Tries

# Reasons for which one router refuses a token that another may accept: their keys or versions differ for a while.
_TOKEN_REFUSED = frozenset({"RESUME_TOKEN_INVALID", "RESUME_TOKEN_VERSION"})
_REASONS = {
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_END: FinishReason.END,
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
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
            self.whole = piece.finished
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
        )
        return Piece("", (), len(whole.token_ids), finished=whole)


def _logprobs(token: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.logprob, tuple((other.token_id, other.logprob) for other in token.alternatives))
