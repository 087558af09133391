"""The gauges of jobs and workers, which an inference gateway's endpoint picker and alerts read."""

from __future__ import annotations

from dataclasses import replace

from loraplex.contracts.broker.messages import AdapterRef, WeightedRef, WorkerPhase
from loraplex.router.app import count_jobs, count_workers
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.metrics import RouterMetrics
from tests.broker.test_liveness import worker
from tests.router.recording_link import RecordingLink, job


def adapter(name: str) -> AdapterRef:
    digest = f"sha256:{'0' * 64}"
    return AdapterRef(f"tenants/acme/adapters/{name}/revisions/{digest}", digest, 8, 1024)


def routed(name: str, *, runs: bool) -> RoutedJob:
    found = RoutedJob(replace(job(), adapter=adapter(name) if name else None))
    found.link = RecordingLink("w") if runs else None
    return found


def test_the_adapters_of_running_and_queued_requests_are_named_once() -> None:
    metrics = RouterMetrics()
    weighted = RoutedJob(replace(job(), adapter=AdapterRef("", "sha256:1", 8, 1, (WeightedRef(adapter("c"), 1.0),))))
    jobs = [routed("b", runs=True), routed("b", runs=True), routed("a", runs=True), routed("", runs=True)]
    count_jobs(metrics, [*jobs, routed("a", runs=False), weighted], slots=32)
    (info,) = (family for family in metrics.registry.collect() if family.name == "loraplex_lora_requests_info")
    assert [sample.labels for sample in info.samples] == [
        {
            "max_lora": "32",
            "running_lora_adapters": "tenants/acme/adapters/a,tenants/acme/adapters/b",
            "waiting_lora_adapters": "tenants/acme/adapters/a",
        }
    ]
    count_jobs(metrics, [], slots=32)
    (info,) = (family for family in metrics.registry.collect() if family.name == "loraplex_lora_requests_info")
    assert [sample.labels["running_lora_adapters"] for sample in info.samples] == [""]


def test_workers_of_the_live_revision_are_counted_apart() -> None:
    """LoraplexNoWorker looks at these alone: the former one's workers serve no new call."""
    metrics = RouterMetrics()
    former, new = (replace(worker(name), base_digest=name, phase=WorkerPhase.SERVING) for name in ("former", "new"))
    for live, others in ((0.0, 2.0), (1.0, 1.0)):
        count_workers(metrics, "tiny", [former, new], "new" if live else "replaced at once")
        serving = {"model": "tiny", "phase": "serving"}
        sample = metrics.registry.get_sample_value
        assert sample("loraplex_workers", {**serving, "revision": "live"}) == live
        assert sample("loraplex_workers", {**serving, "revision": "other"}) == others
