"""/cluster/state: workers, queues, jobs by tenant, and the traffic of each router, as JSON."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from loraplex_client import LoraplexError
from loraplex_client.calls import Script
from loraplex_client.connection import AsyncConnection

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import http_error
from clients.gateway.router_state import RouterState, SharedState, read_router, read_shared

State = TypeVar("State", RouterState, SharedState)
# Timeout in seconds of a router's answers: a router that is slower is shown as silent.
_ROUTER_S = 2.0
_HEADERS = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


async def cluster_state(call: HttpCall) -> None:
    """Answer with the cluster's state as all its routers see it. Raises HttpError where none of them answers."""
    routers = call.cluster.operators(call.exchange.headers)
    answers = await asyncio.gather(*(_ask(connection, read_router()) for _, connection in routers))
    shared = await _shared(routers, answers)
    jobs = sum((answer.jobs for answer in answers if isinstance(answer, RouterState)), Counter())
    state = {
        "workers": shared.workers,
        "queues": shared.queues,
        "tenants": _tenants(jobs),
        "routers": [_router(address, answer) for (address, _), answer in zip(routers, answers, strict=True)],
    }
    await call.exchange.answer(state, headers=_HEADERS)


async def _shared(
    routers: Sequence[tuple[str, AsyncConnection]], answers: Sequence[RouterState | LoraplexError]
) -> SharedState:
    """Return the cluster as the first router that answers sees it. Raises HttpError where none does."""
    for (_, connection), answer in zip(routers, answers, strict=True):
        found = await _ask(connection, read_shared()) if isinstance(answer, RouterState) else answer
        if isinstance(found, SharedState):
            return found
        failure = found
    raise http_error(failure)


async def _ask(router: AsyncConnection, script: Script[State]) -> State | LoraplexError:
    """Return a router's answer, or why there is none."""
    try:
        return await router.run(script, _ROUTER_S)
    except LoraplexError as error:
        return error


def _tenants(jobs: Counter[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """Return how many jobs of each tenant wait and run, by model."""
    return [
        {"tenant": tenant, "model": model, "waiting": jobs[tenant, model, False], "running": jobs[tenant, model, True]}
        for tenant, model in sorted({(tenant, model) for tenant, model, _ in jobs})
    ]


def _router(address: str, answer: RouterState | LoraplexError) -> dict[str, Any]:
    if isinstance(answer, RouterState):
        return {"address": address, "traffic": answer.traffic}
    error = http_error(answer)
    return {"address": address, "error": {"code": error.code, "message": error.message}}
