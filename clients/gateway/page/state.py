"""/cluster/state: workers, queues, jobs by tenant, and the traffic of each router, as JSON."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from loraplex_client import LoraplexError
from loraplex_client.connection import AsyncConnection

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import http_error
from clients.gateway.router_state import RouterState, look

# Timeout in seconds of a router's answers: a router that is slower is shown as silent.
_ROUTER_S = 2.0
_HEADERS = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


async def cluster_state(call: HttpCall) -> None:
    """Answer with the cluster's state as all its routers see it. Raises HttpError where none of them answers."""
    routers = call.cluster.operators(call.exchange.headers)
    answers = await asyncio.gather(*(_ask(connection) for _, connection in routers))
    answered = [answer for answer in answers if isinstance(answer, RouterState)]
    if not answered:
        raise next(http_error(answer) for answer in answers if isinstance(answer, LoraplexError))
    state = {
        "workers": answered[0].workers,
        "queues": answered[0].queues,
        "tenants": _tenants(sum((answer.jobs for answer in answered), Counter())),
        "routers": [_router(address, answer) for (address, _), answer in zip(routers, answers, strict=True)],
    }
    await call.exchange.answer(state, headers=_HEADERS)


async def _ask(router: AsyncConnection) -> RouterState | LoraplexError:
    """Return a router's view of the cluster, or why there is none."""
    try:
        return await router.run(look(), _ROUTER_S)
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
