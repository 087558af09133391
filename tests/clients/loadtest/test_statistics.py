"""From samples to figures: exact percentiles, coordinated omission, who counts for what, merging."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest

from loraplex.loadtest.arrivals import Constant, Extent
from loraplex.loadtest.conditions import parse_slo
from loraplex.loadtest.plan import LoadPlan, Tenant
from loraplex.loadtest.samples import LEFT, OK, Outcome, Recorder, Samples, merge
from loraplex.loadtest.statistics import histogram, measured, message_times, spread, summarise, timeline

PLAN = LoadPlan("test", Constant(1.0), Extent(10), (Tenant("acme"), Tenant("globex")))


def answered(index: int, intended_s: float, **changes: Any) -> Outcome:
    """Sent on time; 3 tokens at 0.1, 0.3 and 0.6 s after that, ended at 0.7 s."""
    outcome = Outcome(
        index, 0, -1, intended_s, intended_s, OK, intended_s + 0.1, intended_s + 0.6, intended_s + 0.7, 3, 3, 0.3,
        prompt_tokens=5, adapter_s=0.0, queue_s=0.01, gaps_s=array("d", [0.2, 0.3]),
    )  # fmt: skip
    return dataclasses.replace(outcome, **changes)


def failed(index: int, intended_s: float) -> Outcome:
    return Outcome(index, 0, -1, intended_s, intended_s, "UNAVAILABLE", end_s=intended_s + 0.05)


def samples(*outcomes: Outcome) -> Samples:
    recorder = Recorder()
    for outcome in outcomes:
        recorder.add(outcome)
    return recorder.samples()


def test_percentiles_are_the_values_of_nearest_rank() -> None:
    values = np.random.default_rng(1).permutation(np.arange(1, 1001)) / 1000
    found = spread(values)
    assert (found["count"], found["min"], found["max"]) == (1000, 0.001, 1.0)
    assert (found["p50"], found["p90"], found["p99"], found["p99.9"]) == (0.5, 0.9, 0.99, 0.999)
    assert spread(np.empty(0)) == {
        "count": 0, **dict.fromkeys(("mean", "min", "max", "p50", "p90", "p95", "p99", "p99.9"))
    }  # fmt: skip


def test_a_histogram_loses_nothing() -> None:
    values = np.random.default_rng(2).lognormal(-4, 1, 10_000)
    found = histogram(values)
    assert sum(found["counts"]) == 10_000
    assert len(found["counts"]) > 10
    for count, low, high in zip(found["counts"], found["bounds_s"][:-1], found["bounds_s"][1:], strict=True):
        assert count == ((values >= low) & (values < high)).sum()
    beyond = histogram(np.asarray([0.0, 1e-7, 5e3]))
    assert (beyond["counts"][0], beyond["counts"][-1], sum(beyond["counts"])) == (2, 1, 3)


def test_a_stall_of_the_generator_is_paid_from_the_intended_time() -> None:
    # A request a second was due; the generator hung from 2 s to 6 s, then sent the late ones at once; each took 0.1 s.
    due = np.arange(10.0)
    sent = np.where((due >= 2) & (due < 6), 6.0, due)
    run = [
        answered(n, due[n], sent_s=sent[n], first_s=sent[n] + 0.1, last_s=sent[n] + 0.1, end_s=sent[n] + 0.1, tokens=1,
                 messages=1, gaps_s=array("d"))
        for n in range(10)
    ]  # fmt: skip
    times = summarise(PLAN, samples(*run), [])["times"]
    assert times["latency_from_send"]["max"] == pytest.approx(0.1)
    assert times["latency"]["max"] == times["ttft"]["max"] == pytest.approx(4.1)
    assert times["latency"]["mean"] == pytest.approx(0.1 + (4 + 3 + 2 + 1) / 10)
    assert times["tpot"]["count"] == times["itl"]["count"] == 0


def test_who_counts_for_what() -> None:
    left = answered(1, 1.0, status=LEFT, tokens=2, messages=2, end_s=1.35, gaps_s=array("d", [0.2]))
    summary = summarise(PLAN, samples(answered(0, 0.0), left, failed(2, 2.0)), [])
    figures, times = summary["figures"], summary["times"]
    assert (figures["requests"], figures["ok"], figures["cancelled"], figures["errors"]) == (3, 1, 1, 1)
    assert summary["statuses"] == {OK: 1, LEFT: 1, "UNAVAILABLE": 1}
    assert (times["ttft"]["count"], times["itl"]["count"], times["latency"]["count"]) == (2, 3, 1)
    assert times["tpot"]["p50"] == pytest.approx(0.25)
    assert figures["elapsed_s"] == pytest.approx(2.05)
    assert figures["tokens_per_s"] == pytest.approx(5 / 2.05)
    assert sum(tenant["figures"]["requests"] for tenant in summary["tenants"]) == 3
    assert sum(one["requests"] for one in summary["adapters"]) == 3


def test_the_warm_up_counts_for_nothing() -> None:
    both = samples(answered(0, 0.0), answered(1, 1.0))
    by_count = dataclasses.replace(PLAN, extent=Extent(1, warm_up_requests=1))
    by_time = dataclasses.replace(PLAN, extent=Extent(duration_s=1.0, warm_up_s=1.0))
    for plan in (by_count, by_time):
        kept = measured(plan, both)
        assert kept.samples.column("index").tolist() == [1]
        assert kept.elapsed_s == pytest.approx(0.7)
        assert len(kept.samples.gaps) == 2


def test_goodput_counts_what_keeps_every_slo_of_its_tenant() -> None:
    tenants = (
        Tenant("acme", slos=(parse_slo("ttft<200ms"), parse_slo("itl<=300ms"))),
        Tenant("globex", slos=(parse_slo("latency<100ms"),)),
    )
    plan = dataclasses.replace(PLAN, tenants=tenants)
    run = samples(
        answered(0, 0.0),
        answered(1, 1.0, first_s=1.5),  # its first token is late
        answered(2, 2.0, longest_gap_s=0.4),  # one gap is too long
        answered(3, 3.0, tenant=1),  # good for acme, too slow for globex
        failed(4, 3.5),
    )
    figures = summarise(plan, run, [])["figures"]
    assert figures["goodput_share"] == pytest.approx(1 / 5)
    assert figures["goodput_per_s"] == pytest.approx(1 / figures["elapsed_s"])


def test_cold_adapters_are_those_that_were_waited_for() -> None:
    adapters = [("acme", "a"), ("globex", "b")]
    run = samples(
        answered(0, 0.0, adapter=0, adapter_s=0.2),
        answered(1, 1.0, adapter=0, adapter_s=0.0001),
        answered(2, 2.0, adapter=1, tenant=1, adapter_s=0.0),
        answered(3, 3.0),
    )
    summary = summarise(PLAN, run, adapters)
    assert (summary["figures"]["cold"], summary["figures"]["cold_share"]) == (1, pytest.approx(1 / 3))
    rows = {(row["tenant"], row["adapter"]): row for row in summary["adapters"]}
    assert {key: (row["requests"], row["cold"]) for key, row in rows.items()} == {
        ("acme", "a"): (2, 1), ("globex", "b"): (1, 0), (None, None): (1, 0)
    }  # fmt: skip
    assert rows["acme", "a"]["itl"]["count"] == 4


def test_samples_of_several_processes_merge_without_loss() -> None:
    everything = [answered(n, float(n), gaps_s=array("d", [n, n + 0.5])) for n in range(8)]
    everything[3] = failed(3, 3.0)
    everything[6] = answered(6, 6.0, status=LEFT, messages=2, gaps_s=array("d", [6.0]))
    whole = samples(*everything)
    parts = merge([samples(*reversed(everything[1::2])), samples(*everything[::2])])
    assert parts.column("index").tolist() == list(range(8))
    assert parts.gaps.tolist() == whole.gaps.tolist()
    statuses = [parts.statuses[int(number)] for number in parts.column("status")]
    assert statuses == [one.status for one in everything]
    assert len(merge([])) == 0


def test_the_first_message_of_each_status_survives_merging() -> None:
    refused = dataclasses.replace(failed(1, 1.0), message="refused at 1", status="X" * 3)
    parts = [
        samples(failed(0, 0.0), dataclasses.replace(failed(4, 4.0), message="gone at 4")),
        samples(dataclasses.replace(failed(2, 2.0), message="gone at 2"), refused, answered(3, 3.0)),
        samples(dataclasses.replace(failed(5, 5.0), message="y" * 9999)),
    ]
    assert summarise(PLAN, merge(parts), [])["messages"] == {"UNAVAILABLE": "gone at 2", "XXX": "refused at 1"}
    assert len(summarise(PLAN, parts[2], [])["messages"]["UNAVAILABLE"]) == 500
    warm = dataclasses.replace(PLAN, extent=Extent(4, warm_up_requests=2))
    assert set(summarise(warm, merge(parts), [])["messages"]) == {"UNAVAILABLE"}, "of measured requests"


def test_a_timeline_has_no_ttft_where_no_answer_began() -> None:
    times = timeline(samples(answered(0, 0.0), answered(1, 9.0)), 0.0, 10.0)
    assert [value is None for value in times["ttft_p50_s"]] == [False, *[True] * 8, False]
    assert times["sent_per_s"] == [1.0, *[0.0] * 8, 1.0]


def test_message_times_are_the_first_and_then_the_gaps() -> None:
    run = samples(answered(0, 0.0), failed(1, 0.5), answered(2, 1.0))
    assert sorted(message_times(run)) == pytest.approx([0.1, 0.3, 0.6, 1.1, 1.3, 1.6])
