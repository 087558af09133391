"""The scaler's policy: what it wants of a model whose workers do 100 of work a second, each with 4 rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.operator.scaler.policy import (
    ARRIVALS_S,
    BUSY,
    FALL_S,
    Bounds,
    CellSums,
    Observation,
    Pool,
    PoolRules,
    divide,
)

RATE, ROWS, STEP_S = 100.0, 4, 5.0
RULES = PoolRules(least=0, most=20, wait_s=10.0, idle_s=60.0, worker_rate=RATE)


class Model:
    """A model whose workers do what comes, as far as they can, and a pool that watches it."""

    def __init__(self, workers: int, rules: PoolRules = RULES, rate: float = RATE) -> None:
        self.pool = Pool(rules)
        self.workers, self.rate = workers, rate
        self.at_s = self.arrived = self.claimed = self.waiting = 0.0

    def look(self, arriving: float, seconds: float = STEP_S, expiring: float = 0.0) -> list[int]:
        """Let work arrive, and leave the line unclaimed, at rates for a while; return what was wanted at each look."""
        wanted = []
        for _ in range(round(seconds / STEP_S)):
            self.at_s += STEP_S
            self.arrived += arriving * STEP_S
            room = self.workers * self.rate * STEP_S
            there = self.waiting + arriving * STEP_S
            self.waiting = max(0.0, there - room)
            busy = min(1.0, there / room) if room else 0.0
            rows = self.workers * ROWS
            oldest_s = self.waiting / (self.workers * self.rate or arriving or 1.0)
            self.claimed += min(there, room)
            self.waiting -= min(self.waiting, expiring * STEP_S)
            seen = Observation(
                *(self.at_s, self.workers, round(rows * busy), rows),
                *(self.waiting, oldest_s, self.arrived, self.claimed),
            )
            wanted.append(self.pool.observe(seen))
        return wanted


def test_steady_work_gets_the_workers_that_do_it_with_some_room() -> None:
    assert Model(6).look(500.0, 600.0)[-1] == 6
    assert 500 / RATE / BUSY > 5, "of five workers none would have room"


def test_more_work_is_wanted_at_once_and_less_after_a_while() -> None:
    model = Model(2)
    assert model.look(150.0, 600.0)[-1] == 2
    (more,) = model.look(900.0)
    assert more > 2, "the first look at a burst"
    model.workers = 10
    model.look(900.0, 300.0)
    fewer = model.look(50.0, FALL_S + 2 * ARRIVALS_S)
    assert fewer[0] >= 9
    assert fewer[round(FALL_S / STEP_S) - 1] >= 9, "it may come back"
    assert fewer[-1] == 1


def test_a_wrong_guess_of_the_workers_rate_is_corrected_by_what_they_do() -> None:
    for guess in (RATE / 20, RATE * 20):
        model = Model(6, PoolRules(1, 20, 10.0, 60.0, guess))
        assert model.look(500.0, 1_200.0)[-1] == 6
        assert abs(model.pool.rate.value / RATE - 1) < 0.2


def test_jobs_that_leave_the_line_unclaimed_do_not_make_workers_look_quick() -> None:
    model = Model(2)
    assert model.look(800.0, 300.0, expiring=600.0)[-1] >= 8
    assert abs(model.pool.rate.value / RATE - 1) < 0.2


def test_answers_shorter_than_they_may_be_are_part_of_the_rate() -> None:
    # The queue counts full lengths; answers end after a quarter of it, so that workers seem four times as quick.
    model = Model(3, rate=4 * RATE)
    assert model.look(1_000.0, 900.0)[-1] == 3


def test_a_pool_without_work_has_no_workers_and_the_first_job_brings_one_back() -> None:
    model = Model(1)
    model.look(10.0, 60.0)
    idle = model.look(0.0, 120.0)
    assert idle[0] == 1
    assert idle[-1] == 0
    model.workers = 0
    assert model.look(0.0) == [0]
    assert model.look(1.0)[0] >= 1
    assert model.look(0.0, 120.0)[-1] == 1, "the job still waits"


def test_a_floor_and_a_limit_hold() -> None:
    held = Model(2, PoolRules(2, 3, 10.0, 60.0, RATE))
    assert held.look(0.0, 1_000.0)[-1] == 2
    assert held.look(5_000.0, 60.0)[-1] == 3


def test_rows_that_run_keep_their_workers_though_nothing_arrives() -> None:
    pool = Pool(RULES)
    for look in range(300):
        wanted = pool.observe(Observation(look * STEP_S, 5, 20, 20, 0.0, 0.0, 10_000.0, 10_000.0))
    assert wanted == 5


def test_a_scaler_that_starts_again_keeps_what_there_is() -> None:
    model = Model(9)
    model.arrived = model.claimed = 1e9
    assert model.look(100.0)[0] == 9, "not the work of all time"


def test_sums_of_cells_grow_whatever_a_cell_loses() -> None:
    sums = CellSums()
    assert sums.add({"main": 1e9}) == 0
    assert sums.add({"main": 1e9 + 5}) == 5
    assert sums.add({"main": 3.0}) == 5, "its Redis has lost the number"
    assert sums.add({"main": 4.0, "second": 1e6}) == 6, "a new cell's number is of all time"
    assert sums.add({"second": 1e6 + 2}) == 8, "one does not answer"
    assert sums.add({"main": 10.0, "second": 1e6 + 2}) == 14


def test_a_redis_that_comes_back_older_has_no_work_that_is_new() -> None:
    def wanted(older_s: float) -> list[int]:
        pool, arrived, claimed = Pool(RULES), CellSums(), CellSums()
        wants = []
        for look in range(100):
            total = 3 * RATE * (1e6 + look * STEP_S - (older_s if look >= 50 else 0))
            sums = arrived.add({"main": total}), claimed.add({"main": total})
            waiting = 30_000.0 if look >= 60 else 0.0
            wants.append(pool.observe(Observation(look * STEP_S, 4, 3 * ROWS, 4 * ROWS, waiting, 0.0, *sums)))
        return wants

    assert max(abs(one - other) for one, other in zip(wanted(0.0), wanted(10.0), strict=True)) <= 1


@given(
    st.dictionaries(st.text("abc", min_size=1), st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1),
    st.integers(0, 60),
)
def test_cells_get_all_workers_within_their_bounds_and_one_more_goes_to_one_cell(
    drawn: dict[str, tuple[int, int]], wanted: int
) -> None:
    cells = {cell: Bounds(min(bounds), max(bounds)) for cell, bounds in drawn.items()}
    workers, more = divide(wanted, cells), divide(wanted + 1, cells)
    assert all(cells[cell].least <= count <= cells[cell].most for cell, count in workers.items())
    least, most = (sum(getattr(one, name) for one in cells.values()) for name in ("least", "most"))
    assert sum(workers.values()) == min(max(wanted, least), most)
    assert sum(more[cell] != workers[cell] for cell in cells) <= 1


def test_cells_are_filled_by_their_sizes() -> None:
    assert divide(8, {"main": Bounds(0, 4), "second": Bounds(0, 12)}) == {"main": 2, "second": 6}
