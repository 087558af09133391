"""The page of the cluster: its files, and the state that it polls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.gateway.endpoint import HttpCall
from loraplex.gateway.errors import HttpError, http_error
from loraplex_client import LoraplexError
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection

# Content types of the files.
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("page.css", "colours.css"), "text/css; charset=utf-8"),
    **dict.fromkeys(
        (
            *("access.js", "cluster.js", "elements.js", "names.js", "playground.js", "rates.js", "releases.js"),
            *("tables.js", "usage.js"),
        ),
        "text/javascript; charset=utf-8",
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
R = TypeVar("R")
# Timeout in seconds of a router's answers: a router that is slower is shown as silent.
_ROUTER_S = 2.0
_WORKER_FIELDS = ("worker_id", "incarnation", "model", "rows_running", "rows_waiting", "rows_limit", "steps")
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
    await call.exchange.answer(_content(name), headers=_FILE_HEADERS, kind=_FILES[name])


@cache
def _content(name: str) -> bytes:
    return (resources.files("loraplex.gateway.page") / name).read_bytes()


async def cluster_state(call: HttpCall) -> None:
    """Answer with the cluster's state as all its routers see it. Raises HttpError where none of them answers."""
    routers = call.cluster.operators(call.exchange.headers)
    answers = await asyncio.gather(*(_ask(connection, _read_router()) for _, connection in routers))
    shared = await _shared(routers, answers)
    jobs: Counter[tuple[str, str, bool]] = Counter()
    rows: list[dict[str, Any]] = []
    for (address, _), answer in zip(routers, answers, strict=True):
        if isinstance(answer, LoraplexError):
            error = http_error(answer)
            rows.append({"address": address, "error": {"code": error.code, "message": error.message}})
        else:
            traffic, counts = answer
            rows.append({"address": address, "traffic": traffic})
            jobs += counts
    await call.exchange.answer({**shared, "tenants": _tenants(jobs), "routers": rows}, headers=_STATE_HEADERS)


async def _shared(routers: Sequence[tuple[str, AsyncConnection]], answers: Sequence[object]) -> dict[str, Any]:
    """Return the cluster as the first router that answers sees it. Raises HttpError where none does."""
    for (_, connection), answer in zip(routers, answers, strict=True):
        failure = answer
        if not isinstance(answer, LoraplexError):
            shared = await _ask(connection, _read_shared())
            if isinstance(shared, dict):
                return shared
            failure = shared
    assert isinstance(failure, LoraplexError)
    raise http_error(failure)


async def _ask(router: AsyncConnection, script: Script[R]) -> R | LoraplexError:
    """Return a router's answer, or why there is none."""
    try:
        return await router.run(script)
    except LoraplexError as error:
        return error


def _read_router() -> Script[tuple[dict[str, Any], Counter[tuple[str, str, bool]]]]:
    """Return a router's own traffic, and its jobs counted by tenant, model, and whether a worker has them."""
    traffic = yield _once("GetTraffic", pb.GetTrafficRequest())
    jobs = yield _once("ListJobs", pb.ListJobsRequest())
    numbers = ("uptime", "open", "prompt_tokens", "completion_tokens", "redispatches", "workers_lost")
    times = ("time_to_first_token", "inter_token_latency", "queue_time")
    values = {name: getattr(traffic, name) for name in numbers}
    for name in times:
        values[name] = {field: list(getattr(getattr(traffic, name), field)) for field in ("bounds", "counts")}
    values |= {"requests": dict(traffic.requests), "adapters": [_fields(adapter) for adapter in traffic.adapters]}
    return values, Counter((job.tenant, job.model, bool(job.worker_id)) for job in jobs.jobs)


def _read_shared() -> Script[dict[str, Any]]:
    """Return the workers and queues of the cluster, which every router tells alike."""
    workers = yield _once("ListWorkers", pb.ListWorkersRequest())
    queues = yield _once("ListQueues", pb.ListQueuesRequest())
    return {"workers": [_worker(worker) for worker in workers.workers], "queues": list(map(_fields, queues.queues))}


def _once(method: str, request: Any) -> Call:
    """Return a call that is not repeated: the page asks again every second."""
    return Call(method, request, timeout_s=_ROUTER_S, once=True)


def _worker(worker: pb.Worker) -> dict[str, Any]:
    """Return a worker without its host and process ids, which nobody needs beyond the cluster's network."""
    return {
        **{name: getattr(worker, name) for name in _WORKER_FIELDS},
        **{name: _fields(getattr(worker, name)) for name in ("blocks", "adapter_slots", "adapter_tiers")},
        "phase": pb.WorkerPhase.Name(worker.phase).removeprefix("WORKER_PHASE_").lower(),
        "adapters": list(worker.adapters),
    }


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _tenants(jobs: Counter[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """Return how many jobs of each tenant wait and run, by model."""
    return [
        {"tenant": tenant, "model": model, "waiting": jobs[tenant, model, False], "running": jobs[tenant, model, True]}
        for tenant, model in sorted({(tenant, model) for tenant, model, _ in jobs})
    ]
