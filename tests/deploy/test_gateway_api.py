"""The files for a Gateway's endpoint picker: it finds its numbers in routers' metrics, and routes lead somewhere.

The picker reads `NAME{label=value}` of the first series that matches; of the LoRA gauge three labels. The schemas of
the Gateway API are in no package of the registry: the tests check the names that the files refer to.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from loraplex.inference.v1 import inference_pb2
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.router.app import count_jobs, count_workers
from loraplex.router.metrics import RouterMetrics
from tests.broker.test_liveness import worker
from tests.deploy.kubernetes_tools import ROOT, needs_helm, pods_of, render
from tests.router.test_gauges import routed

FOLDER = ROOT / "deploy" / "gateway-api"
# The fields of an engine that the picker knows.
FIELDS = {
    *("name", "queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec"),
    *("cacheBlockSizeLabelName", "cacheNumBlocksLabelName", "cacheBlockSizeSpec", "cacheNumBlocksSpec"),
    "customMetrics",
}


@pytest.fixture
def picker() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "picker.yaml").read_text()))


def first_series(spec: str, exposition: str) -> Any:
    """Return the sample that a picker takes of a scrape."""
    found = re.fullmatch(r"(\w+)(?:\{(\w+)=(\w+)\})?", spec)
    assert found is not None, spec
    name, label, value = found.groups()
    samples = [one for family in text_string_to_metric_families(exposition) for one in family.samples]
    return next(one for one in samples if one.name == name and (label is None or one.labels[label] == value))


def test_a_picker_finds_its_numbers_in_a_router_s_metrics(picker: dict[str, Any]) -> None:
    metrics = RouterMetrics()
    jobs = [routed("b", runs=True), routed("b", runs=True), routed("a", runs=True), routed("c", runs=False)]
    count_jobs(metrics, jobs, slots=32)
    state = worker("w")
    count_workers(metrics, "base", [state], state.base_digest)
    scraped = generate_latest(metrics.registry).decode()
    parameters = {one["type"]: one.get("parameters", {}) for one in picker["plugins"]}
    (engine,) = parameters["core-metrics-extractor"]["engineConfigs"]
    assert set(engine) <= FIELDS
    assert engine["name"] == parameters["core-metrics-extractor"]["defaultEngine"]
    assert first_series(engine["queuedRequestsSpec"], scraped).value == 1
    assert first_series(engine["runningRequestsSpec"], scraped).value == 3
    assert first_series(engine["kvUsageSpec"], scraped).value == state.blocks_referenced / state.blocks_total > 0
    name = "tenants/acme/adapters/"
    assert first_series(engine["loraSpec"], scraped).labels == {
        "max_lora": "32",
        "running_lora_adapters": f"{name}a,{name}b",
        "waiting_lora_adapters": f"{name}c",
    }


def test_what_the_picker_s_profiles_refer_to_is_there(picker: dict[str, Any]) -> None:
    plugins = {one.get("name", one["type"]) for one in picker["plugins"]}
    used = set(re.findall(r"'pluginRef': '([\w-]+)'", str(picker)))
    assert used == plugins


def test_routes_lead_to_services_and_ports_of_the_chart(picker: dict[str, Any]) -> None:
    needs_helm()
    http, grpc, pool = yaml.safe_load_all((FOLDER / "routes.yaml").read_text())
    manifests = render("laptop")
    services = {one["metadata"]["name"].replace("lx-", "llm-"): one for one in manifests if one["kind"] == "Service"}
    (backend,) = http["spec"]["rules"][0]["backendRefs"]
    assert backend["port"] in [port["port"] for port in services[backend["name"]]["spec"]["ports"]]
    (match,) = grpc["spec"]["rules"][0]["matches"]
    assert match["method"]["service"] in {one.full_name for one in inference_pb2.DESCRIPTOR.services_by_name.values()}
    (backend,) = grpc["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    labels = pool["spec"]["selector"]["matchLabels"]
    pods = [
        pod for workload, pod in pods_of(manifests)
        if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]  # fmt: skip
    (router,) = (pod["containers"][0] for pod in pods)
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    assert [one["number"] for one in pool["spec"]["targetPorts"]] == [ports["grpc"]]
    (source,) = (one["parameters"] for one in picker["plugins"] if one["type"] == "metrics-data-source")
    assert source["port"] == ports["metrics"]
