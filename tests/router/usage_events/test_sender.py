"""Usage events to a real HTTP collector that fails, hangs and is away, from routers that die: Redis keeps them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import Ledger
from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import Quotas
from loraplex.usage_events.log import UsageLog
from loraplex.usage_events.sender import CONTENT_TYPE, UsageSender, check_url
from tests.router.quotas.test_quotas import begun, reserved


class Collector:
    """A collector that keeps ids. `faults` are what it does with its next calls: a status, `hang` or `drip`."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        # Ids of the requests whose events it has.
        self.requests: set[str] = set()
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
                        events = json.loads(body)
                        collector.ids += [event["id"] for event in events]
                        collector.requests |= {event["data"]["request_id"] for event in events}
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

    def wait_requests(self, ids: set[str]) -> None:
        """Wait until it has events of all these requests."""
        with self._called:
            assert self._called.wait_for(lambda: ids <= self.requests, 60), ids - self.requests

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


New = Callable[..., UsageLog]


@pytest.fixture
def new(redis: Redis, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> New:
    """Makes the log of a router that sends to the collector; events that wait are claimed at once."""
    monkeypatch.setattr("loraplex.usage_events.log.CLAIM_MS", 0)
    monkeypatch.setattr("loraplex.usage_events.log.CLAIM_S", 0.0)
    monkeypatch.setattr("loraplex.usage_events.log.WRITE_S", 0.0)
    monkeypatch.setattr("loraplex.usage_events.sender.RETRY_S", 0.005)
    monkeypatch.setattr("loraplex.usage_events.sender.LONGEST_RETRY_S", 0.01)

    def make(path: Path | None = None) -> UsageLog:
        metrics = RouterMetrics()
        return UsageLog(redis, path, metrics, UsageSender(collector.url, metrics, call_s=0.2))

    return make


async def charge(redis: Redis, count: int) -> set[str]:
    """Charge requests; returns the ids of their events."""
    quotas = Quotas(Ledger(redis), Plans(), usage=UsageLog(redis, None, RouterMetrics()))
    ids = set[str]()
    for _ in range(count):
        begun(budget := await reserved(quotas, 2, 100), 60)
        await budget.settle()
        ids.add(f"{budget.reservation.id}:0")
    return ids


def waiting(redis: Redis) -> Any:
    return redis.xlen(LEDGER + "usage")


async def test_a_collector_that_fails_hangs_and_is_away_gets_each_event(
    new: New, redis: Redis, collector: Collector, tmp_path: Path
) -> None:
    collector.faults = [500, 429, "hang", "drip", 302, 299, 413]
    log = new(tmp_path / "usage.jsonl")
    ids = await charge(redis, 3)
    following = asyncio.create_task(log.follow())
    await asyncio.to_thread(collector.wait, ids)
    assert collector.types == {CONTENT_TYPE}
    await asyncio.to_thread(collector.wait_calls, 9)  # the last one's halves too
    following.cancel()
    assert await log.write()
    collector.stop()
    ids |= await charge(redis, 2)
    assert not await log.write()
    assert await waiting(redis) == 2
    assert log._metrics.usage_waiting._value.get() == 2
    collector.start()
    assert await log.write()
    assert set(collector.ids) == ids
    assert await waiting(redis) == 0
    assert log._metrics.usage_waiting._value.get() == 0
    lines = (tmp_path / "usage.jsonl").read_text().splitlines()
    assert {json.loads(line)["id"] for line in lines} == ids


async def test_the_events_of_a_router_that_died_while_the_collector_was_away_are_sent_by_another(
    new: New, redis: Redis, collector: Collector
) -> None:
    collector.stop()
    ids, dies = await charge(redis, 5), new()
    assert not await dies.write()
    await dies.close(0.0)
    collector.start()
    assert await new().write()
    assert sorted(collector.ids) == sorted(ids)
    assert await waiting(redis) == 0


async def test_a_collector_that_takes_its_time_gets_events_from_one_router(
    new: New, redis: Redis, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.usage_events.log.CLAIM_MS", 2_000)
    ids, renewed = await charge(redis, 2), asyncio.Event()
    renew = redis.xclaim

    async def claim(*arguments: Any, **options: Any) -> Any:
        answer = await renew(*arguments, **options)
        renewed.set()
        return answer

    monkeypatch.setattr(redis, "xclaim", claim)
    collector.faults = ["hang"]
    first = asyncio.create_task(new().write())
    await renewed.wait()
    assert await new().write(), "there is nothing for it"
    assert collector.ids == []
    assert not await first
    assert await waiting(redis) == len(ids)


async def test_a_disk_that_is_full_does_not_have_events_sent_twice(
    new: New, redis: Redis, collector: Collector, tmp_path: Path
) -> None:
    (path := tmp_path / "usage.jsonl").mkdir()
    ids, log = await charge(redis, 2), new(path)
    for _ in range(3):
        assert not await log.write()
    assert sorted(collector.ids) == sorted(ids)
    path.rmdir()
    assert await log.write()
    assert sorted(collector.ids) == sorted(ids)


def test_a_url_that_is_none_is_refused() -> None:
    for url in ("ftp://host/", "http://", "http://user:word@host/", "http://host:port/", "host:80"):
        with pytest.raises(ValueError, match="--usage-url"):
            check_url(url)
