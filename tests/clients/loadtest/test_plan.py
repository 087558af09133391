"""Load-test files: what they mean, and the one line that each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.loadtest.arrivals import Closed, Constant, Extent, Gamma, Poisson, Ramp, Replay, Stage
from loraplex.loadtest.conditions import parse_condition, parse_slo
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.draws import Fixed, Listed, LogNormal, Popularity, Uniform
from loraplex.loadtest.plan import LoadPlan, load_toml, read_plan

EXAMPLES = Path(__file__).parents[3] / "examples" / "loadtest"


def read(directory: Path, text: str) -> LoadPlan:
    file = directory / "test.toml"
    file.write_text(text)
    return read_plan(load_toml(file), "test.toml", directory)


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("# of yesterday\n10\n20\n20\n")
    (tmp_path / "popularity.csv").write_text("support,3\nbase,1.5\n")
    plan = read(
        tmp_path,
        """
        name = "all of it"
        seed = 9
        duration_s = 20
        warm_up_s = 2.5
        timeout_s = 30
        processes = 3
        model = "tiny"
        slo = ["ttft<500ms"]
        prompt_tokens = {kind = "uniform", low = 4, high = 8}
        answer_tokens = 10
        deadline = {share = 0.1, after_s = 2}
        [arrivals]
        kind = "gamma"
        rate_per_s = 4
        cv = 2
        [sweep]
        rate_per_s = [1, 2.5]
        [[tenants]]
        name = "acme"
        weight = 2
        adapters = {kind = "file", file = "popularity.csv"}
        answer_tokens = {kind = "file", file = "lengths.txt"}
        [[tenants]]
        name = "globex"
        slo = ["itl<=50ms", "latency < 2s"]
        prompt_tokens = {kind = "log_normal", median = 90, sigma = 1, high = 500}
        cancel = {share = 0.5, after_tokens = 3}
        """,
    )
    assert plan.extent == Extent(duration_s=20.0, warm_up_s=2.5)
    assert (plan.seed, plan.timeout_s, plan.processes, plan.model, plan.sweep) == (9, 30.0, 3, "tiny", (1.0, 2.5))
    acme, globex = plan.tenants
    assert (acme.weight, acme.adapters) == (2.0, Popularity(("support", "base"), (3.0, 1.5)))
    assert (acme.prompt_tokens, acme.answer_tokens) == (Uniform(4, 8), Listed((10, 20, 20)))
    assert (globex.prompt_tokens, globex.answer_tokens) == (LogNormal(90, 1, 500), Fixed(10))
    assert [slo.text for slo in acme.slos] == ["ttft<500ms"]
    assert [(slo.metric, slo.limit_s) for slo in globex.slos] == [("itl", 0.05), ("latency", 2.0)]
    assert acme.deadline == globex.deadline
    assert acme.cancel is None
    labels = [label for label, _ in plan.points()]
    assert labels == ["Gamma with cv 2, 1/s", "Gamma with cv 2, 2.5/s"]
    assert [point.arrivals for _, point in plan.points()] == [Gamma(1.0, 2.0), Gamma(2.5, 2.0)]


def test_a_test_of_embed_says_how_many_texts_a_call_has(tmp_path: Path) -> None:
    settings = "requests = 3\narrivals = {kind = 'closed', concurrency = 1}\ntask = 'embed'\n"
    for text, texts in (("", 1), ("texts = 25", 25)):
        plan = read(tmp_path, settings + text)
        assert (plan.task, plan.texts) == ("embed", texts)


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ('requests = 3\narrivals = {kind = "poisson", rate_per_s = 2}', Poisson(2.0)),
        ('requests = 3\narrivals = {kind = "constant", rate_per_s = 2}', Constant(2.0)),
        ('requests = 3\narrivals = {kind = "closed", concurrency = 2}', Closed(2)),
        (
            'arrivals = {kind = "ramp", stages = [{from_per_s = 0, to_per_s = 5, for_s = 9}]}',
            Ramp((Stage(0.0, 5.0, 9.0),)),
        ),
        ('arrivals = {kind = "trace", file = "t.csv"}', Replay((0.0, 0.5))),
    ],
)
def test_arrivals(tmp_path: Path, text: str, arrivals: object) -> None:
    (tmp_path / "t.csv").write_text("at_s,adapter\n0,a\n0.5,\n")
    assert read(tmp_path, text).arrivals == arrivals


POISSON = 'arrivals = {kind = "poisson", rate_per_s = 2}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("requests = 3", "test.toml: object missing required field `arrivals`"),
        (
            'requests = 3\narrivals = {kind = "poison", rate_per_s = 2}',
            "test.toml: arrivals.kind: invalid value 'poison'",
        ),
        (
            'requests = 3\narrivals = {kind = "poisson", rate_per_s = 0}',
            "arrivals.rate_per_s: expected `float` > 0",
        ),
        ('requests = 3\narrivals = {kind = "poisson", rate = 2}', "arrivals: object contains unknown field `rate`"),
        ('requests = 3\narrivals = {kind = "closed", concurrency = 0}', "arrivals.concurrency: expected `int` >= 1"),
        (
            'arrivals = {kind = "ramp", stages = [{from_per_s = 0, to_per_s = 0, for_s = 9}]}',
            "arrivals.stages[0]: to_per_s: a stage needs",
        ),
        ('arrivals = {kind = "trace", file = "gone.csv"}', "gone.csv: no such file"),
        ('arrivals = {kind = "trace", file = "order.csv"}', "order.csv:3: at_s 0.5 comes after 2"),
        ('arrivals = {kind = "trace", file = "column.csv"}', "column.csv:2: object contains unknown field `tokens`"),
        ('arrivals = {kind = "trace", file = "cell.csv"}', "cell.csv:2: answer_tokens: expected `int` >= 1"),
        ('requests = 3\narrivals = {kind = "trace", file = "good.csv"}', "requests: a ramp or a trace ends by itself"),
        (POISSON, "requests: give either requests or duration_s"),
        (POISSON + "requests = 3\nwarm_up_s = 1", "warm_up_requests"),
        (POISSON + "requests = 3\nprompt_token = 4", "test.toml: object contains unknown field `prompt_token`"),
        (
            POISSON + "requests = 3\nprompt_tokens = {kind = 'uniform', low = 5, high = 4}",
            "prompt_tokens: high: 4 must be at least 5",
        ),
        (POISSON + "requests = 3\nprompt_tokens = {kind = 'file', file = 'bad.txt'}", "bad.txt:2: expected `int`"),
        (
            POISSON + "requests = 3\nadapters = {kind = 'power_law', exponent = 1}",
            "adapters: kind power_law takes exponent and names, or exponent and pattern and count",
        ),
        (POISSON + "requests = 3\nadapters = {names = ['a', 'a']}", "adapters: names: an adapter is named twice"),
        (POISSON + "requests = 3\nadapters = {kind = 'file', file = 'bad.txt'}", "bad.txt:1: '5,-1'"),
        (POISSON + "requests = 3\nslo = ['ttft<5']", "slo: 'ttft<5' is not an SLO"),
        (POISSON + "requests = 3\nslo = ['tfft<5ms']", "slo: 'tfft<5ms' is not an SLO"),
        (POISSON + "requests = 3\ndeadline = {share = 1.5, after_s = 1}", "deadline.share: expected `float` <= 1"),
        (POISSON + "requests = 3\nsweep = {concurrency = [1]}", "sweep: these arrivals are swept with rate_per_s"),
        (
            POISSON + "requests = 3\nsweep = {rate_per_s = [1, 0]}",
            "sweep.rate_per_s[1]: expected `float` > 0",
        ),
        (POISSON + "requests = 3\n[[tenants]]\nname = 'a'\n[[tenants]]\nname = 'a'", "tenants: two tenants"),
        (
            POISSON + "requests = 3\n[[tenants]]\nname = 'a'\nwieght = 2",
            "tenants[0]: object contains unknown field `wieght`",
        ),
        (POISSON + "requests = 3\ntimeout_s = inf", "timeout_s: expected `float` <="),
        (POISSON + "requests = 3\nadapters = {names = ['a'], exponent = 1}", "adapters: kind uniform takes names, or"),
        (POISSON + "requests = 3\nadapters = {pattern = 'a', count = 2}", "adapters: pattern: 'a' must have one {}"),
        (POISSON + "requests = 3\ntask = 'guess'", "task: invalid enum value 'guess'"),
        (POISSON + "requests = 3\ntexts = 5", "texts: belongs to a test of embed or classify"),
        (POISSON + "requests = 3\ntask = 'embed'\nanswer_tokens = 5", "answer_tokens: a call of embed makes no tokens"),
        (
            POISSON + "requests = 3\ntask = 'classify'\n[[tenants]]\nname = 'a'\ncancel = {share = 0.5}",
            "cancel: a call of classify makes no tokens",
        ),
        ("requests = ", "not TOML"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "order.csv").write_text("at_s\n2\n0.5\n")
    (tmp_path / "column.csv").write_text("at_s,tokens\n2,1\n")
    (tmp_path / "cell.csv").write_text("at_s,answer_tokens\n2,0\n")
    (tmp_path / "good.csv").write_text("at_s\n2\n")
    (tmp_path / "bad.txt").write_text("5,-1\nx\n" if "adapters" in text else "5\nx\n")
    with pytest.raises(PlanError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_the_examples_can_be_read(file: Path) -> None:
    assert read_plan(load_toml(file), file.name, file.parent).points()


def test_the_page_s_file_can_be_read(tmp_path: Path) -> None:
    page = (EXAMPLES.parents[1] / "docs" / "guides" / "loadtest.md").read_text()
    plan = read(tmp_path, page.partition("```toml\n")[2].partition("```")[0])
    assert len(plan.tenants[0].adapters.names) == 1000
    assert plan.sweep == (5.0, 10.0, 20.0)


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.toml"))) >= 4


def test_conditions() -> None:
    run = {
        "times": {"ttft": {"p99": 0.6, "p99.9": None}},
        "figures": {"error_share": 0.02, "tokens_per_s": 50.0},
    }
    for text, holds in (
        ("ttft.p99>500ms", True),
        ("ttft.p99 > 0.7s", False),
        ("ttft.p99<=600000us", True),
        ("error_share>1%", True),
        ("error_share>0.03", False),
        ("tokens_per_s<51", True),
        ("ttft.p99.9>1ms", True),  # nobody got a token: that is no pass
        ("ttft.p99.9<1ms", False),
    ):
        assert parse_condition(text).holds(run) is holds, text
    assert parse_condition("ttft.p99>500ms").describe(run) == "ttft.p99 is 600.0 ms"
    for text in ("ttft.p99>500", "ttft.p98>5ms", "ttft>5ms", "p99>5ms", "errors>5ms", "ttft.p99=5ms", "", "errors>."):
        with pytest.raises(PlanError):
            parse_condition(text)
    with pytest.raises(PlanError):
        parse_slo("ttft>5ms")
