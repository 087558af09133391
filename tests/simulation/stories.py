"""The stories of requests: what each client asks for, what it got, and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from loraplex.router.request import Delta, Message, Request, Summary
from loraplex.runtime.rpc.errors import CallError
from tests.hash_answers import Expected, ExpectedScore
from tests.simulation.options import prompt_ids_of
from tests.simulation.redis import Held
from tests.simulation.router import Scored
from tests.simulation.texts import Encoded, TextsPlan
from tests.simulation.transcript import Transcript


class End(StrEnum):
    """The end of a call, as its client sees it."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    LATE = "late"
    REFUSED = "refused"
    # By a purge of the tenant, or with its API key.
    REVOKED = "revoked"
    FAILED = "failed"


@dataclass(frozen=True)
class Plan:
    """A request to make, and the model's answers to it. After `cancel_after` tokens the client leaves.

    With `scores` it is a call of Score, whose continuations they tell of; with `texts` one of Embed or Classify.
    """

    request: Request
    expected: Expected
    start_s: float
    router: int
    cancel_after: int | None = None
    deadline_s: float | None = None
    scores: tuple[ExpectedScore, ...] = ()
    texts: TextsPlan | None = None
    # Id of the API key that the client calls with; empty: it has none.
    key: str = ""


def asked_tokens(plan: Plan) -> int:
    """Return the tokens that a request reserves."""
    request = plan.request
    if plan.texts:
        return plan.texts.prompt_tokens
    prompt = len(prompt_ids_of(request))
    if plan.scores:
        return sum(prompt + len(score.token_ids) for score in plan.scores)
    return prompt + request.best_of * (request.stopping.max_tokens or 0)


class Story:
    """The result of a request."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.transcript = Transcript(plan.request, plan.expected)
        self.ends: list[End] = []
        self.failure: CallError | None = None
        self.resumes = 0
        # Number of calls that were made again from the beginning, because the router that had them died.
        self.repeats = 0
        # Number of calls that routers which were told to stop have handed back, before they had a token.
        self.handed_back = 0
        self.ttft_s: float | None = None
        # Reasons of the refusals after which the client asked again.
        self.reasons: list[str] = []
        # Reservations of the request's calls, by account, in their order.
        self.held: dict[str, list[Held]] = {}
        # Times at which routers sent what the client got, and the tokens of each, with those of the prompt.
        self.sent: list[tuple[float, int]] = []
        self._scored: Scored | None = None
        self._encoded: Encoded | None = None

    @property
    def received_tokens(self) -> int:
        """Return the tokens that the client has got, with those of the prompt."""
        if self.plan.scores or self.plan.texts:
            return asked_tokens(self.plan) if self._scored or self._encoded else 0
        return self.transcript.charged

    @property
    def waits_for_room(self) -> bool:
        """Return whether no limit of the queue may refuse it: a router has handed it back, and it has one job."""
        return bool(self.handed_back) and not (self.plan.scores or self.plan.texts)

    def end(self, end: End) -> None:
        """Note an end of the call; more than one is a fault."""
        self.ends.append(end)

    def take(self, message: Message | Scored | Encoded, sent_at: float) -> None:
        """Take a message, which its router sent at a time, and check it."""
        had = self.received_tokens
        self._take(message)
        self.sent.append((sent_at, self.received_tokens - had))

    def _take(self, message: Message | Scored | Encoded) -> None:
        if isinstance(message, Encoded):
            self._encoded = message
            self.end(End.COMPLETED)
            return
        if isinstance(message, Scored):
            self._scored = message
            self.end(End.COMPLETED)
            return
        self.transcript.take(message.event)
        if self.ttft_s is None and isinstance(message.event, Delta):
            self.ttft_s = asyncio.get_running_loop().time() - self.plan.start_s
        if isinstance(message.event, Summary):
            self.end(End.COMPLETED)

    def check(self) -> list[str]:
        """Return what is wrong with the result."""
        if self.plan.scores:
            wrong = self._wrong_scores() if self._scored else []
        elif self.plan.texts:
            wrong = self.plan.texts.wrong(self._encoded) if self._encoded else []
        else:
            wrong = self.transcript.check(whole=self.ends == [End.COMPLETED], resumed=self.resumes > 0)
        if len(self.ends) != 1:
            wrong.append(f"ended {len(self.ends)} times: {', '.join(self.ends)}")
        # A request that is resumed later than its reservation is held may find its tenant's quota used.
        late = self.failure is not None and self.failure.reason == "QUOTA_EXCEEDED"
        if self.ends == [End.REFUSED] and self.transcript.tokens and not late:
            wrong.append(f"refused after {self.transcript.tokens} tokens: {self.failure!r}")
        if self.ends == [End.REFUSED] and self.waits_for_room and not late:
            wrong.append(f"refused after a router has handed it back: {self.failure!r}")
        if self.ends == [End.FAILED]:
            wrong.append(f"failed: {self.failure!r}")
        return wrong

    def _wrong_scores(self) -> list[str]:
        assert self._scored is not None
        expected, summary = self.plan.scores, self._scored.summary
        got = tuple(ExpectedScore(one.token_ids, one.logprobs, one.greedy) for one in self._scored.scores)
        wrong = [] if got == expected else [f"the scores {got} are not the model's {expected}"]
        tokens = sum(len(prompt_ids_of(self.plan.request)) + len(score.token_ids) for score in expected)
        if (summary.prompt_tokens, summary.completion_tokens) != (tokens, 0):
            wrong.append(f"{summary.prompt_tokens} prompt tokens counted of {tokens}, {summary.completion_tokens} made")
        return wrong
