"""Ranking: the n best of more candidates, by their mean log probability, once all of them have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.output.echo import Echo
from router.request import Delta, Event, Finished, Received, Request
from rpc.errors import Aborted


class BestOf:
    """The candidates of one request. `received` is what a resuming client has of the ranked answers."""

    def __init__(self, request: Request, received: Mapping[int, Received], echo: Echo) -> None:
        self._echo = echo
        self._request = request
        self._received = received
        self._candidates = [_Candidate() for _ in range(request.best_of)]

    def collect(self, events: Sequence[Event]) -> list[Event]:
        """Keep the candidates' tokens and ends; return the other events."""
        others: list[Event] = []
        for event in events:
            match event:
                case Delta():
                    self._candidates[event.choice].add(event)
                case Finished():
                    self._candidates[event.choice].finished = event
                case _:
                    others.append(event)
        return others

    def ranked(self) -> list[Event]:
        """Return the best answers, each whole, best first. Raises Aborted where they differ from the lost stream's."""
        events: list[Event] = []
        ranked = sorted(self._candidates, key=_Candidate.mean_logprob, reverse=True)
        for choice, candidate in enumerate(ranked[: self._request.n]):
            logprobs = candidate.delta.logprobs if self._request.logprobs is not None else ()
            received = self._received.get(choice, Received())
            events += self._echo.deltas(choice, received)
            if not received.token_ids and not received.finished:
                events.append(replace(candidate.delta, choice=choice, logprobs=logprobs))
            elif received.token_ids != candidate.delta.token_ids:  # close to a tie, and computed in another batch
                raise Aborted("the candidates rank otherwise than they did for the lost stream", reason="RANKS_DIFFER")
            if candidate.finished is not None and not received.finished:
                events.append(replace(candidate.finished, choice=choice))
        return events


_EMPTY = Delta(0, (), "")


@dataclass(slots=True)
class _Candidate:
    delta: Delta = _EMPTY
    finished: Finished | None = None

    def add(self, delta: Delta) -> None:
        had = self.delta
        self.delta = Delta(
            offset=0,
            token_ids=had.token_ids + delta.token_ids,
            text=had.text + delta.text,
            logprobs=had.logprobs + delta.logprobs,
            reasoning=had.reasoning + delta.reasoning,
            tool_calls=had.tool_calls + delta.tool_calls,
        )

    def mean_logprob(self) -> float:
        values = [token.logprob for token in self.delta.logprobs]
        return sum(values) / len(values) if values else float("-inf")
