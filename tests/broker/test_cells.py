"""The rule that picks a job's cell, as properties over drawn cells; and the names of drained cells in Redis."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from loraplex.contracts.broker.cells import (
    LONGER,
    LONGER_S,
    Backlog,
    CellAddress,
    CellView,
    DrainedCells,
    choose_cell,
    parse_cells,
)
from loraplex.contracts.broker.liveness import CellLoad

DIGESTS = [f"sha256:{number}" for number in range(2_000)]


def idle(**rows: int) -> list[CellView]:
    return [CellView(name, of, 0, Backlog()) for name, of in rows.items()]


def homes(cells: Sequence[CellView], digests: Sequence[str] = DIGESTS) -> dict[str, str]:
    """Return the cell of each adapter."""
    return {digest: choose_cell(cells, digest, "j", "acme", 1.0).name for digest in digests}


drawn_cells = st.lists(
    st.builds(
        lambda rows, used, waiting, work, rate, tenants, own: (
            rows,
            used,
            Backlog.of(CellLoad(waiting, work, rate, tenants), {"acme": own} if own else {}),
        ),
        st.integers(0, 64),
        st.integers(0, 80),
        st.integers(0, 100),
        st.floats(0, 1e6),
        st.sampled_from([0.0, 1.0, 500.0, 1e5]),
        st.integers(0, 50),
        st.floats(0, 1e5),
    ),
    min_size=1,
    max_size=6,
).map(lambda drawn: [CellView(f"c{number}", *one) for number, one in enumerate(drawn)])


@given(drawn_cells, st.sampled_from(["", *DIGESTS[:20]]), st.floats(1, 1e5))
def test_a_job_never_goes_where_it_waits_clearly_longer(cells: list[CellView], digest: str, work: float) -> None:
    chosen = choose_cell(cells, digest, "j", "acme", work)
    least = min(cell.wait_s("acme", work) for cell in cells)
    assert chosen.wait_s("acme", work) <= LONGER * least + LONGER_S
    assert chosen.rows or not any(cell.rows for cell in cells)


@given(drawn_cells, st.sampled_from(DIGESTS), st.randoms(use_true_random=False))
def test_all_routers_that_see_the_same_choose_the_same(cells: list[CellView], digest: str, chance: object) -> None:
    chosen = choose_cell(cells, digest, "one", "acme", 10.0)
    shuffled = sorted(cells, key=lambda _: chance.random())  # type: ignore[attr-defined]
    assert choose_cell(shuffled, digest, "another", "acme", 10.0).name == chosen.name


def test_adapters_are_spread_by_rows_and_only_those_of_a_changed_cell_move() -> None:
    two = homes(idle(main=32, second=96))
    assert Counter(two.values())["second"] / len(DIGESTS) == pytest.approx(0.75, abs=0.04)
    three = homes(idle(main=32, second=96, third=64))
    moved = {digest for digest in DIGESTS if two[digest] != three[digest]}
    assert {three[digest] for digest in moved} == {"third"}
    assert len(moved) / len(DIGESTS) == pytest.approx(1 / 3, abs=0.04)
    larger = homes(idle(main=64, second=96))
    assert {larger[digest] for digest in DIGESTS if two[digest] != larger[digest]} == {"main"}


def test_an_adapter_stays_in_its_cell_while_that_has_free_rows_however_many_the_other_has() -> None:
    nearly_full = [CellView("main", 32, 31, Backlog()), CellView("second", 320, 0, Backlog())]
    free = idle(main=32, second=320)
    assert homes(nearly_full) == homes(free)


def test_jobs_of_the_base_model_go_to_cells_by_their_free_rows() -> None:
    cells = [
        CellView("main", 100, 80, Backlog()),
        CellView("second", 100, 20, Backlog()),
        CellView("full", 100, 100, Backlog()),
    ]
    chosen = Counter(choose_cell(cells, "", f"job-{number}", "acme", 1.0).name for number in range(2_000))
    assert chosen["full"] == 0
    assert chosen["second"] / 2_000 == pytest.approx(0.8, abs=0.04)


def test_a_burst_between_two_looks_is_counted() -> None:
    """A router does not send all jobs of half a second where there were a few free rows."""
    cells = idle(main=8, second=8)
    for number in range(400):
        chosen = choose_cell(cells, "", f"job-{number}", f"tenant-{number % 7}", 100.0)
        chosen.backlog.place(f"tenant-{number % 7}", 1, 100.0)
    assert all(cell.backlog.placed_rows == pytest.approx(200, abs=40) for cell in cells)


# Work of a job, work that each of two cells claims in a second, and seconds between the looks. Each cell serves the
# tenants that wait there by its own counters, as the queue does it.
WORK, RATE, LOOK_S = 100.0, 2_000.0, 0.5


@dataclass
class Served:
    """A cell in time: its waiting jobs by tenant, its counters, and the work that each tenant got."""

    name: str
    queues: dict[str, deque[float]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    credit: float = 0.0

    def view(self) -> CellView:
        waiting = {tenant: sum(queue) for tenant, queue in self.queues.items() if queue}
        jobs = sum(map(len, self.queues.values()))
        load = CellLoad(jobs, sum(waiting.values()), RATE if jobs else 0.0, len(waiting))
        return CellView(self.name, 8, 8, Backlog.of(load, waiting))

    def add(self, tenant: str) -> None:
        queue = self.queues.setdefault(tenant, deque())
        if not queue:
            active = [self.counters[other] for other, waits in self.queues.items() if waits]
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), min(active, default=0.0))
        queue.append(WORK)

    def serve(self, seconds: float, got: Counter[str]) -> None:
        self.credit += RATE * seconds
        while self.credit >= WORK and (waiting := [tenant for tenant, queue in self.queues.items() if queue]):
            tenant = min(waiting, key=lambda name: self.counters[name])
            self.counters[tenant] += self.queues[tenant].popleft()
            self.credit -= WORK
            got[tenant] += 1
        if not any(self.queues.values()):
            self.credit = 0.0


def shares(adapters: Mapping[str, int], per_s: Mapping[str, int], seconds: int = 120) -> dict[str, float]:
    """Return the share of the work that each tenant with so many adapters gets, which sends so many jobs a second."""
    cells, got, sent = [Served("main"), Served("second")], Counter[str](), Counter[str]()
    for step in range(int(seconds / LOOK_S)):
        views = [cell.view() for cell in cells]
        for number in range(max(per_s.values())):
            for tenant, rate in per_s.items():
                if number < rate * LOOK_S:
                    sent[tenant] += 1
                    digest = f"{tenant}/{sent[tenant] % adapters[tenant]}"
                    chosen = choose_cell(views, digest, "j", tenant, WORK)
                    chosen.backlog.place(tenant, 1, WORK)
                    cells[views.index(chosen)].add(tenant)
        if step == 20:
            got.clear()  # until then the tenants were getting their backlogs
        for cell in cells:
            cell.serve(LOOK_S, got)
    return {tenant: got[tenant] / got.total() for tenant in adapters}


@pytest.mark.parametrize("seed", range(6))
def test_a_tenant_of_one_adapter_gets_as_much_as_one_of_many(seed: int) -> None:
    """Both wait in both cells, though the one's adapter belongs to one cell."""
    found = shares({f"one-{seed}": 1, "many": 400}, {f"one-{seed}": 60, "many": 60})
    assert found[f"one-{seed}"] == pytest.approx(0.5, abs=0.05), found


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_below_its_share_is_served_beside_others_with_backlogs(seed: int) -> None:
    """All of what it sends: the cells make 40 jobs a second, of which a third would be its share."""
    found = shares({f"low-{seed}": 1, "many": 400, "few": 3}, {f"low-{seed}": 8, "many": 60, "few": 60})
    assert found[f"low-{seed}"] == pytest.approx(8 / 40, abs=0.02), found
    assert found["few"] == pytest.approx(found["many"], abs=0.05), found


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("main", [CellAddress("main")]),
        (
            " main  b=redis+sentinel://a:1,c:2/s?x=1 ",
            [CellAddress("main"), CellAddress("b", "redis+sentinel://a:1,c:2/s?x=1")],
        ),
    ],
)
def test_cells_are_read_with_their_urls(text: str, cells: list[CellAddress]) -> None:
    assert list(parse_cells(text)) == cells


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "--cells '': name at least one cell, such as main"),
        ("main main=redis://h", "--cells main: two cells have this name"),
        ("redis://:secret@h", "--cells: write NAME=URL for a cell with a Redis of its own"),
        ("main b=", "--cells b=: give the URL of its Redis, or leave out the ="),
        ("main,b", "--cells 'main,b': a cell's name has letters, digits, '-', '_' and '.'"),
        ("a*", "--cells 'a*': a cell's name has letters, digits, '-', '_' and '.'"),
    ],
)
def test_bad_cells_are_refused_with_one_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_cells(text)


async def test_of_two_drains_at_once_one_leaves_a_cell_open(redis: Redis) -> None:
    cells = DrainedCells(redis)
    assert await cells.read() == frozenset()
    assert sorted(await asyncio.gather(cells.drain("a", ["b"]), cells.drain("b", ["a"]))) == [False, True]
    (drained,) = await cells.read()
    assert await cells.drain(drained, ["a" if drained == "b" else "b"]), "it is already"
    await cells.open(drained)
    assert await cells.read() == frozenset()
