"""The order and the turns in which a worker that stops gives its jobs back."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.io.app import drain
from loraplex.worker.io.local_jobs import Ending, LocalJob, LocalJobs, LocalJobState


class Takeover:
    """Routers that take what is given back at the next turn; `ends` end by themselves within the first wait."""

    def __init__(self, lengths: list[int], ends: set[str]) -> None:
        self.jobs = LocalJobs()
        self.jobs.empties_within = self._empties_within  # type: ignore[method-assign]
        self.turns: list[list[str]] = [[]]
        self.waited_s: list[float] = []
        self._ends = ends
        for number, length in enumerate(lengths):
            stopping = StoppingParams(max_tokens=length)
            self.jobs.add(
                Job(
                    f"{number}", "acme", "tiny", "sha256:0", "router:1", (1,), stopping, sampling=SamplingParams(seed=1)
                )
            )

    async def _empties_within(self, timeout_s: float) -> bool:
        """Let the time pass at once."""
        self.waited_s.append(timeout_s)
        for name in self._ends | set(self.turns[-1]):
            self.jobs.remove(name, 1)
        self.turns.append([])
        return not self.jobs.all()

    def give_back(self, local: LocalJob) -> None:
        """Give one back."""
        self.turns[-1].append(local.job.job_id)
        local.end_choices(LocalJobState.RETURNED, Ending())


async def test_what_has_longest_to_go_goes_first_and_not_all_in_one_instant() -> None:
    lengths = [10 * number for number in range(1, 21)]
    takeover: Any = Takeover(lengths, ends={"0", "1", "2", "3"})
    await drain(takeover, 1.0)
    given_back = [turn for turn in takeover.turns if turn]
    assert [len(turn) for turn in given_back] == [4, 4, 4, 4]
    assert [name for turn in given_back for name in turn] == [str(number) for number in range(19, 3, -1)]
    assert sum(takeover.waited_s) == pytest.approx(1.0)
    assert not takeover.jobs.all()


async def test_all_are_handed_over_though_the_routers_take_none() -> None:
    takeover: Any = Takeover([5] * 7, ends=set())
    takeover.jobs.remove = lambda job_id, attempt: None
    await drain(takeover, 0.3)
    assert sorted(name for turn in takeover.turns for name in turn) == [str(number) for number in range(7)]


async def test_without_time_all_is_handed_over_at_once() -> None:
    takeover: Any = Takeover([5] * 7, ends=set())
    await drain(takeover, 0.0)
    assert sorted(name for turn in takeover.turns for name in turn) == [str(number) for number in range(7)]


async def test_a_worker_without_work_is_drained_at_once() -> None:
    takeover: Any = Takeover([], ends=set())
    await drain(takeover, 60.0)
    assert len(takeover.waited_s) == 1
