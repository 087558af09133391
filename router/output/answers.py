"""All answers of one request: as they come, or the best of more candidates than were asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from router.dispatch.routed_job import RoutedJob
from router.output.answer import Answer
from router.request import Delta, Event, Finished, PromptLogprobs, Received, Request, TokenLogprobs
from router.text.tokenizer import Text
from rpc.errors import Aborted


class Answers:
    """Reads a job's tokens into the events that its client gets: all, or what comes after what it has `received`."""

    def __init__(
        self, request: Request, text: Text, routed: RoutedJob, received: Mapping[int, Received] | None = None
    ) -> None:
        self._request = request
        self._track = routed
        self._resumed = received is not None
        self._received = received or {}
        self._ranks = request.best_of > request.n
        # Ranked answers are no candidate's before all have ended: of the candidates themselves nobody has anything.
        known = {} if self._ranks else self._received
        self._opened = frozenset(range(routed.job.n)) - {index for index, one in known.items() if one.finished}
        self._closed_tokens = sum(len(one.token_ids) for one in known.values() if one.finished)
        self._answers = [
            Answer(
                text.stream(routed.job.prompt_ids, skip_special_tokens=request.skip_special_tokens),
                request.stopping.stop,
                request.stream_interval,
                choice,
                len(known.get(choice, Received()).token_ids),
            )
            for choice in range(routed.job.n)
        ]

    @property
    def tokens(self) -> int:
        """Tokens of all candidates, without those that a stop string cut."""
        return self._closed_tokens + sum(self._answers[index].delivered for index in self._opened)

    def events(self) -> AsyncGenerator[Event]:
        """Deltas and ends of the answers. Raises what ended the job."""
        return self._best() if self._ranks else self._as_they_come()

    async def _as_they_come(self) -> AsyncGenerator[Event]:
        open_choices = set(self._opened)
        # A client that resumes has had a first message, and this is the first.
        prompt_is_due = self._request.prompt_logprobs is not None and not self._resumed
        async with aclosing(self._track.arrivals()) as turns:
            async for turn in turns:
                if prompt_is_due:
                    prompt_is_due = False
                    yield PromptLogprobs(self._track.prompt_logprobs)
                for arrival in turn:
                    if arrival.choice not in open_choices:
                        continue
                    answer = self._answers[arrival.choice]
                    delta, finished = answer.push(arrival.token_ids, arrival.finish, arrival.logprobs)
                    if delta is not None:
                        yield delta
                    if finished is not None:
                        open_choices.discard(arrival.choice)
                        self._track.close(arrival.choice)
                        yield finished

    async def _best(self) -> AsyncGenerator[Event]:
        """The n candidates with the largest mean log probability, best first; nothing before all have ended."""
        candidates = [_Candidate() for _ in self._answers]
        async with aclosing(self._as_they_come()) as events:
            async for event in events:
                match event:
                    case Delta():
                        candidates[event.choice].add(event)
                    case Finished():
                        candidates[event.choice].finished = event
                    case _:
                        yield event
        ranked = sorted(candidates, key=_Candidate.mean_logprob, reverse=True)
        for choice, candidate in enumerate(ranked[: self._request.n]):
            logprobs = candidate.logprobs if self._request.logprobs is not None else ()
            known = self._received.get(choice, Received())
            if not known.token_ids:
                yield Delta(0, candidate.token_ids, candidate.text, choice, logprobs)
            elif known.token_ids != candidate.token_ids:  # close to a tie, and computed in another batch
                raise Aborted("the candidates rank otherwise than they did for the lost stream", reason="RANKS_DIFFER")
            if candidate.finished is not None and not known.finished:
                yield replace(candidate.finished, choice=choice)


@dataclass(slots=True)
class _Candidate:
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: Finished | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def mean_logprob(self) -> float:
        values = [token.logprob for token in self.logprobs]
        return sum(values) / len(values) if values else float("-inf")
