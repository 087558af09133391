"""Clients, each with one request, which is resumed on another router when its stream breaks, as in the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum

from router.request import Delta, Message, Request, Summary
from rpc.errors import CallError, DeadlinePassed, Exhausted, Unauthenticated, Unavailable
from rpc.identity.principal import CredentialKind, Principal, Role, set_caller
from rpc.identity.running_calls import take_ending
from tests.hash_answers import Expected, ExpectedScore
from tests.simulation.loop import NODE
from tests.simulation.network import Network
from tests.simulation.options import prompt_ids_of
from tests.simulation.router import BrokenError, Scored, SimulatedRouter
from tests.simulation.texts import Encoded, TextsPlan
from tests.simulation.transcript import Transcript

_RETRY_S = (0.1, 2.0)
_REVOKED = frozenset({"TENANT_PURGED", "CREDENTIAL_REVOKED"})


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
        self.ttft_s: float | None = None
        # Reasons of the refusals after which the client asked again.
        self.reasons: list[str] = []
        self._scored: Scored | None = None
        self._encoded: Encoded | None = None

    def end(self, end: End) -> None:
        """Note an end of the call; more than one is a fault."""
        self.ends.append(end)

    def take(self, message: Message | Scored | Encoded) -> None:
        """Take a message and check it."""
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


async def ask(story: Story, routers: Sequence[SimulatedRouter], network: Network) -> None:
    """Call, and call again, until the request has ended."""
    loop, plan = asyncio.get_running_loop(), story.plan
    await asyncio.sleep(plan.start_s)
    token, where, wait_s = "", plan.router, _RETRY_S[0]
    due = loop.time() + plan.deadline_s if plan.deadline_s is not None else None
    while not story.ends:
        router = routers[where % len(routers)]
        where += 1
        if due is not None and loop.time() >= due:
            story.end(End.LATE)
            return
        had = story.transcript.tokens
        try:
            token = await _call(story, router, network, token, None if due is None else due - loop.time())
        except (BrokenError, Unavailable) as error:
            token = getattr(error, "token", token)
            if isinstance(error.__cause__, Unavailable):
                story.reasons.append(error.__cause__.reason)
            elif error.__cause__ is not None and not token:
                story.repeats += 1
        except DeadlinePassed:
            story.end(End.LATE)
        except TimeoutError:
            if not story.ends:  # else only the end of the stream came too late
                story.end(End.CANCELLED if plan.texts and plan.texts.leaves else End.LATE)
        except Exhausted as error:
            story.failure = error
            story.end(End.FAILED if error.retry_after_s is None else End.REFUSED)
        except CallError as error:
            story.failure = error
            story.end(End.REVOKED if error.reason in _REVOKED else End.FAILED)
        if story.ends:
            return
        story.resumes += 1
        wait_s = _RETRY_S[0] if story.transcript.tokens > had else min(_RETRY_S[1], 2 * wait_s)
        await asyncio.sleep(wait_s)


async def _call(story: Story, router: SimulatedRouter, network: Network, token: str, deadline_s: float | None) -> str:
    """Read one stream. Raises what ended it; `token` of the error is the resume token that came first."""
    plan, inbox = story.plan, asyncio.Queue[Message | Scored | Encoded | Exception | None]()
    loop, last_at = asyncio.get_running_loop(), [0.0]

    def tell(what: Message | Scored | Encoded | Exception | None) -> None:
        last_at[0] = max(last_at[0] + 1e-6, loop.time() + network.delay_s())
        loop.call_at(last_at[0], inbox.put_nowait, what)

    assert NODE.get() is None, "clients are outside"
    if router.node.dead:
        raise BrokenError
    serving = router.node.start(_serve(story, router, network, token, deadline_s, tell))
    router.calls[inbox] = None
    try:
        async with asyncio.timeout(deadline_s):
            while (message := await inbox.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                token = getattr(message, "resume_token", "") or token
                story.take(message)
                if plan.cancel_after is not None and story.transcript.tokens >= plan.cancel_after and not story.ends:
                    story.end(End.CANCELLED)
                    break
        return token
    except (BrokenError, Unavailable) as error:
        raise _WithToken(token) from error
    finally:
        router.calls.pop(inbox, None)
        # The news travels, and a frozen router hears of it later.
        loop.call_later(network.delay_s(), serving.cancel)


async def _serve(
    story: Story,
    router: SimulatedRouter,
    network: Network,
    token: str,
    deadline_s: float | None,
    tell: Callable[[Message | Scored | Encoded | Exception | None], None],
) -> None:
    """Serve a call at its router, and tell all that its client gets; None comes last."""
    await asyncio.sleep(network.delay_s())
    try:
        if story.plan.key:
            _enter(router, story.plan)
        async with aclosing(await _messages(story, router, token, deadline_s)) as told:
            async for message in told:
                tell(message)
        tell(None)
    except CallError as error:
        tell(error)
    except asyncio.CancelledError:  # see rpc.status
        if (ending := take_ending()) is None:
            raise
        tell(ending)


def _enter(router: SimulatedRouter, plan: Plan) -> None:
    """Let the call of the current task in with its API key. Raises Unauthenticated."""
    if not router.keys.is_valid(plan.key):
        raise Unauthenticated("the API key is revoked", reason="CREDENTIAL_REVOKED")
    tenant, roles = plan.request.tenant, frozenset({Role.TENANT_USER})
    caller = Principal(f"key/{plan.key}", roles, CredentialKind.API_KEY, tenant, plan.key)
    router.keys.calls.enter(caller)
    set_caller(caller)


async def _messages(
    story: Story, router: SimulatedRouter, token: str, deadline_s: float | None
) -> AsyncGenerator[Message | Scored | Encoded]:
    plan = story.plan
    if plan.scores:
        return router.scores(plan.request, [score.token_ids for score in plan.scores], deadline_s)
    if plan.texts:
        return router.vectors(plan.texts.request, None if plan.texts.leaves else deadline_s)
    return await router.messages(plan.request, token, story.transcript.received(), deadline_s)


class _WithToken(BrokenError):
    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token
