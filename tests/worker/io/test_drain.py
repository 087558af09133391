"""The order and the pace in which a worker that stops hands over what it holds."""

from __future__ import annotations

import pytest

from broker.messages import Job, StoppingParams
from worker.io.jobs.drain import drain
from worker.io.local_jobs.jobs import Ending, LocalJob, LocalJobs


class Takeover:
    """Routers that take what is given back at the next turn; `ends` end by themselves within the first wait."""

    def __init__(self, lengths: list[int], ends: set[str]) -> None:
        self.held = LocalJobs()
        self.turns: list[list[str]] = [[]]
        self.waited_s: list[float] = []
        self._ends = ends
        for number, length in enumerate(lengths):
            stopping = StoppingParams(max_tokens=length)
            self.held.add(Job(f"{number}", "acme", "tiny", "sha256:0", "router:1", (1,), stopping, seed=1))

    async def empties_within(self, most_s: float) -> bool:
        """Let that time pass at once."""
        self.waited_s.append(most_s)
        for name in self._ends | set(self.turns[-1]):
            self.held.pop(name, 1)
        self.turns.append([])
        return not self.held.all()

    def give_back(self, held: LocalJob) -> None:
        """Hand one over."""
        self.turns[-1].append(held.job.job_id)
        for choice in held.running:
            choice.ending = Ending()


async def test_what_has_longest_to_go_goes_first_and_not_all_in_one_instant() -> None:
    lengths = [10 * number for number in range(1, 21)]
    takeover = Takeover(lengths, ends={"0", "1", "2", "3"})
    await drain(takeover, 1.0)
    handed = [turn for turn in takeover.turns if turn]
    assert [len(turn) for turn in handed] == [4, 4, 4, 4]
    assert [name for turn in handed for name in turn] == [str(number) for number in range(19, 3, -1)]
    assert sum(takeover.waited_s) == pytest.approx(1.0)
    assert not takeover.held.all()


async def test_all_are_handed_over_though_the_routers_take_none() -> None:
    takeover = Takeover([5] * 7, ends=set())
    takeover.held.pop = lambda job_id, attempt: None  # type: ignore[method-assign]
    await drain(takeover, 0.3)
    assert sorted(name for turn in takeover.turns for name in turn) == [str(number) for number in range(7)]


async def test_without_time_all_is_handed_over_at_once() -> None:
    takeover = Takeover([5] * 7, ends=set())
    await drain(takeover, 0.0)
    assert sorted(name for turn in takeover.turns for name in turn) == [str(number) for number in range(7)]


async def test_a_worker_without_work_is_drained_at_once() -> None:
    takeover = Takeover([], ends=set())
    await drain(takeover, 60.0)
    assert len(takeover.waited_s) == 1
