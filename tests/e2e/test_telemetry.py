"""Telemetry of a cluster: metrics that move, one trace from the SDK to the engine's steps, traffic, logs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from prometheus_client.parser import text_string_to_metric_families

from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex_client import NotFoundError

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

PROMPT, TOKENS = "a secret prompt", 12
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
LABELS = {
    name: {label for label in labels.split(",") if label}
    for name, labels in re.findall(r"^[|-] `(loraplex_\w+)(?:\{([\w,]+)\})?`", PAGE, re.MULTILINE)
}


# Spans by name, each with the service that sent it.
Spans = dict[str, list[tuple[str, Any]]]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what is sent over OTLP; `spans` by name, each with the service that sent it."""

    def __init__(self) -> None:
        self.spans: Spans = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = attributes(resource.resource)["service.name"]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.setdefault(span.name, []).append((service, span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def in_trace(self, trace_id: str) -> Spans:
        """Return the spans of a trace, by name."""
        mine = {name: [one for one in of if one[1].trace_id.hex() == trace_id] for name, of in self.spans.items()}
        return {name: of for name, of in mine.items() if of}


def attributes(holder: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """A collector, and where it listens."""
    server, found = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield found, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def scrape(address: str) -> Samples:
    """The samples that a process serves; asserts that each has the labels of its line in the docs."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    found: Samples = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(fetch)):
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            if name in LABELS:
                assert set(sample.labels) - {"le"} == LABELS[name], name
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"loraplex_{name}", tuple(sorted(labels.items()))), 0.0)


def probe(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/{path}", timeout=60) as answer:
        content: bytes = answer.read()
        return content


async def test_metrics_traces_traffic_and_logs(
    start_cluster: StartCluster,
    hash_adapters: Mapping[str, Path],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with collector() as (found, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("LORAPLEX_LOG_FORMAT", "json")
        async with start_cluster("hash:?vocab=600&step_ms=1&draft=0.6", hash_adapters, http=True) as cluster:
            ready = {
                name: await cluster.local.processes[name].wait_ready() for name in ("router-1", "worker-1", "store")
            }
            model = (await cluster.client.models())[0].name
            memory = InMemorySpanExporter()
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(memory))
            with provider.get_tracer("the program").start_as_current_span("the program's own"):
                answer = await cluster.client.generate(
                    PROMPT, adapter_id="a", max_tokens=TOKENS, ignore_eos=True, n=2, seed=5, temperature=0.5
                )
            with pytest.raises(NotFoundError):
                await cluster.client.generate(PROMPT, adapter_id="nobody")
            await eventually(cluster.idle)

            async def looked() -> bool:
                seen = await scrape(ready["router-1"]["metrics"])
                serving = value(seen, "workers", model=model, phase="serving", revision="live")
                return serving == 1 and value(seen, "cluster_kv_cache_usage_perc", model=model) == 0

            await eventually(looked)  # the router looks every second
            of_router, of_worker = [await scrape(ready[name]["metrics"]) for name in ("router-1", "worker-1")]
            check_router(of_router, model)
            check_worker(of_worker)
            check_drafts(of_router, of_worker)
            check_store(await scrape(ready["store"]["metrics"]))
            for name, path in product(ready, ("livez", "readyz", "startupz")):
                assert await asyncio.to_thread(probe, ready[name]["metrics"], path) == b"ok\n", (name, path)
            async with grpc.aio.insecure_channel(cluster.local.router) as channel:
                stub = cluster_pb2_grpc.ClusterServiceStub(channel)
                check_traffic(await stub.GetTraffic(cluster_pb2.GetTrafficRequest()))

            check_top(*[await command(name, "--router", cluster.local.router, *flags) for name, flags in COMMANDS])

            body = await asyncio.to_thread(complete, f"http://{cluster.local.http}/v1/completions")

            async def is_on_the_page() -> bool:
                return len(found.spans.get("attempt", ())) == 2 and "POST /v1/completions" in found.spans

            await eventually(is_on_the_page)
            logs = {name: (cluster.local.data_dir / "logs" / f"{name}.log").read_text() for name in ready}
        (program,) = memory.get_finished_spans()
        program_trace = format(program.context.trace_id, "032x")
        check_trace(found.in_trace(program_trace), model, answer.request_id, program_trace, program.context.span_id)
        assert len(found.spans[f"text_completion {model}"]) == 3  # the refused request has a trace of its own
        check_http_trace(found.in_trace(TRACE_ID), model, body)
        assert not any(PROMPT in str(span) for spans in found.spans.values() for _, span in spans)
        check_logs(logs)


COMMANDS = (("top", ()), ("top", ("--json",)), ("queues", ("--json",)))


async def command(*arguments: str) -> str:
    """Return the output of `loraplex ARGUMENTS` in a pipe."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraplex.cli", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()


def check_top(plain: str, whole: str, queues: str) -> None:
    """Lines of cells in a pipe; everything as JSON."""
    rows = [line.split("\t") for line in plain.splitlines()]
    assert ["acme", "acme/a"] in [row[:2] for row in rows]
    assert "█" not in plain
    value = json.loads(whole)
    assert value["traffic"]["requests"] == {"OK": 1, "NOT_FOUND": 1}
    assert [worker["phase"] for worker in value["workers"]] == ["serving"]
    (queue,) = json.loads(queues)
    changing = queue.pop("jobs_per_second"), value["queues"][0].pop("jobs_per_second")
    assert all(rate >= 0 for rate in changing)
    assert [queue] == value["queues"]
    assert queue["arrived_work"] == queue["claimed_work"] > 0
    rows = queue.pop("rows")
    assert (queue.pop("cell"), queue.pop("state"), queue.pop("workers"), rows > 0) == ("main", "open", 1, True)
    assert {**queue, "arrived_work": 0, "claimed_work": 0} == {
        **{"model": "hash", "waiting": 0, "running": 0, "waiting_work": 0, "arrived_work": 0, "claimed_work": 0},
        "oldest_wait": 0.0,
    }


def check_router(samples: Samples, model: str) -> None:
    assert value(samples, "requests_total", code="OK") == value(samples, "requests_total", code="NOT_FOUND") == 1
    assert value(samples, "request_success_total", model=model, finished_reason="length") == 2
    assert value(samples, "prompt_tokens_total", model=model) == len(PROMPT)
    assert value(samples, "generation_tokens_total", model=model) == 2 * TOKENS
    whose = {"tenant": "acme", "adapter": "acme/a"}
    assert value(samples, "tenant_requests_total", **whose) == 1
    assert value(samples, "tenant_generation_tokens_total", **whose) == 2 * TOKENS
    failed = {"tenant": "acme", "code": "NOT_FOUND", "reason": "NOT_FOUND"}
    assert value(samples, "tenant_request_failures_total", **failed) == 1
    assert value(samples, "tenant_first_token_seconds_count", tenant="acme") == 1
    assert value(samples, "tenant_first_token_seconds_bucket", tenant="acme", le="10.0") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(samples, f"{name}_count", model=model) == 1
        assert value(samples, f"{name}_sum", model=model) > 0
    # the two answers' messages, but for the first of each
    assert 0 < value(samples, "inter_token_latency_seconds_count", model=model) <= 2 * (TOKENS - 1)
    assert value(samples, "enqueue_seconds_count") == 1
    assert value(samples, "relay_frames_received_total") >= value(samples, "relay_messages_received_total") > 0
    assert value(samples, "relay_links") in {0, 1}
    assert value(samples, "redispatches_total", cause="lost") == 0
    assert value(samples, "rpc_requests_total", method="ListModels", code="OK") >= 1
    assert value(samples, "cluster_kv_cache_usage_perc", model=model) == 0
    (adapters,) = (dict(labels) for name, labels in samples if name == "loraplex_lora_requests_info")
    assert int(adapters.pop("max_lora")) > 0
    assert set(adapters.values()) == {""}


def check_drafts(of_router: Samples, of_worker: Samples) -> None:
    """The worker's drafts are those of the one answered request."""
    names = [f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    steps, drafted, accepted = [value(of_worker, name) for name in names]
    assert 0 < steps <= drafted > accepted > 0
    whose = {"tenant": "acme", "adapter": "acme/a"}
    assert [value(of_router, f"tenant_{name}", **whose) for name in names] == [steps, drafted, accepted]


def check_worker(samples: Samples) -> None:
    assert value(samples, "jobs_claimed_total") == value(samples, "jobs_ended_total", outcome="finished") == 1
    assert value(samples, "claims_total") >= value(samples, "claim_seconds_count") >= 1
    assert value(samples, "engine_generation_tokens_total") == 2 * TOKENS
    assert value(samples, "worker_tenant_tokens_total", tenant="acme") == 2 * TOKENS
    least = TOKENS - value(samples, "spec_decode_num_accepted_tokens_total")
    assert value(samples, "engine_steps_total") >= value(samples, "engine_batch_size_count") >= least
    assert value(samples, "engine_computed_tokens_total") >= len(PROMPT) + 2 * (TOKENS - 1)
    # the second answer comes in when the first has a token, and finds nothing: the prompt fills no block
    assert value(samples, "prefix_cache_queries_total") == 2 * len(PROMPT)
    assert value(samples, "request_prefill_time_seconds_count") == 2
    assert value(samples, "request_decode_time_seconds_sum") > 0
    assert value(samples, "adapter_fetches_total", result="ok") == value(samples, "adapter_loads_total") == 1
    assert value(samples, "adapter_fetch_bytes_total") > 0
    assert value(samples, "adapter_requests_total", tier="device", result="miss") == 1
    assert value(samples, "adapter_slots", state="used") == 1
    assert value(samples, "num_requests_running") == value(samples, "kv_cache_usage_perc") == 0
    assert value(samples, "relay_frames_sent_total") >= value(samples, "relay_messages_sent_total") > 0
    assert value(samples, "num_preemptions_total") == value(samples, "engines_lost_total") == 0


def check_store(samples: Samples) -> None:
    assert value(samples, "store_revisions_published_total") == 3
    # The worker's, and the router's of the adapter's settings.
    assert value(samples, "rpc_requests_total", method="DownloadRevision", code="OK") == 2
    assert value(samples, "store_received_bytes_total") > value(samples, "store_sent_bytes_total") > 0


def check_traffic(traffic: cluster_pb2.GetTrafficResponse) -> None:
    assert dict(traffic.requests) == {"OK": 1, "NOT_FOUND": 1}
    assert traffic.completion_tokens == 2 * TOKENS
    assert sum(traffic.time_to_first_token.counts) == 1
    assert len(traffic.time_to_first_token.counts) == len(traffic.time_to_first_token.bounds) + 1
    (adapter,) = traffic.adapters
    assert (adapter.tenant, adapter.adapter, adapter.requests) == ("acme", "acme/a", 1)


def check_trace(found: Spans, model: str, request_id: str, trace_id: str, parent: int) -> None:
    ((service, router),) = found[f"text_completion {model}"]
    assert service == "loraplex-router"
    assert router.trace_id.hex() == trace_id
    assert int.from_bytes(router.parent_span_id, "big") == parent
    values = attributes(router)
    assert values[gen_ai_attributes.GEN_AI_RESPONSE_ID] == request_id
    assert values[gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS] == len(PROMPT)
    assert values[gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS] == 2 * TOKENS
    assert values[gen_ai_attributes.GEN_AI_REQUEST_SEED] == 5
    for name in ("queue", "relay"):
        ((_, span),) = found[name]
        assert (span.trace_id, span.parent_span_id) == (router.trace_id, router.span_id)
    ((service, attempt),) = found["attempt"]
    assert service == "loraplex-worker"
    assert (attempt.trace_id, attempt.parent_span_id) == (router.trace_id, router.span_id)
    assert attributes(attempt)["loraplex.outcome"] == "finished"
    for name, count in (("adapter fetch", 1), ("adapter load", 2), ("prefill", 2), ("decode", 2)):
        spans = [span for _, span in found[name]]
        assert len(spans) == count, name
        for span in spans:
            assert (span.trace_id, span.parent_span_id) == (router.trace_id, attempt.span_id)
            assert attempt.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    for _, span in found["decode"]:
        steps = attributes(span)
        assert 0 < steps["loraplex.last_step"] - steps["loraplex.first_step"] < TOKENS


# The trace of a client that calls the gateway, and its span.
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def complete(url: str) -> Any:
    """Ask the gateway for a completion."""
    asked = json.dumps({"model": "a", "prompt": PROMPT, "max_tokens": 3, "temperature": 0.5}).encode()
    headers = {
        "content-type": "application/json",
        "x-loraplex-tenant": "acme",
        "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
    }
    with urllib.request.urlopen(urllib.request.Request(url, asked, headers), timeout=60) as answer:
        return json.load(answer)


def check_http_trace(found: Spans, model: str, body: Any) -> None:
    """One trace: the client's span, the gateway's, the router's, the worker's."""
    parent = PARENT_ID
    for name, sender in (
        ("POST /v1/completions", "loraplex-gateway"),
        (f"text_completion {model}", "loraplex-router"),
        ("attempt", "loraplex-worker"),
    ):
        ((service, span),) = found[name]
        assert (service, span.parent_span_id.hex()) == (sender, parent)
        parent = span.span_id.hex()
    gateway, router = (attributes(found[name][0][1]) for name in ("POST /v1/completions", f"text_completion {model}"))
    for name in (
        gen_ai_attributes.GEN_AI_OPERATION_NAME,
        gen_ai_attributes.GEN_AI_PROVIDER_NAME,
        gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS,
        gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE,
        gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS,
        gen_ai_attributes.GEN_AI_RESPONSE_ID,
        gen_ai_attributes.GEN_AI_RESPONSE_MODEL,
        gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS,
        gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS,
        gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS,
    ):
        assert gateway[name] == router[name], name
    assert gateway[gen_ai_attributes.GEN_AI_REQUEST_MODEL] == "a"
    assert gateway[gen_ai_attributes.GEN_AI_RESPONSE_MODEL] == body["system_fingerprint"]
    assert gateway[gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS] == body["usage"]["completion_tokens"] == 3
    assert (gateway["http.route"], gateway["http.response.status_code"]) == ("/v1/completions", 200)
    assert gateway["server.address"] == "127.0.0.1"


def check_logs(logs: Mapping[str, str]) -> None:
    lines = [json.loads(line) for line in logs["router-1"].splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["message"] == "request ended"]
    assert {(line["level"], len(line["trace_id"])) for line in ended} == {("info", 32)}
    assert any(line["code"] == "OK" and line["request_id"] for line in ended)
    (refused,) = [line for line in ended if line["code"] != "OK"]
    assert (refused["level"], refused["code"], refused["tenant"]) == ("info", "NOT_FOUND", "acme")
    assert {line["process"] for line in lines} == {"router"}
    for log in logs.values():
        assert PROMPT not in log
