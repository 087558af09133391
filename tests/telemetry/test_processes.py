"""Test the start of every process: when traces are on, what log lines look like, where metrics are served."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest

from loraplex.runtime.telemetry.logging import environment_of, fields, logging_of, set_up_logging
from loraplex.runtime.telemetry.metrics import (
    CONNECTIONS,
    NO_METRICS,
    OTHER,
    BoundedNames,
    Meters,
    MetricsPortError,
    serve_metrics,
)
from loraplex.runtime.telemetry.tracing import Spans, asked_for, set_up_tracing, traceparent_in, traceparent_of


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_the_standard_environment_turns_traces_on(environ: dict[str, str], wanted: bool) -> None:
    assert asked_for(environ) == wanted


def test_without_it_there_is_nothing() -> None:
    spans = set_up_tracing("router", {})
    assert not spans.on
    assert isinstance(spans, Spans)
    assert traceparent_of(None) == ""
    assert traceparent_in(None) == ""
    assert traceparent_in([("traceparent", b"bytes")]) == ""
    assert traceparent_in([("a", "b"), ("traceparent", "00-1-2-01")]) == "00-1-2-01"


def test_a_line_is_an_object_with_its_fields(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("router", "json", "debug")
    log = logging.getLogger("somewhere")
    log.debug("a %s ended\nwell", "request", extra=fields(request_id="r-1", s=0.5))
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "debug",
        "process": "router",
        "logger": "somewhere",
        "message": "a request ended\nwell",
        "request_id": "r-1",
        "s": 0.5,
    }
    assert "ValueError: broken" in second["traceback"]


def test_a_plain_line_has_them_too_and_lower_levels_are_silent(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("worker", "text", "warning")
    log = logging.getLogger("somewhere")
    log.info("nothing", extra=fields(request_id="r-1"))
    log.warning("slow", extra=fields(request_id="r-2", code="OK"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING worker somewhere: slow request_id=r-2 code=OK")


def test_half_sent_requests_keep_no_probe_and_no_scrape_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    meters, before = Meters(), threading.active_count()
    server = serve_metrics(meters, "127.0.0.1", 0)
    assert server is not None
    address = meters.ready_word.removeprefix(" metrics=")
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)) as other:
        half = [socket.create_connection((host, int(port))) for _ in range(2 * CONNECTIONS)]
        for connection in half[CONNECTIONS:]:
            connection.sendall(b"GET /livez")
        with urllib.request.urlopen(f"http://{address}/livez", timeout=60) as answer:
            assert answer.status == 200
        half[0].settimeout(60)
        assert half[0].recv(1) == b""  # the oldest of the address that has most
        other.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        other.settimeout(60)
        assert other.recv(12) == b"HTTP/1.0 200"
    monkeypatch.setattr("loraplex.runtime.telemetry.metrics.WHOLE_S", 0.2)
    with socket.create_connection((host, int(port))) as drips, suppress(OSError):  # each piece comes in time
        while True:
            drips.sendall(b"x")
            threading.Event().wait(0.02)
    for connection in half:
        connection.close()
    while threading.active_count() > before + 1:
        threading.Event().wait(0.02)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        assert b"process_open_fds" in answer.read()
    for name in (
        "evil.test",
        "localhost.evil.test:9000",
    ):  # a page of another site, under a name that it lets mean this machine
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(f"http://{address}/metrics", headers={"Host": name}))
    server.close()


async def test_probes_tell_a_start_readiness_and_a_loop_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.runtime.telemetry.metrics.LOOP_S", 0.05)
    meters = Meters()
    server = serve_metrics(meters, "127.0.0.1", 0)
    assert server is not None
    address = meters.ready_word.removeprefix(" metrics=")

    def probe(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode().strip()

    async def probes() -> list[tuple[int, str]]:
        return [await asyncio.to_thread(probe, path) for path in ("/livez", "/startupz", "/readyz")]

    ok = (200, "ok")
    assert await probes() == [ok, (503, "starts"), (503, "starts")]
    meters.health.set("no engine serves")
    assert await probes() == [ok, (503, "no engine serves"), (503, "no engine serves")]
    meters.health.set()
    assert await probes() == [ok, ok, ok]
    meters.health.set("waits for Redis to answer")
    assert await probes() == [ok, ok, (503, "waits for Redis to answer")]
    meters.health.set()
    meters.health.stop()
    assert await probes() == [ok, ok, (503, "stops")]
    assert probe("/livez") == (503, "the event loop has not answered for 0.05 s")  # this call keeps it busy
    server.close()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_a_client_sends_begins_no_line_and_steers_no_terminal(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    set_up_logging("router", log_format)
    log = logging.getLogger("somewhere")
    sent = "x\r\nINFO router: all is well\x1b[2J\x9b1m\u2028\ud800"
    log.warning("refused: %s", sent, extra=fields(name=sent))
    try:
        raise ValueError(sent)
    except ValueError:
        log.exception("it failed")
    written = capsys.readouterr().err
    assert "\nINFO" not in written
    assert written.replace("\n", "").isprintable()
    assert len([line for line in written.splitlines() if "refused" in line]) == 1


def test_bad_log_settings_are_refused_and_good_ones_reach_a_child() -> None:
    with pytest.raises(ValueError, match="--log-format xml: not one of text, json"):
        set_up_logging("router", "xml")
    with pytest.raises(ValueError, match="--log-level loud: not one of debug"):
        set_up_logging("router", "text", "loud")
    assert logging_of(environment_of("json", "debug")) == {"log_format": "json", "log_level": "debug"}
    assert logging_of({}) == {}


def test_names_beyond_the_limit_share_one() -> None:
    names = BoundedNames(2)
    assert [names.bounded(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_a_taken_port_is_one_line_and_none_is_none() -> None:
    assert serve_metrics(Meters(), "127.0.0.1", NO_METRICS) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsPortError, match=f"--metrics-port: cannot listen on 127.0.0.1:{port}: "):
            serve_metrics(Meters(), "127.0.0.1", port)
    meters = Meters()
    server = serve_metrics(meters, "127.0.0.1", 0)
    assert server is not None
    address = meters.ready_word.removeprefix(" metrics=")
    server.close()
    host, port_text = address.rsplit(":", 1)
    with socket.create_server((host, int(port_text))):  # it is free again
        pass
