"""Comparisons of two reports: noise, real changes, settings that differ."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from loraplex.cli.loadtest import print_comparison
from loraplex.loadtest.arrivals import Extent, Poisson
from loraplex.loadtest.compare import compare, differing, too_much_worse
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.draws import Fixed, Listed, LogNormal, Uniform, power_law
from loraplex.loadtest.fleet import LoadRun
from loraplex.loadtest.generator import Share
from loraplex.loadtest.plan import Cancel, Deadline, LoadPlan, Tenant
from loraplex.loadtest.report import whole_report
from loraplex.loadtest.runs import run_report
from loraplex.loadtest.samples import OK, Outcome, Recorder
from loraplex.loadtest.statistics import UNKNOWN, percentile_interval, rate_interval, share_interval

PLAN = LoadPlan("test", Poisson(20.0), Extent(600), (Tenant("acme"),))


def report(
    seed: int, *, slower: float = 1.0, failing: float = 0.0, plan: LoadPlan = PLAN, count: int = 600
) -> dict[str, Any]:
    """Build the report of requests with random times, of which some come in slow spells."""
    rng = np.random.default_rng(seed)
    recorder = Recorder()
    for index in range(count):
        begin = index / 20
        spell = 1.3 if index // 40 % 3 == 0 else 1.0
        first = begin + slower * spell * 0.05 * float(rng.lognormal(0, 0.3))
        gaps = slower * spell * 0.01 * rng.lognormal(0, 0.2, 7)
        last = first + float(gaps.sum())
        recorder.add(
            Outcome(
                index, 0, -1, begin, begin, OK if rng.random() >= failing else "INTERNAL", first, last, last,
                8, 8, float(gaps.max()), gaps_s=array("d", gaps),
            )
        )  # fmt: skip
    share = Share(recorder.samples(), 0.5, 30.0, array("d", [0.001]), 0, float("nan"))
    run, _ = run_report("Poisson, 20/s", plan, LoadRun((share,), 1.7e9, interrupted=False))
    # JSON and back, which is how reports come from files.
    whole: dict[str, Any] = json.loads(json.dumps(whole_report(plan, "127.0.0.1:1", "loraplex loadtest", [run])))
    return whole


def verdicts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return {row["value"]: row["verdict"] for row in compare(a, b)}


def test_two_runs_of_the_same_are_noise() -> None:
    for seed in range(4):
        assert set(verdicts(report(seed), report(seed + 100)).values()) <= {"", "noise"}, f"seed {seed}"


def test_a_change_beyond_the_spread_is_judged() -> None:
    found = verdicts(report(1), report(2, slower=1.5, failing=0.1))
    assert {found[name] for name in ("ttft.p50", "ttft.p90", "itl.p50", "itl.p99", "tpot.p50", "latency.p90")} == {
        "worse"
    }
    assert found["error_share"] == "worse"
    assert (found["requests"], found["errors"]) == ("", ""), "counts are shown, not judged"
    assert verdicts(report(2, slower=1.5), report(1))["ttft.p50"] == "better"
    few = verdicts(report(1, count=30), report(2, slower=1.5, count=30))
    assert few["ttft.p99"] == "noise", "30 requests tell nothing of their p99"


def test_a_small_change_is_noise_however_many_requests_tell_it() -> None:
    assert verdicts(report(1), report(1, slower=1.04))["itl.p50"] == "noise"
    a, b = report(1), report(1, slower=1.04)
    for run, low in ((a, 1.0), (b, 1.03)):
        run["runs"][0]["intervals"]["itl.p50"] = [low, low + 0.001]
    assert verdicts(a, b)["itl.p50"] == "noise"


def test_counts_and_changes() -> None:
    rows = {row["value"]: row for row in compare(report(1), report(1, slower=2.0, count=300))}
    assert (rows["requests"]["a"], rows["requests"]["b"]) == (600, 300)
    assert rows["itl.p50"]["change"] == pytest.approx(1.0, abs=0.1)
    assert [row["value"] for row in too_much_worse(list(rows.values()), 1.5)] == []
    assert "itl.p50" in [row["value"] for row in too_much_worse(list(rows.values()), 0.5)]
    failing = compare(report(1), report(1, failing=0.2))
    assert "error_share" in [row["value"] for row in too_much_worse(failing, 9.0)], "from 0, any worsening is"


def test_only_runs_of_the_same_arrivals_are_compared() -> None:
    other = report(1)
    other["runs"][0]["label"] = "something else"
    assert compare(report(1), other)[0]["run"] == "Poisson, 20/s / something else"
    other["runs"] *= 2
    with pytest.raises(PlanError, match="no run in common"):
        compare(report(1), other)


def test_settings_that_differ_are_named() -> None:
    tenant = Tenant("acme", adapters=power_law(("a", "b"), 1.0), prompt_tokens=Fixed(32))
    names = tuple(f"adapter-{number}" for number in range(1000))
    many = Tenant("acme", adapters=power_law(names, 1.0), prompts=("x" * 1000,))
    a = report(1)
    b = report(1, plan=LoadPlan("other name", Poisson(10.0), Extent(600), (tenant,)))
    found = {name: (before, after) for name, before, after in differing(a, b)}
    assert found == {
        "arrivals": ("Poisson, 20/s", "Poisson, 10/s"),
        "acme: adapters": ("base=1", "a=1, b=0.5"),
        "acme: prompt tokens": ("64", "32"),
    }
    c = report(1, plan=LoadPlan("test", Poisson(20.0), Extent(600), (many, Tenant("globex"))))
    lengths = {name: len(after) for name, _, after in differing(a, c)}
    assert {"acme: adapters", "acme: prompts", "globex: weight"} <= set(lengths)
    assert max(lengths.values()) < 60
    assert differing(a, report(2)) == []


def test_settings_are_written_in_words() -> None:
    tenant = Tenant(
        "acme",
        prompt_tokens=LogNormal(median=200, sigma=0.7, high=900),
        answer_tokens=Uniform(8, 24),
        deadline=Deadline(0.25, 1.5),
        cancel=Cancel(0.1, Fixed(4)),
    )
    listed = Tenant("globex", prompt_tokens=Listed((3, 9, 3)), cancel=Cancel(1.0, Listed((2,))))
    whole = report(1, plan=LoadPlan("test", Poisson(20.0), Extent(600), (tenant, listed)))
    found = {name: value for name, value in whole["settings"].items() if ": " in name}
    assert found["acme: prompt tokens"] == "log-normal, median 200, sigma 0.7, from 1 to 900"
    assert found["acme: answer tokens"] == "uniform, from 8 to 24"
    assert found["acme: deadline"] == "1.5 s for 25% of the requests"
    assert found["acme: cancel"] == "of 10% of the requests, after tokens: 4"
    drawn = r"drawn from 3 values, from 3 to 9, with the digest [0-9a-f]{8}"
    assert re.fullmatch(drawn, found["globex: prompt tokens"])
    assert found["globex: deadline"] == ""
    assert "(" not in "".join(found.values())
    assert whole["tenants"][0]["answer_tokens"] == "uniform, from 8 to 24"


def test_the_printed_comparison_and_its_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = report(2, slower=1.5)
    slower["settings"]["version"] = "9.9"
    slower["runs"][0]["ended_early"] = "interrupted"
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, (report(1), slower), strict=True):
        path.write_text(json.dumps(content))
    print_comparison(paths[0], paths[1], None, as_json=False)
    printed = capsys.readouterr()
    assert "Poisson, 20/s\trequests\t600\t600\t+0.0%\t\n" in printed.out
    assert "ms\t+" in printed.out
    assert printed.out.count("\tworse\n") >= 8
    assert printed.err.startswith("warning: the settings differ: version: A ")
    assert "warning: B, Poisson, 20/s: ended early: interrupted\n" in printed.err
    print_comparison(paths[0], paths[1], 200.0, as_json=False)
    with pytest.raises(typer.Exit):
        print_comparison(paths[0], paths[1], 20.0, as_json=True)
    assert "itl.p50 got worse, from" in capsys.readouterr().err


def test_intervals_have_their_value_in_them_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    hits = dict.fromkeys(("p50", "p90", "rate", "share"), 0)
    for _ in range(300):
        values = rng.exponential(1.0, 400)
        for name, share in (("p50", 0.5), ("p90", 0.9)):
            low, high = percentile_interval(values, share)
            hits[name] += (low or 0.0) <= -np.log(1 - share) <= (high or np.inf)
        ends = rng.uniform(0.0, 10.0, rng.poisson(200))
        low, high = rate_interval(ends, np.ones(len(ends)), 0.0, 10.0)
        hits["rate"] += (low or 0.0) <= 20.0 <= (high or np.inf)
        low, high = share_interval(rng.random(400) < 0.05)
        hits["share"] += (low or 0.0) <= 0.05 <= (high or np.inf)
    assert min(hits.values()) >= 0.92 * 300, hits


def test_too_few_values_tell_nothing() -> None:
    assert percentile_interval(np.asarray([1.0]), 0.5) == rate_interval(np.empty(0), np.empty(0), 0.0, 0.0) == UNKNOWN
    assert share_interval(np.empty(0, bool)) == UNKNOWN
    assert percentile_interval(np.arange(100.0), 0.99)[1] is None
    assert percentile_interval(np.random.default_rng(1).random(1000), 0.99)[1] is not None
