"""Usage events to a real HTTP collector that fails, hangs and restarts, from a sender that is killed and restarted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.usage import SOURCE, TYPE
from loraplex.router.quotas.usage_sender import CONTENT_TYPE, Cursor, UsageSender, check_url


class Collector:
    """A collector that keeps ids. `faults` are what it does with its next calls: a status, `hang` or `drip`."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.bodies = b""
        self.types: set[str] = set()
        self.faults: list[int | str] = []
        self.hanging, self.calls = threading.Event(), 0
        self._called = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> None:
        """Listen, at the port of before."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            """Takes batches."""

            def do_POST(self) -> None:
                """Take a batch, or do what the next fault says."""
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector._called:
                    fault = collector.faults.pop(0) if collector.faults else 204
                    collector.calls += 1
                    collector.bodies += body
                    if fault in {204, 299}:
                        collector.ids += [event["id"] for event in json.loads(body)]
                        collector.types.add(self.headers["Content-Type"])
                    collector._called.notify_all()
                if fault == "hang":
                    collector.hanging.wait(30)
                    return
                if fault == "drip":
                    with suppress(ConnectionError):
                        while not collector.hanging.wait(0.01):
                            self.wfile.write(b" ")
                    return
                self.send_response(500 if fault == 299 else int(fault))  # 299: taken, but the answer is lost
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        assert self._server is not None
        self.hanging.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Return the URL at which the collector listens."""
        return f"http://127.0.0.1:{self.port}/usage?x=1"

    def wait(self, ids: set[str]) -> None:
        """Wait until it has all of these."""
        with self._called:
            assert self._called.wait_for(lambda: ids <= set(self.ids), 60), ids - set(self.ids)

    def wait_calls(self, count: int) -> None:
        """Wait until it was called so often."""
        with self._called:
            assert self._called.wait_for(lambda: self.calls >= count, 60)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that listens."""
    found = Collector()
    found.start()
    yield found
    found.stop()


def append(path: Path, *ids: str) -> set[str]:
    """Write events."""
    lines = [json.dumps({"specversion": "1.0", "id": one, "source": SOURCE, "type": TYPE}) + "\n" for one in ids]
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(lines)
    return set(ids)


@pytest.fixture
def send(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], UsageSender]]:
    """Starts a sender of the file `usage`."""
    monkeypatch.setattr("loraplex.router.quotas.usage_sender.LOOK_S", 0.005)
    made: list[UsageSender] = []

    def start() -> UsageSender:
        made.append(UsageSender(tmp_path / "usage", collector.url, RouterMetrics(), pause_s=0.01, call_s=0.2))
        return made[-1]

    yield start
    for sender in made:
        sender.close(5.0)


def test_a_collector_that_fails_hangs_and_restarts_gets_each_event(
    tmp_path: Path, collector: Collector, send: Callable[[], UsageSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, away = tmp_path / "usage", threading.Event()
    collector.faults = [500, 429, "hang", "drip", 302, 299, 413]
    ids = append(path, *"abc")
    sender = send()
    collector.wait(ids)
    assert collector.types == {CONTENT_TYPE}
    collector.wait_calls(7)
    collector.stop()
    monkeypatch.setattr(sender._metrics.usage_send_failures, "inc", away.set)
    ids |= append(path, *"de")
    assert away.wait(60)
    collector.start()
    collector.wait(ids)
    path.rename(tmp_path / "usage.1")
    ids |= append(path, *"fg")
    sender._cursor._settle_s = 0.0
    collector.wait(ids)
    sender.close(5.0)
    assert set(collector.ids) == ids
    assert sender._cursor.unsent_bytes() == 0


def test_a_restart_goes_on_where_the_last_batch_was_taken(
    tmp_path: Path, collector: Collector, send: Callable[[], UsageSender]
) -> None:
    path = tmp_path / "usage"
    first = append(path, *"ab")
    sender = send()
    collector.wait(first)
    sender.close(5.0)
    append(path, *"cd")
    path.rename(tmp_path / "usage.2")  # two files were written meanwhile
    append(path, *"ef")
    path.rename(tmp_path / "usage.1")
    with open(path, "wb") as file:
        file.write(b'{"specversion":"1.0","id":"to')
    with open(path, "ab") as file:
        file.write(b"\n")
    append(path, "g")
    collector.ids.clear()
    (sender := send())._cursor._settle_s = 0.0
    collector.wait(set("cdefg"))
    sender.close(5.0)
    assert collector.ids == list("cdefg")


def test_what_is_not_sent_of_a_file_that_is_copied_and_emptied_is_sent_from_the_copy(
    tmp_path: Path, collector: Collector, send: Callable[[], UsageSender]
) -> None:
    path = tmp_path / "usage"
    ids = append(path, *"ab")
    sender = send()
    collector.wait(ids)
    collector.faults = [500] * 3
    ids |= append(path, *"cd")
    collector.wait_calls(collector.calls + 1)
    shutil.copy(path, tmp_path / "usage.1")
    os.truncate(path, 0)
    ids |= append(path, "e")
    sender._cursor._settle_s = 0.0
    collector.wait(ids)
    sender.close(5.0)
    assert collector.ids == list("abcde")


def test_a_sender_that_is_killed_again_and_again_loses_nothing(tmp_path: Path, collector: Collector) -> None:
    path, ids = tmp_path / "usage", set[str]()
    code = (
        "import sys; from pathlib import Path; from loraplex.router.metrics import RouterMetrics\n"
        "from loraplex.router.quotas import usage_sender as u; u.BATCH_EVENTS, u.LOOK_S = 3, 0.005\n"
        "u.UsageSender(Path(sys.argv[1]), sys.argv[2], RouterMetrics(), pause_s=0.01); sys.stdin.read()"
    )
    for life in range(3):
        collector.faults = [500] * life
        ids |= append(path, *(f"{life}-{number}" for number in range(20)))
        calls = collector.calls
        argv = [sys.executable, "-c", code, str(path), collector.url]
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
            collector.wait_calls(calls + 3)
            process.kill()
    sender = UsageSender(path, collector.url, RouterMetrics())
    collector.wait(ids)
    sender.close(5.0)
    assert set(collector.ids) == ids
    assert Cursor(path).read(1)[0] == []


def test_a_url_that_is_none_is_refused() -> None:
    for url in ("ftp://host/", "http://", "http://user:word@host/", "http://host:port/", "host:80"):
        with pytest.raises(ValueError, match="--usage-url"):
            check_url(url)
