"""Sends audit records as OTLP logs (gRPC), by the standard environment variables of OpenTelemetry.

A record's body is its line, with the SHA-256 of the line before it: bodies in the order of their numbers are an audit
log that `loraplex audit verify` checks. Its values are attributes too, `loraplex.audit.NAME`. The chains of a process's
starts differ by the resource's `service.instance.id`. The same record may come twice where an answer was lost.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as service_pb2
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.util.re import parse_env_headers

from loraplex.runtime.telemetry.tracing import resource_of
from loraplex.runtime.tenancy.audit_log import OTLP, AuditCounts, AuditFileError

log = logging.getLogger(__name__)

# Timeout in seconds of a call to the collector; the audit log sends its records again after a failure.
SEND_S = 5.0
# Maximum bytes of the lines of one call, which sends their values once more: collectors take messages of 4 MiB.
CALL_BYTES = 1024 * 1024
# Pauses in milliseconds between tries to connect, so that a collector that comes back is found soon.
_CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1_000))
_PREFIX = "loraplex.audit."
# Events that tell of somebody without the right to do what they tried.
_REFUSALS = frozenset({"refused", "refused more"})
_INT64 = range(-(2**63), 2**63)


class Exporter:
    """Sends the records of one process to the collector. Raises AuditFileError where none is named."""

    def __init__(self, process: str, counts: AuditCounts, environ: Mapping[str, str] = os.environ) -> None:
        self._counts = counts
        self._channel = _channel(environ)
        self._stub = service_pb2_grpc.LogsServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._headers = tuple(parse_env_headers(_value(environ, "HEADERS"), liberal=True).items())
        attributes = {**resource_of(process, environ).attributes, "service.instance.id": str(uuid.uuid4())}
        self._resource = resource_pb2.Resource(attributes=_pairs(attributes))
        # Number of the last record that the collector has taken.
        self._sent = 0

    def send(self, lines: bytes) -> None:
        """Send records, lines that end with a newline, but for those that were sent. Raises OSError."""
        for part in _parts(lines.splitlines()):
            records = [(line, values) for line in part if (values := json.loads(line))["number"] > self._sent]
            if records:
                self._call([_log_record(line, values) for line, values in records])
                self._sent = records[-1][1]["number"]

    def _call(self, records: Sequence[logs_pb2.LogRecord]) -> None:
        scope = common_pb2.InstrumentationScope(name="loraplex.audit")
        of = logs_pb2.ResourceLogs(
            resource=self._resource, scope_logs=[logs_pb2.ScopeLogs(scope=scope, log_records=records)]
        )
        request = service_pb2.ExportLogsServiceRequest(resource_logs=[of])
        try:
            answer = self._stub.Export(request, timeout=SEND_S, metadata=self._headers, wait_for_ready=True)
        except grpc.RpcError as error:
            call: Any = error  # at run time every RpcError of a call is a grpc.Call
            raise OSError(0, f"the collector: {call.code().name}: {call.details()}") from error
        if refused := answer.partial_success.rejected_log_records:  # which it would refuse again
            self._counts.lost.inc(refused)
            log.error("the collector refused %d audit records: %s", refused, answer.partial_success.error_message)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


def _value(environ: Mapping[str, str], name: str) -> str:
    """Return a variable of the exporters of logs, or else that of all."""
    return environ.get(f"OTEL_EXPORTER_OTLP_LOGS_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _channel(environ: Mapping[str, str]) -> grpc.Channel:
    endpoint = _value(environ, "ENDPOINT")
    if not endpoint:
        raise AuditFileError(f"--audit {OTLP}: set OTEL_EXPORTER_OTLP_LOGS_ENDPOINT to a collector, http://HOST:4317")
    url = urlsplit(endpoint)
    gzip = _value(environ, "COMPRESSION").strip().lower() == "gzip"
    options: Any = {"options": _CHANNEL_OPTIONS, "compression": grpc.Compression.Gzip if gzip else None}
    asked = _value(environ, "INSECURE").strip().lower()
    if url.scheme != "https" and (asked == "true" if asked else url.scheme == "http"):
        return grpc.insecure_channel(url.netloc or endpoint, **options)
    files = [_read(environ, name) for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")]
    return grpc.secure_channel(url.netloc or endpoint, grpc.ssl_channel_credentials(*files), **options)


def _read(environ: Mapping[str, str], name: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if (path := _value(environ, name)) else None
    except OSError as error:
        raise AuditFileError(f"--audit {OTLP}: OTEL_EXPORTER_OTLP_{name}: {path}: {error.strerror}") from error


def _parts(lines: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Divide lines into parts of at most CALL_BYTES; a larger line is a part of its own."""
    part: list[bytes] = []
    for line in lines:
        if part and sum(map(len, part)) + len(line) > CALL_BYTES:
            yield part
            part = []
        part.append(line)
    yield part


def _log_record(line: bytes, values: Mapping[str, Any]) -> logs_pb2.LogRecord:
    at_ns = round(datetime.fromisoformat(values["time"]).timestamp() * 1e3) * 1_000_000
    is_refusal = values["event"] in _REFUSALS
    details = {f"details.{name}": value for name, value in values.get("details", {}).items()}
    named = {name: value for name, value in values.items() if name not in {"time", "details"}} | details
    return logs_pb2.LogRecord(
        time_unix_nano=at_ns,
        observed_time_unix_nano=at_ns,
        event_name=_PREFIX + values["event"].replace(" ", "_"),
        severity_number=logs_pb2.SEVERITY_NUMBER_WARN if is_refusal else logs_pb2.SEVERITY_NUMBER_INFO,
        severity_text="WARN" if is_refusal else "INFO",
        body=common_pb2.AnyValue(string_value=line.decode()),
        attributes=_pairs({_PREFIX + name: value for name, value in named.items()}),
    )


def _pairs(values: Mapping[str, Any]) -> list[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=name, value=_any(value)) for name, value in values.items()]


def _any(value: Any) -> common_pb2.AnyValue:
    match value:
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case int() if value in _INT64:
            return common_pb2.AnyValue(int_value=value)
        case float():
            return common_pb2.AnyValue(double_value=value)
        case list() | tuple():
            return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=map(_any, value)))
        case str():
            return common_pb2.AnyValue(string_value=value)
    return common_pb2.AnyValue(string_value=json.dumps(value))
