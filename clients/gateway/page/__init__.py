"""The page of the cluster: its files, and the state that it polls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from loraplex_client import LoraplexError
from loraplex_client.calls import Script
from loraplex_client.connection import AsyncConnection

from clients.gateway.cluster import RouterState, SharedState, read_router, read_shared
from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import HttpError, http_error

# Packages and content types of the files.
_FILES = {
    "page.html": ("clients.gateway.page", "text/html; charset=utf-8"),
    "icon.svg": ("clients.gateway.page", "image/svg+xml"),
    "page.css": ("clients.gateway.page", "text/css; charset=utf-8"),
    "colours.css": ("clients", "text/css; charset=utf-8"),
    **dict.fromkeys(
        ("access.js", "cluster.js", "elements.js", "names.js", "playground.js", "rates.js", "tables.js"),
        ("clients.gateway.page", "text/javascript; charset=utf-8"),
    ),
}
# Scripts and styles come from these files alone, and the page talks to the gateway that served it alone.
_FILE_HEADERS = (
    (
        "content-security-policy",
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("cache-control", "no-cache"),
    ("cross-origin-opener-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)
State = TypeVar("State", RouterState, SharedState)
_STATE_HEADERS = (("cache-control", "no-store"), ("x-content-type-options", "nosniff"))


async def page(call: HttpCall) -> None:
    """Answer with the page."""
    await _answer(call, "page.html")


async def page_file(call: HttpCall) -> None:
    """Answer with a file of the page. Raises HttpError."""
    await _answer(call, call.parameters["file"])


async def _answer(call: HttpCall, name: str) -> None:
    if name not in _FILES:
        raise HttpError(404, "unknown_path", f"{call.exchange.path[:200]}: no such path")
    _, kind = _FILES[name]
    await call.exchange.answer(_content(name), headers=_FILE_HEADERS, kind=kind)


@cache
def _content(name: str) -> bytes:
    package, _ = _FILES[name]
    return (resources.files(package) / name).read_bytes()


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
    await call.exchange.answer(state, headers=_STATE_HEADERS)


async def _shared(
    routers: Sequence[tuple[str, AsyncConnection]], answers: Sequence[RouterState | LoraplexError]
) -> SharedState:
    """Return the cluster as the first router that answers sees it. Raises HttpError where none does."""
    for (_, connection), answer in zip(routers, answers, strict=True):
        shared = await _ask(connection, read_shared()) if isinstance(answer, RouterState) else answer
        if isinstance(shared, SharedState):
            return shared
        failure = shared
    raise http_error(failure)


async def _ask(router: AsyncConnection, script: Script[State]) -> State | LoraplexError:
    """Return a router's answer, or why there is none."""
    try:
        return await router.run(script)
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
