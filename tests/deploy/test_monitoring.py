"""The check of dashboards and rules: the shipped ones pass, each kind of mistake is named."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from bench.monitoring import METRICS, RULES, RUNBOOK, check_monitoring, metrics_of
from loraplex.router.metrics import OBJECTIVES_S
from tests.debian_program import debian_program
from tests.deploy.mistakes import expect_problem

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = Path("deploy/monitoring/grafana/dashboards/loraplex-cluster.json")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copies of the files that are checked."""
    shutil.copytree(ROOT / "deploy" / "monitoring", tmp_path / "deploy" / "monitoring")
    for name in (METRICS, RUNBOOK):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_shipped_files_name_nothing_that_does_not_exist(tree: Path) -> None:
    assert check_monitoring(tree) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        (
            RULES,
            "loraplex_jobs_poisoned_total",
            "loraplex_jobs_poisoned",
            "LoraplexPoison: no metric loraplex_jobs",
        ),
        (RULES, "> 0.01", "> ", "LoraplexErrors: "),
        (
            RULES,
            "alert: LoraplexPoison",
            "alert: LoraplexPoisoned",
            "docs/guides/runbook.md: no section LoraplexPoisoned",
        ),
        (RULES, "#loraplexkvfull", "#kv", "docs }}/guides/runbook.md#loraplexkvfull"),
        (RUNBOOK, "## LoraplexKvFull", "## KV", "docs/guides/runbook.md: no section LoraplexKvFull"),
        (METRICS, "- `loraplex_relay_links`", "- `relay_links`", "Relay: no metric loraplex_relay_links"),
        (DASHBOARD, "Rows", "Lines", "loraplex-cluster.json: is not what bench.monitoring says"),
    ],
)
def test_a_name_that_does_not_exist_is_a_problem(tree: Path, name: Path, old: str, new: str, problem: str) -> None:
    expect_problem(check_monitoring, tree, name, old, new, problem)


def test_an_expression_names_the_series_of_its_functions_and_operators() -> None:
    found = metrics_of(
        'a{x="$tenant"} / sum(rate(b_total[$__rate_interval])) and -c > 1 or max by (d) (max_over_time(e[5m:1m]))'
    )
    assert found == {"a", "b_total", "c", "e"}


def test_every_alert_fires_for_its_fault_and_none_for_a_cluster_that_is_well() -> None:
    files = ("rules_test.yml", "certificates_test.yml", "objectives_test.yml")
    subprocess.run([debian_program("promtool"), "test", "rules", *files], check=True, cwd=ROOT / RULES.parent)


def test_objectives_are_bounds_of_the_histogram() -> None:
    schema = json.loads((ROOT / "deploy/chart/values.schema.json").read_text())["properties"]["monitoring"]
    first_token = schema["properties"]["objectives"]["properties"]["firstToken"]["properties"]
    assert tuple(first_token["seconds"]["enum"]) == OBJECTIVES_S


def test_prometheus_asks_each_router_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    routers = [name for name, service in services.items() if "router" in service.get("command", ())]
    flags = dict(word.split("=", 1) for word in services["router"]["command"] if "=" in word)
    (job,) = [
        job
        for job in yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "router"
    ]
    (target,) = job["dns_sd_configs"]
    assert (target["names"], target["port"]) == (routers, int(flags["--metrics-port"]))
    # Each is reached by workers at a name of its own.
    assert [services[name]["environment"]["LORAPLEX_ROUTER_RELAY_ADVERTISE"] for name in routers] == routers
