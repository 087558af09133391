"""Live workers that do not reach the router's relay: who may claim, when requests are refused, what the log says."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from loraplex.contracts.broker.messages import WorkerState
from loraplex.router.dispatch.links import UNREACHED_S, RelayReach
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.errors import Unavailable
from tests.broker.test_liveness import worker
from tests.router.recording_link import RecordingLink

ADDRESS = "10.9.9.9:50053"


class Watched:
    """A router's reach, with a clock of the test's, and the workers that live."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.metrics = RouterMetrics()
        self.reach = RelayReach(self.metrics, clock=lambda: self.now)
        self.reach.address = ADDRESS
        self.live = [lives(name) for name in names]

    def look(self, after_s: float = 0.0) -> list[str]:
        self.now += after_s
        return self.reach.look({"tiny": self.live})

    def refused(self) -> float:
        value = self.metrics.registry.get_sample_value("loraplex_relay_unreachable_total")
        assert value is not None
        return value


def lives(name: str) -> WorkerState:
    return replace(worker(name), incarnation=f"{name}-1")


def test_a_router_that_no_worker_reaches_refuses_and_names_its_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched("w1", "w2")
    assert watched.look() == []
    assert watched.look(UNREACHED_S - 0.1) == []
    watched.reach.check("tiny")
    assert watched.look(0.1) == ["tiny"]
    with pytest.raises(Unavailable, match=ADDRESS) as refused:
        watched.reach.check("tiny")
    assert (refused.value.reason, refused.value.retry_after_s) == ("RELAY_UNREACHABLE", 1.0)
    assert ADDRESS in watched.reach.waits_for()
    assert watched.refused() == 1
    assert watched.metrics.registry.get_sample_value("loraplex_relay_workers_unlinked") == 2
    watched.look(1.0)
    said = [record.getMessage() for record in caplog.records if ADDRESS in record.getMessage()]
    assert len(said) == 3  # one for each worker and one for the model, once
    # At once, not at the next look.
    watched.reach.links.up(RecordingLink("w2"))
    watched.reach.check("tiny")
    assert watched.look() == []
    assert not watched.reach.waits_for()


def test_one_worker_with_a_link_is_enough_and_jobs_are_placed_with_it_alone() -> None:
    watched = Watched("w1", "w2")
    watched.reach.links.up(RecordingLink("w2"))
    assert [state.worker_id for state in watched.reach.linked(watched.live)] == ["w2"]
    assert watched.look() == watched.look(100.0) == []
    watched.reach.check("tiny")


def test_a_worker_that_dies_is_no_sign_of_a_bad_address() -> None:
    watched = Watched("dead")
    watched.look()
    watched.look(3.0)
    watched.live = [lives("new")]
    assert watched.look(2.0) == []
    watched.live = []
    assert watched.look(100.0) == []


def test_nobody_is_judged_before_redis_has_answered_again() -> None:
    watched = Watched("w1")
    watched.look()
    assert watched.look(UNREACHED_S) == ["tiny"]
    watched.reach.forget()
    watched.reach.check("tiny")
    assert watched.look(100.0) == []
