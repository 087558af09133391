"""Clients, each with one request, which is resumed on another router when its stream breaks, as in the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

from router.request import Delta, Finished, Message, Received, Request, Summary
from rpc.errors import CallError, DeadlinePassed, Exhausted, Unavailable
from tests.simulation.loop import NODE
from tests.simulation.network import Network
from tests.simulation.router import BrokenError, SimulatedRouter

_RETRY_S = (0.1, 2.0)


class End(StrEnum):
    """The end of a call, as its client sees it."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    LATE = "late"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True)
class Plan:
    """A request to make. `expected` has the model's ids by choice; `cancel_after` so many tokens the client leaves."""

    request: Request
    expected: tuple[tuple[int, ...], ...]
    start_s: float
    router: int
    cancel_after: int | None = None
    deadline_s: float | None = None


@dataclass
class Story:
    """The result of a request. `faults` has a line for each fault in the tokens."""

    plan: Plan
    ids: list[list[int]] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    failure: CallError | None = None
    resumes: int = 0
    ttft_s: float | None = None
    # Reasons of the refusals after which the client asked again.
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = [[] for _ in self.plan.expected]
        self.finished = [False for _ in self.plan.expected]

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all choices."""
        return sum(len(ids) for ids in self.ids)

    def take(self, message: Message) -> None:
        """Take a message and check it."""
        match message.event:
            case Delta(offset=offset, token_ids=token_ids, choice=choice):
                if self.ttft_s is None:
                    self.ttft_s = asyncio.get_running_loop().time() - self.plan.start_s
                if self.finished[choice]:
                    self.faults.append(f"choice {choice}: tokens after its end")
                if offset != len(self.ids[choice]):
                    self.faults.append(f"choice {choice}: offset {offset} after {len(self.ids[choice])} tokens")
                self.ids[choice].extend(token_ids)
            case Finished(choice=choice):
                if self.finished[choice]:
                    self.faults.append(f"choice {choice}: ended twice")
                self.finished[choice] = True
            case Summary(completion_tokens=counted):
                if counted != self.tokens:
                    self.faults.append(f"{counted} tokens counted, {self.tokens} delivered")
                self.end(End.COMPLETED)

    def end(self, end: End) -> None:
        """Note an end of the call; more than one is a fault."""
        self.ends.append(end)

    def check(self) -> list[str]:
        """Return what is wrong with the result."""
        wrong = list(self.faults)
        if len(self.ends) != 1:
            wrong.append(f"ended {len(self.ends)} times: {', '.join(self.ends)}")
        for choice, (ids, expected) in enumerate(zip(self.ids, self.plan.expected, strict=True)):
            whole = self.ends == [End.COMPLETED]
            if tuple(ids) != (expected if whole else expected[: len(ids)]):
                wrong.append(f"choice {choice}: {ids} are not the model's {list(expected)}")
            if whole and not self.finished[choice]:
                wrong.append(f"choice {choice}: has no end")
        if self.ends == [End.REFUSED] and self.tokens:
            wrong.append(f"refused after {self.tokens} tokens: {self.failure!r}")
        if self.ends == [End.FAILED]:
            wrong.append(f"failed: {self.failure!r}")
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
        had = story.tokens
        try:
            token = await _call(story, router, network, token, None if due is None else due - loop.time())
        except (BrokenError, Unavailable) as error:
            token = getattr(error, "token", token)
            if isinstance(error.__cause__, Unavailable):
                story.reasons.append(error.__cause__.reason)
        except (DeadlinePassed, TimeoutError):
            story.end(End.LATE)
        except Exhausted as error:
            story.failure = error
            story.end(End.FAILED if error.retry_after_s is None else End.REFUSED)
        except CallError as error:
            story.failure = error
            story.end(End.FAILED)
        if story.ends:
            return
        story.resumes += 1
        wait_s = _RETRY_S[0] if story.tokens > had else min(_RETRY_S[1], 2 * wait_s)
        await asyncio.sleep(wait_s)


async def _call(story: Story, router: SimulatedRouter, network: Network, token: str, deadline_s: float | None) -> str:
    """Read one stream. Raises what ended it; `token` of the error is the resume token that came first."""
    plan, inbox = story.plan, asyncio.Queue[Message | Exception | None]()
    received = {choice: Received(tuple(ids), story.finished[choice]) for choice, ids in enumerate(story.ids) if ids}
    loop, last_at = asyncio.get_running_loop(), [0.0]

    def tell(what: Message | Exception | None) -> None:
        last_at[0] = max(last_at[0] + 1e-6, loop.time() + network.delay_s())
        loop.call_at(last_at[0], inbox.put_nowait, what)

    async def serve() -> None:
        await asyncio.sleep(network.delay_s())
        try:
            async with aclosing(await router.messages(plan.request, token, received, deadline_s)) as messages:
                async for message in messages:
                    tell(message)
            tell(None)
        except CallError as error:
            tell(error)

    assert NODE.get() is None, "clients are outside"
    if router.node.dead:
        raise BrokenError
    serving = router.node.start(serve())
    router.calls[inbox] = None
    try:
        async with asyncio.timeout(deadline_s):
            while (message := await inbox.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                token = message.resume_token or token
                story.take(message)
                if plan.cancel_after is not None and story.tokens >= plan.cancel_after and not story.ends:
                    story.end(End.CANCELLED)
                    break
        return token
    except (BrokenError, Unavailable) as error:
        raise _WithToken(token) from error
    finally:
        router.calls.pop(inbox, None)
        # The news travels, and a frozen router hears of it later.
        loop.call_later(network.delay_s(), serving.cancel)


class _WithToken(BrokenError):
    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token
