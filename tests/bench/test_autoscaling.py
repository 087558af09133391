"""The simulation of the scaler: its workers are paid for as they should be, and the policy keeps its promise in it."""

from __future__ import annotations

from pathlib import Path

from bench.autoscaling import Setup, measure, read_azure
from bench.autoscaling_cluster import ROWS, START_S, SYNC_S, WAIT_S, TimedJob, Workers


def test_workers_are_paid_for_from_their_order_until_their_last_job_ends() -> None:
    jobs = [TimedJob(0.0, 100.0, 1) for _ in range(2 * ROWS)]
    ordered_s, stopped_s = SYNC_S / 3, 90.0
    last = TimedJob(200.0, 1.0, 1)
    outcome = Workers([*jobs, last], lambda seen, _: 2 if seen.at_s < stopped_s else 1, 1).run()
    begun_s = ordered_s + START_S
    assert sorted(outcome.waits_s) == [0.0] * (ROWS + 1) + [begun_s] * ROWS
    assert outcome.late == ROWS
    # One worker runs all the time; a second one from its order until the first four jobs end, since a worker that is
    # told to stop ends its jobs first.
    assert outcome.worker_s == 200.0 + 100.0 - ordered_s
    assert outcome.attainment == (ROWS + 1) / (2 * ROWS + 1)
    assert begun_s > WAIT_S


def test_a_day_by_the_policy_keeps_its_promise_with_few_hours_more_than_the_best_schedule(tmp_path: Path) -> None:
    report = measure(Setup(hours=3, requests=2_000, rate=1.0), [], True)
    rows = {row["rule"]: row for row in report.rows}
    assert report.ratios["slo_attainment"] == rows["scaler"]["attained"] >= 0.99
    assert rows["best fixed"]["attained"] >= 0.99
    assert report.ratios["worker_hours_over_best_fixed"] < 1.3
    assert rows["waiting jobs / rows"]["turns"] > rows["scaler"]["turns"]
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert [one[1:] for one in read_azure(trace)] == [(374, 44)]
