"""Audit records at a collector: logs with names, whose bodies are the chain; none is lost or told apart silently."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc

from loraplex.audit_export import otlp
from loraplex.cli.audit_chain import read, verify
from loraplex.router.settings import RouterSettings
from loraplex.runtime.telemetry.metrics import Meters
from loraplex.runtime.tenancy.audit_log import AuditCounts, AuditFileError, AuditLog

VARIABLE = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"


class Collector(logs_service_pb2_grpc.LogsServiceServicer):
    """Keeps the log records that it is sent; `answers` are what it does with the next calls before it takes any."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.headers: list[dict[str, Any]] = []
        self.answers: list[grpc.StatusCode | int | None] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.headers.append(dict(context.invocation_metadata()))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "not now")
        self.calls.append(request)
        response = logs_service_pb2.ExportLogsServiceResponse()
        if isinstance(answer, int):
            response.partial_success.rejected_log_records = answer
            response.partial_success.error_message = "too old"
        return response

    @property
    def records(self) -> list[Any]:
        return [
            record
            for call in self.calls
            for resource in call.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    @property
    def numbers(self) -> list[int]:
        return [values_of(record.attributes)["loraplex.audit.number"] for record in self.records]


def values_of(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@contextmanager
def serving(collector: Collector, port: int = 0) -> Iterator[int]:
    """Serve the collector; yields the port."""
    server = grpc.server(ThreadPoolExecutor(2))
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def counts() -> AuditCounts:
    return AuditCounts(Meters())


def count(counter: Any) -> float:
    return float(counter._value.get())


def wait(condition: Callable[[], object]) -> None:
    while not condition():
        os.sched_yield()


def test_records_are_logs_whose_bodies_are_the_chain(
    collector: Collector, counts: AuditCounts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serving(collector) as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20k")
        log = AuditLog("otlp", "store", counts)
        details = {"adapter": "a", "names": ["b", "c"], "count": 2**70}
        log.record("call", method="KeyService/CreateKey", tenant="acme", result="OK", details=details)
        log.record("refused more", caller="others", count=12)
        log.close()
    path = tmp_path / "bodies.jsonl"
    path.write_text("".join(record.body.string_value + "\n" for record in collector.records))
    found = verify(read([path]), None)
    assert (found.records, found.faults, found.head) == (4, [], log.head)
    assert collector.headers[0]["authorization"] == "Bearer k"
    resource = values_of(collector.calls[0].resource_logs[0].resource.attributes)
    assert resource["service.name"] == "loraplex-store"
    assert resource["service.instance.id"]
    call, refusals = collector.records[1:3]
    assert (call.event_name, call.severity_text) == ("loraplex.audit.call", "INFO")
    assert (refusals.event_name, refusals.severity_text) == ("loraplex.audit.refused_more", "WARN")
    values = values_of(call.attributes)
    names = values.pop("loraplex.audit.details.names")
    assert [one.string_value for one in names.values] == ["b", "c"]
    assert values.pop("loraplex.audit.previous")
    assert {name.removeprefix("loraplex.audit."): value for name, value in values.items()} == {
        **{"number": 2, "process": "store", "event": "call", "method": "KeyService/CreateKey"},
        **{"tenant": "acme", "result": "OK", "details.adapter": "a", "details.count": str(2**70)},
    }
    assert (count(counts.records), count(counts.failed), count(counts.lost)) == (4, 0, 0)


def test_records_wait_for_a_collector_that_is_away_and_those_without_room_are_counted(
    collector: Collector, counts: AuditCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.runtime.tenancy.audit_log.RETRY_S", 0.0)
    monkeypatch.setattr("loraplex.runtime.tenancy.audit_log.WAITING_LIMIT", 3)
    with serving(Collector()) as port:
        pass  # it is away now, and nobody else takes its port
    monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{port}")
    monkeypatch.setattr(otlp, "SEND_S", 0.02)
    log = AuditLog("otlp", "store", counts)
    wait(lambda: count(counts.failed) >= 1)
    while count(counts.lost) < 2:
        log.record("call")
    assert count(counts.records) == 0
    monkeypatch.setattr(otlp, "SEND_S", 30.0)
    with serving(collector, port):
        wait(lambda: count(counts.records))
        log.close()
    assert collector.numbers == list(range(1, len(collector.numbers) + 1))
    (lost,) = [record for record in collector.records if record.event_name == "loraplex.audit.records_lost"]
    assert values_of(lost.attributes)["loraplex.audit.count"] == count(counts.lost)


def test_a_failure_between_two_calls_repeats_none_of_the_first(
    collector: Collector, counts: AuditCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.runtime.tenancy.audit_log.RETRY_S", 0.0)
    monkeypatch.setattr(otlp, "CALL_BYTES", 1)
    collector.answers[:] = [None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
    with serving(collector) as port:
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{port}")
        log = AuditLog("otlp", "store", counts)
        for _ in range(3):
            log.record("call")
        wait(lambda: count(counts.records) >= 4)
        log.close()
    assert collector.numbers == [1, 2, 3, 4, 5]
    assert {len(call.resource_logs[0].scope_logs[0].log_records) for call in collector.calls} == {1}
    assert count(counts.failed) == 2


def test_what_the_collector_refuses_is_counted_as_lost(
    collector: Collector, counts: AuditCounts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector.answers[:] = [1]
    with serving(collector) as port:
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{port}")
        AuditLog("otlp", "store", counts).close()
    assert count(counts.lost) == 1
    assert "the collector refused 1 audit records: too old" in caplog.text


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "--audit otlp: set OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"),
        (
            {VARIABLE: "https://collector:4317", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such.pem"},
            "--audit otlp: OTEL_EXPORTER_OTLP_CERTIFICATE: /no/such.pem: No such file or directory",
        ),
    ],
)
def test_a_collector_that_cannot_be_called_ends_the_start(
    counts: AuditCounts, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], why: str
) -> None:
    for name in (VARIABLE, "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AuditFileError) as refused:
        AuditLog("otlp", "store", counts)
    assert str(refused.value).startswith(why)


def test_several_router_processes_send_to_the_same_collector() -> None:
    settings = RouterSettings(store="127.0.0.1:1", redis_url="redis://127.0.0.1", audit="otlp", processes=2)
    assert settings.of_process(2).audit == "otlp"
