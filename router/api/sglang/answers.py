"""Conversion of an answer's events to the engine protocol's messages: chunks of ids, and whole choices at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as engine

from router.api.sglang.reasoning import ReasoningCount
from router.request import Delta, Finished, FinishReason, PromptLogprobs, Request, Summary, TokenLogprobs


class EngineAnswer:
    """The answer to one request; `streamed`: its tokens come in chunks too.

    `end` is the token that ends its reasoning, where that is counted.
    """

    def __init__(self, request: Request, prompt_ids: Sequence[int], *, streamed: bool, end: int | None = None) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._streamed = streamed
        self._prompt_logprobs: Any = None
        self._choices = [_Choice(end) for _ in range(request.n)]

    def messages_of(self, event: PromptLogprobs | Delta | Finished | Summary) -> Iterator[Any]:
        """Yield the messages that an event makes."""
        match event:
            case PromptLogprobs():
                start = self._request.prompt_logprobs_start
                self._prompt_logprobs = _of_prompt(self._prompt_ids[start:], event.tokens)
            case Delta() if event.token_ids:
                choice = self._choices[event.choice]
                choice.add(event)
                if self._streamed:
                    yield self._message(chunk=self._chunk(event, choice))
            case Finished():
                self._choices[event.choice].finished = event
            case Summary():
                for index, choice in enumerate(self._choices):
                    yield self._message(complete=self._complete(index, choice, event))

    def _message(self, **response: Any) -> Any:
        return engine.GenerateResponse(request_id=self._request.request_id, **response)

    def _chunk(self, delta: Delta, choice: _Choice) -> Any:
        return engine.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(choice.ids),
            reasoning_tokens=choice.reasoning.tokens,
            output_logprobs=_of_output(delta.token_ids, delta.logprobs),
            # In the first chunk of each choice.
            input_logprobs=self._prompt_logprobs if delta.offset == 0 else None,
            index=delta.choice,
        )

    def _complete(self, index: int, choice: _Choice, summary: Summary) -> Any:
        finished = choice.finished
        return engine.GenerateComplete(
            output_ids=choice.ids,
            finish_reason="length" if finished.reason is FinishReason.LENGTH else "stop",
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=len(choice.ids),
            reasoning_tokens=choice.reasoning.tokens,
            cached_tokens=summary.cached_tokens,
            output_logprobs=_of_output(choice.ids, choice.logprobs),
            input_logprobs=self._prompt_logprobs,
            matched_token_id=finished.stop_token_id,
            matched_stop_str=finished.stop_string,
            index=index,
        )


class _Choice:
    """The tokens of a choice so far, and its end."""

    def __init__(self, end: int | None) -> None:
        self.reasoning = ReasoningCount(end)
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished = Finished(FinishReason.END)

    def add(self, delta: Delta) -> None:
        """Add the tokens of a delta."""
        self.reasoning.add(delta.token_ids)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs


def _of_output(ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    if not logprobs:
        return None
    return engine.OutputLogProbs(
        token_logprobs=[token.logprob for token in logprobs], token_ids=ids, top_logprobs=map(_alternatives, logprobs)
    )


def _of_prompt(ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    """Return the log probabilities of prompt tokens; the prompt's first token has none."""
    values = [engine.InputTokenLogProb(value=token.logprob) for token in logprobs]
    top = [*map(_alternatives, logprobs)]
    first = len(ids) - len(values)
    return engine.InputLogProbs(
        token_logprobs=[engine.InputTokenLogProb()] * first + values,
        token_ids=ids,
        top_logprobs=[engine.TopLogProbs()] * first + top,
    )


def _alternatives(token: TokenLogprobs) -> Any:
    return engine.TopLogProbs(
        values=[logprob for _, logprob in token.alternatives],
        token_ids=[token_id for token_id, _ in token.alternatives],
    )
