"""Wiring, start and ordered stop of a gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.routing import BaseRoute, Route, Router

from loraplex.gateway.adapters_api import PROTOCOL as ADAPTERS
from loraplex.gateway.adapters_api import UPLOAD, delete_adapter, get_adapter, list_adapters, put_adapter
from loraplex.gateway.anthropic_api import COUNT, MESSAGES, count_tokens, messages
from loraplex.gateway.anthropic_api import PROTOCOL as ANTHROPIC
from loraplex.gateway.batches_api import (
    BATCH,
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    get_batch,
    get_content,
    get_file,
    list_batches,
    list_files,
)
from loraplex.gateway.batches_api import PROTOCOL as BATCHES
from loraplex.gateway.bodies import Body
from loraplex.gateway.cluster import Cluster
from loraplex.gateway.decisions_api import DECISION, SYSTEM_ONE, decisions, system_one
from loraplex.gateway.endpoint import (
    Gateway,
    GatewayMetrics,
    Handler,
    HttpCall,
    HttpEndpoint,
    OpenRequests,
    Protocol,
    own_names,
)
from loraplex.gateway.errors import HttpError
from loraplex.gateway.http_server import http_server, listen
from loraplex.gateway.openai_api import CHAT, COMPLETION, EMBEDDING, embeddings, get_model, list_models
from loraplex.gateway.openai_api import PROTOCOL as OPENAI
from loraplex.gateway.openai_completions import chat_completions, completions
from loraplex.gateway.openai_responses import PROTOCOL as RESPONSES
from loraplex.gateway.openai_responses import responses
from loraplex.gateway.openai_responses_input import RESPONSE
from loraplex.gateway.page import cluster_state, page, page_file
from loraplex.gateway.provider import Providers
from loraplex.gateway.releases_api import CHANGE, change_release, get_release, list_releases
from loraplex.gateway.rerank_api import PROTOCOL as RERANKING
from loraplex.gateway.rerank_api import RERANK, SCORE, rerank_v1, rerank_v2, score
from loraplex.gateway.sessions import Cookies
from loraplex.gateway.settings import GatewaySettings
from loraplex.gateway.sign_in import begin_sign_in, end_session, end_sign_in, renew_session, show_session
from loraplex.gateway.tgi_api import (
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
    detokenize,
    generate,
    generate_either,
    generate_stream,
    info,
    tokenize,
    tokenizer_info,
)
from loraplex.gateway.tgi_api import PROTOCOL as TGI
from loraplex.gateway.trainer_api import (
    LOAD,
    UNLOAD,
    is_paused,
    load_adapter,
    pause,
    reset_prefix_cache,
    resume,
    server_info,
    unload_adapter,
)
from loraplex.gateway.trainer_api import PROTOCOL as TRAINERS
from loraplex.gateway.turns import Turns
from loraplex.gateway.usage_api import show_all_usage, show_usage
from loraplex.issuers.tokens import JwtReader
from loraplex.runtime.rpc.server import stop_signal
from loraplex.runtime.rpc.settings import SettingsError
from loraplex.runtime.telemetry.metrics import serve_metrics
from loraplex.runtime.telemetry.tracing import Spans, set_up_tracing
from loraplex.runtime.tenancy.certificates import end_of

log = logging.getLogger(__name__)

# Time in seconds that answers which are cut get to send their last events when the gateway stops.
_LAST_EVENTS_S = 1.0


async def health(call: HttpCall) -> None:
    """Answer 200 where a router serves requests. Raises HttpError."""
    if not await call.cluster.serves():
        raise HttpError(503, "not_serving", "no router serves requests", retry_after_s=1.0)
    await call.exchange.answer({"status": "serving"})


async def ping(call: HttpCall) -> None:
    """Answer 200: the gateway itself serves."""
    await call.exchange.answer({})


async def show_description(call: HttpCall) -> None:
    """Answer with an OpenAPI description of the paths."""
    await call.exchange.answer(await asyncio.to_thread(description))


async def show_version(call: HttpCall) -> None:
    """Answer with the version."""
    await call.exchange.answer({"version": version("loraplex")})


# Advice for paths that clients ask for and that are not served.
_HINTS = {
    **dict.fromkeys(
        (
            *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            *("/get_world_size", "/init_communicator", "/update_named_param", "/collective_rpc", "/init_broadcaster"),
        ),
        "; the base's weights are not replaced: train an adapter, and load it with POST /v1/load_lora_adapter",
    ),
    "/metrics": "; the gateway's metrics have an address of their own, which --metrics-port sets",
}


async def unknown_path(call: HttpCall) -> None:
    """Refuse a path that is not served. Raises HttpError."""
    path = call.exchange.path[:200]
    # The paths that clients ask for whose base URL lacks the version.
    hint = f"; use /v1{path}: a client's base URL ends with /v1" if f"/v1{path}" in PATHS else _HINTS.get(path, "")
    raise HttpError(404, "unknown_path", f"{call.exchange.method} {path}: no such path{hint}")


@dataclass(frozen=True)
class Served:
    """A path: its protocol, the handler of each HTTP method, and the body of its POST where that takes one.

    `operation` is what the POST asks for, in the words of OpenTelemetry's GenAI conventions.
    """

    protocol: Protocol
    handlers: Mapping[str, Handler]
    body: Body | None = None
    operation: str = ""


PATHS = {
    "/v1/chat/completions": Served(OPENAI, {"POST": chat_completions}, CHAT, "chat"),
    "/v1/completions": Served(OPENAI, {"POST": completions}, COMPLETION, "text_completion"),
    "/v1/responses": Served(RESPONSES, {"POST": responses}, RESPONSE, "chat"),
    "/v1/decisions": Served(OPENAI, {"POST": decisions}, DECISION, "decide"),
    "/v1/systemone": Served(OPENAI, {"POST": system_one}, SYSTEM_ONE, "decide"),
    "/v1/rerank": Served(RERANKING, {"POST": rerank_v1}, RERANK, "rerank"),
    "/v2/rerank": Served(RERANKING, {"POST": rerank_v2}, RERANK, "rerank"),
    "/v1/score": Served(RERANKING, {"POST": score}, SCORE, "rerank"),
    "/v1/embeddings": Served(OPENAI, {"POST": embeddings}, EMBEDDING, "embeddings"),
    "/v1/files": Served(BATCHES, {"GET": list_files, "POST": create_file}),
    "/v1/files/{file}": Served(BATCHES, {"GET": get_file, "DELETE": delete_file}),
    "/v1/files/{file}/content": Served(BATCHES, {"GET": get_content}),
    "/v1/batches": Served(BATCHES, {"GET": list_batches, "POST": create_batch}, BATCH),
    "/v1/batches/{batch}": Served(BATCHES, {"GET": get_batch}),
    "/v1/batches/{batch}/cancel": Served(BATCHES, {"POST": cancel_batch}),
    "/v1/models": Served(OPENAI, {"GET": list_models}),
    "/v1/models/{model:path}": Served(OPENAI, {"GET": get_model}),
    "/v1/adapters": Served(ADAPTERS, {"GET": list_adapters}),
    "/v1/adapters/{adapter}/releases": Served(ADAPTERS, {"GET": list_releases}),
    "/v1/adapters/{adapter}/releases/{number}": Served(ADAPTERS, {"GET": get_release, "POST": change_release}, CHANGE),
    "/v1/adapters/{adapter:path}": Served(ADAPTERS, {"GET": get_adapter, "PUT": put_adapter, "DELETE": delete_adapter}),
    "/v1/load_lora_adapter": Served(TRAINERS, {"POST": load_adapter}, LOAD),
    "/v1/unload_lora_adapter": Served(TRAINERS, {"POST": unload_adapter}, UNLOAD),
    "/load_lora_adapter": Served(TRAINERS, {"POST": load_adapter}, LOAD),
    "/unload_lora_adapter": Served(TRAINERS, {"POST": unload_adapter}, UNLOAD),
    "/pause": Served(TRAINERS, {"POST": pause}),
    "/resume": Served(TRAINERS, {"POST": resume}),
    "/is_paused": Served(TRAINERS, {"GET": is_paused}),
    "/reset_prefix_cache": Served(TRAINERS, {"POST": reset_prefix_cache}),
    "/server_info": Served(TRAINERS, {"GET": server_info}),
    "/v1/messages": Served(ANTHROPIC, {"POST": messages}, MESSAGES, "chat"),
    "/v1/messages/count_tokens": Served(ANTHROPIC, {"POST": count_tokens}, COUNT),
    "/generate": Served(TGI, {"POST": generate}, GENERATE, "text_completion"),
    "/generate_stream": Served(TGI, {"POST": generate_stream}, GENERATE, "text_completion"),
    "/": Served(TGI, {"GET": page, "POST": generate_either}, GENERATE, "text_completion"),
    "/info": Served(TGI, {"GET": info}),
    "/tokenize": Served(TGI, {"POST": tokenize}, TOKENIZE),
    "/detokenize": Served(TGI, {"POST": detokenize}, DETOKENIZE),
    "/tokenizer_info": Served(TGI, {"GET": tokenizer_info}),
    "/health": Served(OPENAI, {"GET": health}),
    "/ping": Served(OPENAI, {"GET": ping, "POST": ping}),
    "/openapi.json": Served(OPENAI, {"GET": show_description}),
    "/version": Served(OPENAI, {"GET": show_version}),
    "/cluster": Served(OPENAI, {"GET": page}),
    "/cluster/state": Served(OPENAI, {"GET": cluster_state}),
    "/cluster/usage": Served(OPENAI, {"GET": show_all_usage}),
    "/v1/usage": Served(OPENAI, {"GET": show_usage}),
    "/cluster/{file}": Served(OPENAI, {"GET": page_file}),
    "/session": Served(OPENAI, {"GET": show_session}),
    "/session/sign-in": Served(OPENAI, {"GET": begin_sign_in}),
    "/session/callback": Served(OPENAI, {"GET": end_sign_in}),
    "/session/renew": Served(OPENAI, {"POST": renew_session}),
    "/session/end": Served(OPENAI, {"POST": end_session}),
}


@cache
def description() -> Mapping[str, Any]:
    """Return the paths and the bodies that they take in the words of OpenAPI."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for path, served in PATHS.items():
        name = re.sub(r"\{(\w+):path\}", r"{\1}", path)
        parameters = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in re.findall(r"\{(\w+)\}", name)
        ]
        for method, handler in served.handlers.items():
            operation = paths.setdefault(name, {})[method.lower()] = {
                "summary": (handler.__doc__ or "").partition(".")[0],
                "parameters": parameters,
                "responses": {"200": {"description": "The answer."}, "default": {"description": "An error."}},
            }
            if handler is put_adapter:
                operation["parameters"] = [*parameters, *UPLOAD["parameters"]]
                operation["requestBody"] = UPLOAD["requestBody"]
            if method == "POST" and (body := served.body) is not None:
                kind = body.kind.__name__
                own = TypeAdapter(body.kind).json_schema(ref_template=f"#/components/schemas/{kind}.{{model}}")
                schemas |= {f"{kind}.{part}": schema for part, schema in own.pop("$defs", {}).items()} | {kind: own}
                schema = {"$ref": f"#/components/schemas/{kind}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Loraplex", "version": version("loraplex")},
        "paths": paths,
        "components": {"schemas": schemas},
    }


# Methods of a path that is not served.
_METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS")


def application(gateway: Gateway, requests_limit: int) -> Router:
    """Return the ASGI application."""
    running = OpenRequests(requests_limit)
    routes: Sequence[BaseRoute] = [
        Route(path, HttpEndpoint(path, served.protocol, served.handlers, gateway, running, served.operation))
        for path, served in PATHS.items()
    ]
    other = HttpEndpoint("other", OPENAI, dict.fromkeys(_METHODS, unknown_path), gateway, running)
    return Router(routes, default=other, redirect_slashes=False)


@asynccontextmanager
async def serving(
    settings: GatewaySettings, metrics: GatewayMetrics, spans: Spans | None = None
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Serve while the context is open; yields the address, and a task that ends if the server does.

    At the end running answers get their time. Raises PortInUse or SettingsError before it serves.
    """
    providers, cookies = _sign_in(settings)
    cluster = Cluster(settings.router, settings.store, settings.ca, settings.operator_router, settings.operator_store)
    gateway = Gateway(
        cluster,
        metrics,
        own_names(settings),
        bool(settings.ca),
        Turns(settings.responses_kept_s),
        providers,
        cookies,
        spans=spans or Spans(),
        logprobs_mode=settings.logprobs_mode,
    )
    app = application(gateway, settings.requests_limit)
    server = http_server(app, settings, OPENAI.error, metrics.connections, metrics.closed)
    if settings.tls_cert:
        metrics.certificate_end.set_function(lambda: end_of(Path(settings.tls_cert).read_bytes()))
    with listen(settings.host, settings.port) as bound:
        running = asyncio.create_task(server.serve([bound]))
        await server.start_tried.wait()
        following = asyncio.create_task(providers.tokens.follow()) if providers else None
        try:
            yield f"{settings.host}:{bound.getsockname()[1]}", running
        finally:
            if following is not None:
                following.cancel()
            server.should_exit = True
            await running
            # Answers that were cut send their last events.
            if rest := set(server.server_state.tasks):
                await asyncio.wait(rest, timeout=_LAST_EVENTS_S)
            gateway.long.close()
            await cluster.close()


def _sign_in(settings: GatewaySettings) -> tuple[Providers, Cookies] | tuple[None, None]:
    """Return what signs people in, where the settings say so. Raises SettingsError."""
    if not settings.page_url:
        return None, None
    try:
        cookies = Cookies(settings.session_key, settings.page_url)
        return Providers(JwtReader(settings.jwt_issuers), cookies.page), cookies
    except ValueError as error:
        raise SettingsError(str(error)) from error


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUse, SettingsError or MetricsPortError before it serves."""
    stop, metrics = stop_signal(), GatewayMetrics()
    metrics_server = serve_metrics(metrics, settings.host, settings.metrics_port)
    spans = set_up_tracing("gateway", os.environ)
    async with serving(settings, metrics, spans) as (address, running):
        running.add_done_callback(lambda _: stop.set())
        metrics.health.set()
        print(f"ready gateway={address}{metrics.ready_word}", flush=True)
        await stop.wait()
        metrics.health.stop()
        log.info("stops; running answers get %g s", settings.drain_s)
    await asyncio.to_thread(spans.close)
    if metrics_server is not None:
        await asyncio.to_thread(metrics_server.close)
