"""Clients, each with one request, which is resumed on another router when its stream breaks, as in the SDK."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from loraplex.router.request import Message
from loraplex.runtime.rpc.errors import CallError, DeadlinePassed, Exhausted, Unavailable
from loraplex.runtime.rpc.interceptors import take_ending
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, Unauthenticated, set_caller
from tests.simulation.loop import NODE
from tests.simulation.network import Network
from tests.simulation.redis import HELD
from tests.simulation.router import BrokenError, Scored, SimulatedRouter
from tests.simulation.stories import End, Plan, Story
from tests.simulation.texts import Encoded

_RETRY_S = (0.1, 2.0)
_REVOKED = frozenset({"TENANT_PURGED", "CREDENTIAL_REVOKED"})


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
            _note_loss(story, error.__cause__, token)
        except DeadlinePassed:
            story.end(End.LATE)
        except TimeoutError:
            if not story.ends:  # else only the end of the stream came too late
                story.end(End.CANCELLED if plan.texts and plan.texts.leaves else End.LATE)
        except Exhausted as error:
            _refuse(story, error)
        except CallError as error:
            story.failure = error
            story.end(End.REVOKED if error.reason in _REVOKED else End.FAILED)
        if story.ends:
            return
        story.resumes += 1
        wait_s = _RETRY_S[0] if story.transcript.tokens > had else min(_RETRY_S[1], 2 * wait_s)
        await asyncio.sleep(wait_s)


def _note_loss(story: Story, cause: BaseException | None, token: str) -> None:
    """Note why a stream broke before its end, and whether its request is made anew or resumed with a token."""
    if isinstance(cause, Unavailable):
        story.reasons.append(cause.reason)
        story.handed_back += cause.reason == "ROUTER_DRAINING" and not token
    elif cause is not None and not token:
        story.repeats += 1


def _refuse(story: Story, error: Exhausted) -> None:
    """End a call that a limit refuses; a request that a router has handed back waits for room, as in the SDK."""
    story.failure = error
    if story.waits_for_room and error.retry_after_s is not None and error.reason != "QUOTA_EXCEEDED":
        story.reasons.append(error.reason)
    else:
        story.end(End.FAILED if error.retry_after_s is None else End.REFUSED)


async def _call(story: Story, router: SimulatedRouter, network: Network, token: str, deadline_s: float | None) -> str:
    """Read one stream. Raises what ended it; `token` of the error is the resume token that came first."""
    plan, inbox = story.plan, asyncio.Queue[tuple[float, Message | Scored | Encoded | Exception | None]]()
    loop, last_at = asyncio.get_running_loop(), [0.0]

    def tell(what: Message | Scored | Encoded | Exception | None) -> None:
        last_at[0] = max(last_at[0] + 1e-6, loop.time() + network.delay_s())
        loop.call_at(last_at[0], inbox.put_nowait, (loop.time(), what))

    assert NODE.get() is None, "clients are outside"
    if router.node.dead:
        raise BrokenError
    serving = router.node.start(_serve(story, router, network, token, deadline_s, tell))
    router.calls[inbox] = None
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                sent_at, message = await inbox.get()
                if message is None:
                    break
                if isinstance(message, Exception):
                    raise message
                token = getattr(message, "resume_token", "") or token
                story.take(message, sent_at)
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
    HELD.set(story.held)
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
    revoked_s = time.monotonic() - router.store.revoked_at.get(plan.key, math.inf)
    if revoked_s > (age_s := router.keys.age_s()) + 1e-6:
        router.store.faults.append(
            f"{router.name} admitted a key that was revoked {revoked_s} s ago, with keys of {age_s} s"
        )
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
