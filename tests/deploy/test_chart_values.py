"""Test the values of the chart: each part's pods, the store's places, what parts call, and what an upgrade changes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplex.adapter_store.embedded import open_database
from loraplex.adapter_store.storage import DataDirectory
from loraplex.transfers.policy import Sources, parse_uri
from tests.deploy.kubernetes_tools import CHART, HelmError, Manifest, needs_helm, pods_of, problems_of, render
from tests.deploy.test_chart import FOREIGN, VERSIONS

pytestmark = pytest.mark.usefixtures("has_helm")

# What the pods of each part take, and a value for it.
_POD: dict[str, Any] = {
    "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"}],
    "envFrom": [{"secretRef": {"name": "proxy"}}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/company", "readOnly": True}],
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/llm"}},
    "podAnnotations": {"company/team": "llm"},
    "podLabels": {"azure.workload.identity/use": "true"},
    "nodeSelector": {"company/pool": "llm"},
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "tolerations": [{"key": "llm", "operator": "Exists"}],
    "priorityClassName": "llm",
}
_PARTS = ("redis", "store", "router", "edge", "gateway", "runner", "scaler", "operator", "register")


@pytest.fixture(scope="module")
def has_helm() -> None:
    needs_helm()


def render_values(folder: Path, values: dict[str, Any], example: str = "laptop") -> list[Manifest]:
    """Render an example with further values."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return render(example, ("-f", str(path)))


def valid(manifests: list[Manifest]) -> list[Manifest]:
    """Return the objects, which Kubernetes takes."""
    own = [one for one in manifests if one["kind"] not in FOREIGN]
    assert not [(one["metadata"]["name"], problem) for one in own for problem in problems_of(one, VERSIONS[-1])]
    return manifests


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return an object."""
    (found,) = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(manifests: list[Manifest], name: str) -> Manifest:
    """Return the specification of a workload's pods."""
    (found,) = [pod for one, pod in pods_of(manifests) if one["metadata"]["name"] == name]
    return found


def test_the_pods_of_each_part_take_what_its_values_say(tmp_path: Path) -> None:
    parts: dict[str, Any] = {part: dict(_POD) for part in _PARTS}
    for part in ("runner", "scaler", "operator"):
        parts[part]["enabled"] = True
    pool = {"model": "base", "scaled": True, **_POD}
    account = {"serviceAccount": {"annotations": {"company/all": "x"}}}
    manifests = valid(render_values(tmp_path, {**parts, **account, "workers": {"cpu": pool}}))
    for workload, pod in pods_of(manifests):
        name = workload["metadata"]["name"]
        template = workload["spec"]["template"]["metadata"]
        assert template["annotations"]["company/team"] == "llm", name
        assert template["labels"]["azure.workload.identity/use"] == "true", name
        for field in ("nodeSelector", "affinity", "tolerations", "priorityClassName"):
            assert pod[field] == _POD[field], (name, field)
        (container,) = pod["containers"]
        assert _POD["env"][0] in container["env"], name
        assert _POD["envFrom"] == container["envFrom"], name
        assert _POD["extraVolumes"][0] in pod["volumes"], name
        assert _POD["extraVolumeMounts"][0] in container["volumeMounts"], name
        annotations = named(manifests, "ServiceAccount", pod["serviceAccountName"])["metadata"]["annotations"]
        assert annotations == {"company/all": "x", **_POD["serviceAccount"]["annotations"]}, name
    assert len({pod["serviceAccountName"] for _, pod in pods_of(manifests)}) == 10, "each part has its own"


def test_a_pool_s_identity_is_the_download_s_too(tmp_path: Path) -> None:
    pool = {"env": [{"name": "AWS_REGION", "value": "eu-west-1"}], "podAnnotations": {"x": "z"}}
    manifests = valid(render_values(tmp_path, {"workers": {"qwen-cpu": pool}}, "two-bases"))
    pod = pod_of(manifests, "lx-worker-qwen-cpu")
    (download,) = pod["initContainers"]
    assert {"name": "AWS_REGION", "value": "eu-west-1"} in download["env"]
    assert "LORAPLEX_REDIS_URL" not in str(download["env"])


def test_images_have_digests_where_they_are_given() -> None:
    digest = "sha256:" + "a" * 64
    pods = {
        one["metadata"]["name"]: pod["containers"][0]["image"]
        for one, pod in pods_of(render("laptop", (f"image.digests.router={digest}",)))
    }
    assert pods["lx-router"] == f"loraplex-router:0.1.0@{digest}"
    assert pods["lx-store"] == "loraplex-store:0.1.0"


def test_stores_share_a_bucket_and_a_database_and_read_the_files_of_the_values(tmp_path: Path) -> None:
    sources = '[[source]]\nprefix = "s3://acme-adapters/"\ntenants = ["acme"]\n'
    store = {
        "replicas": 2,
        "bucket": "s3://acme-store/loraplex",
        "database": {"urlSecret": {"name": "catalog"}},
        "sources": sources,
    }
    manifests = valid(render_values(tmp_path, {"store": store}))
    assert named(manifests, "StatefulSet", "lx-store")["spec"]["replicas"] == 2
    assert named(manifests, "PodDisruptionBudget", "lx-store")["spec"]["maxUnavailable"] == 1
    pod = pod_of(manifests, "lx-store")
    (container,) = pod["containers"]
    assert {"--bucket=s3://acme-store/loraplex", "--sources=/etc/loraplex/store/sources.toml"} <= set(
        container["command"]
    )
    (variable,) = container["env"]
    assert variable["name"] == "LORAPLEX_ADAPTER_STORE_DATABASE"
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "catalog", "key": "url"}}
    assert {"name": "data", "emptyDir": {"sizeLimit": "2Gi"}} in pod["volumes"], "it may be lost"
    assert named(manifests, "Secret", "lx-store")["stringData"] == {"sources.toml": sources.strip()}
    assert not [one for one in manifests if one["metadata"]["name"] == "data-lx-store-0"]


def job_names(settings: tuple[str, ...] = ()) -> set[str]:
    return {one["metadata"]["name"] for one in render("gpu", settings) if one["kind"] == "Job"}


@pytest.mark.parametrize(
    "setting",
    [
        "models.qwen.quantize=int8",
        "credentials.secret.name=other",
        "podSecurity.runAsUser=20001",
        "register.podAnnotations.a=b",
        "image.tag=next",
        "register.resources.limits.memory=2Gi",
        "credentials.secret.operatorKey=other",
    ],
)
def test_a_registration_that_changes_in_anything_is_another_job(setting: str) -> None:
    assert job_names() == job_names()
    assert not job_names() & job_names((setting,)), "Kubernetes refuses another template under the same name"


def test_another_version_of_the_chart_has_other_jobs(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    path = tmp_path / "chart" / "Chart.yaml"
    path.write_text(path.read_text().replace("\nversion: 0.1.0", "\nversion: 0.1.1"))
    (job,) = [one for one in render("laptop", chart=tmp_path / "chart") if one["kind"] == "Job"]
    (now,) = [one for one in render("laptop") if one["kind"] == "Job"]
    assert job["metadata"]["name"] != now["metadata"]["name"]
    assert job["spec"]["ttlSecondsAfterFinished"] == 86400


def test_a_revision_is_staged_beside_the_live_one_and_has_pools_of_its_own() -> None:
    digest = "sha256:" + "a" * 64
    manifests = render("two-bases", (f"models.qwen.digest={digest}",))
    jobs = {one["metadata"]["name"].rpartition("-")[0]: pod for one, pod in pods_of(manifests) if one["kind"] == "Job"}
    staged, live = jobs["lx-register-qwen-int8"], jobs["lx-register-qwen"]
    assert {"--stage", "int8"} <= set(staged["containers"][0]["command"])
    assert "--stage" in live["containers"][0]["command"], "later it is the former one"
    assert "--stage" not in jobs["lx-register-llama"]["containers"][0]["command"]
    waits = [pod["initContainers"][0]["command"][-1] for pod in (staged, live)]
    assert waits[0] == "until loraplex models list --json | grep -q '\"qwen\"'; do sleep 2; done"
    assert "until" not in waits[1]
    words = {
        name: pod_of(manifests, f"lx-worker-{name}")["containers"][0]["command"] for name in ("qwen-cpu", "qwen-int8")
    }
    assert {"--model-name=qwen", "--quantize=", "--kv-cache-dtype="} <= set(words["qwen-cpu"])
    assert {"--model-name=qwen", "--quantize=int8", "--kv-cache-dtype=int8"} <= set(words["qwen-int8"])
    base = named(manifests, "BaseModel", "qwen")
    definition = yaml.safe_load((CHART / "crds" / "basemodels.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert base["spec"] == {"digest": digest}
    assert re.fullmatch(schema["properties"]["digest"]["pattern"], digest)


def test_drafts_of_a_pool_are_configured_in_json(tmp_path: Path) -> None:
    text = '{"method": "suffix", "num_speculative_tokens": 4}'
    manifests = render_values(tmp_path, {"workerDefaults": {"speculativeConfig": text}})
    (worker,) = [pod for one, pod in pods_of(manifests) if "-worker-" in one["metadata"]["name"]]
    assert f"--speculative-config={text}" in worker["containers"][0]["command"]


def test_an_upgrade_changes_nothing_that_kubernetes_keeps() -> None:
    # Fields that Kubernetes lets nobody change; of a claim all stay
    # but its size.
    kept = {
        "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
        "Deployment": ("selector",),
        "PersistentVolumeClaim": ("accessModes", "storageClassName"),
    }
    changes = (
        *("store.disk=60Gi", "redis.disk=9Gi", "router.replicas=3", "image.tag=next", "store.podAnnotations.a=b"),
        *("router.extraVolumes[0].name=x", "router.extraVolumes[0].emptyDir.medium=Memory", "store.sources=x"),
    )

    def fixed(settings: tuple[str, ...]) -> dict[tuple[str, str], list[Any]]:
        return {
            (one["kind"], one["metadata"]["name"]): [one["spec"].get(field) for field in kept[one["kind"]]]
            for one in render("laptop", settings)
            if one["kind"] in kept
        }

    assert fixed(()) == fixed(changes)
    manifests = render("laptop", changes)
    claims = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "PersistentVolumeClaim"}
    sizes = {name: one["spec"]["resources"]["requests"]["storage"] for name, one in claims.items()}
    assert sizes == {"data-lx-store-0": "60Gi", "data-lx-valkey-0": "9Gi"}
    assert all(one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for one in claims.values())


def test_a_revision_in_place_of_the_former_leaves_its_workers_as_they_are(tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "examples" / "two-bases.yaml").read_text())
    values["models"]["qwen"] = values["models"]["qwen"].pop("revisions")["int8"]
    del values["workers"]["qwen-cpu"], values["workers"]["qwen-int8"]["revision"]
    (tmp_path / "after.yaml").write_text(yaml.safe_dump(values))
    before, after = (
        named(render(example), "Deployment", "lx-worker-qwen-int8")["spec"]["template"]
        for example in ("two-bases", tmp_path / "after.yaml")
    )
    assert before == after


def test_monitors_keep_releases_apart_and_dashboards_come_as_config_maps() -> None:
    on = ("monitoring.enabled=true", "monitoring.dashboards.enabled=true")
    manifests = valid(render("laptop", on))
    for monitor in (one for one in manifests if one["kind"] == "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert {"targetLabel": "release", "replacement": "lx"} in endpoint["relabelings"]
    rules = named(manifests, "PrometheusRule", "lx-loraplex")["spec"]["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules if "sum(" in rule["expr"] or "max(" in rule["expr"]] == []
    own = named(manifests, "PrometheusRule", "lx-loraplex")["spec"]["groups"][1]["rules"]
    assert [rule["record"] for rule in own if 'release="lx"' not in rule["expr"] and "record" in rule] == []
    config = [
        one for one in manifests if one["kind"] == "ConfigMap" and "grafana_dashboard" in one["metadata"]["labels"]
    ]
    shipped = (CHART.parent / "monitoring" / "grafana" / "dashboards").glob("*.json")
    assert {name: json.loads(text) for one in config for name, text in one["data"].items()} == {
        path.name: json.loads(path.read_text()) for path in shipped
    }


def test_audit_logs_go_where_the_values_say() -> None:
    env = "[0].name=OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"
    manifests = valid(
        render("restricted", ("credentials.audit=otlp", f"router.env{env}", "router.env[0].value=http://c:1"))
    )
    containers = {
        one["metadata"]["name"]: container
        for one, pod in pods_of(manifests)
        for container in pod["containers"]
        if "--audit=otlp" in (container.get("command") or [])
    }
    kinds = {name.split("-")[1] for name in containers}
    assert kinds == {"router", "store", "worker"}


def test_alerts_have_the_objectives_of_the_values(tmp_path: Path) -> None:
    objectives = {"availability": 0.9995, "firstToken": {"share": 0.95, "seconds": 2.5}}
    values = yaml.safe_load((CHART / "examples" / "laptop.yaml").read_text())
    values["monitoring"] = {"enabled": True, "objectives": objectives}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    rule = named(valid(render(tmp_path / "values.yaml")), "PrometheusRule", "lx-loraplex")
    text = yaml.safe_dump(rule["spec"]["groups"][1], width=1_000)
    assert (text.count("* (1 - 0.9995)"), text.count("* (1.0 - 0.95)"), text.count('le=~"2.5(.0)?"')) == (4, 4, 4)
    assert not [word for word in ("0.999)", "0.99)", 'le=~"5', 'release=~".*"') if word in text]


def test_a_backup_is_copied_whole_and_the_oldest_ones_go(tmp_path: Path) -> None:
    manifests = valid(render("laptop", ("backup.schedule=0 3 * * *", "backup.claim=backups", "backup.keep=2")))
    pod = named(manifests, "CronJob", "lx-backup")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    claims = {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    assert claims == {"data-lx-store-0", "backups"}
    ((near,),) = [one["requiredDuringSchedulingIgnoredDuringExecution"] for one in pod["affinity"].values()]
    assert near["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "store"
    data = DataDirectory(tmp_path / "store")
    open_database("", data.catalog_path).close()
    data.close()
    kept = tmp_path / "backups"
    for old in ("2026-01-01T000000Z", "2026-01-02T000000Z", "2026-01-03T000000Z.part"):
        (kept / old).mkdir(parents=True)
    (container,) = pod["containers"]
    *shell, script = container["command"]
    script = script.replace("loraplex backup", f"{sys.executable} -m loraplex backup")
    script = script.replace("/var/lib/backups", str(kept)).replace("/var/lib/loraplex", str(tmp_path))
    subprocess.run([*shell, script], check=True, timeout=60)
    left = sorted(path.name for path in kept.iterdir())
    assert left[0] == "2026-01-02T000000Z"
    assert len(left) == 2
    assert (kept / left[1] / "catalog.db").exists()

    store = pod_of(manifests, "lx-store")
    assert {"name": "backups", "persistentVolumeClaim": {"claimName": "backups"}} in store["volumes"]
    assert "--removals=/var/lib/backups/removals" in store["containers"][0]["command"]
    assert {"name": "backups", "mountPath": "/var/lib/backups"} in store["containers"][0]["volumeMounts"]
    shared = pod_of(render("restricted", ("backup.claim=backups",)), "lx-store")
    assert not [flag for flag in shared["containers"][0]["command"] if "removals" in flag], "they are in the bucket"


def test_a_store_starts_with_a_copy_if_it_has_nothing_itself(tmp_path: Path) -> None:
    copy = "2026-01-02T000000Z"
    manifests = valid(render("laptop", ("backup.claim=backups", f"backup.restore={copy}")))
    (container,) = pod_of(manifests, "lx-store")["initContainers"]
    *shell, script = container["command"]
    script = script.replace("loraplex backup", f"{sys.executable} -m loraplex backup")
    script = script.replace("/var/lib/backups", str(tmp_path / "backups"))
    script = script.replace("/var/lib/loraplex", str(tmp_path / "disk"))
    data = DataDirectory(tmp_path / "backups" / copy)
    open_database("", data.catalog_path).close()
    data.close()
    catalog = tmp_path / "disk" / "store" / "catalog.db"
    (tmp_path / "disk" / "restored").mkdir(parents=True)  # of a copy that was cut off
    subprocess.run([*shell, script], check=True, timeout=60)
    assert catalog.exists()
    catalog.write_bytes(b"another one, of a store that has run since")
    subprocess.run([*shell, script], check=True, timeout=60)
    assert catalog.read_bytes().startswith(b"another")
    catalog.rename(catalog.with_name("lost"))  # files without their catalog are not overwritten
    assert subprocess.run([*shell, script], check=False, timeout=60, capture_output=True).returncode


def test_the_store_reads_a_bucket_of_adapters_by_the_account_of_its_pod(tmp_path: Path) -> None:
    manifests = render("gpu")
    account = named(manifests, "ServiceAccount", "lx-store")
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith(":role/llm-store")
    pod = pod_of(manifests, "lx-store")
    assert pod["serviceAccountName"] == "lx-store"
    assert not [name for name in pod["containers"][0]["env"] if "KEY" in name["name"]]
    (tmp_path / "sources.toml").write_text(named(manifests, "Secret", "lx-store")["stringData"]["sources.toml"])
    rule = Sources(tmp_path / "sources.toml").rule(parse_uri("s3://acme-adapters/support-2"), "acme")
    assert (rule.identity, rule.secrets) == (True, {})


def test_parts_call_each_other_and_what_their_values_name_alone() -> None:
    anywhere = "networkPolicies.egress=true"
    manifests = valid(render("laptop", (anywhere, "store.egress[0].to[0].ipBlock.cidr=10.0.0.0/8")))
    callees = {
        one["metadata"]["name"]: {
            rule["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in one["spec"]["egress"]
            if "podSelector" in rule.get("to", [{}])[0]
        }
        for one in manifests
        if one["kind"] == "NetworkPolicy"
    }
    assert callees == {
        "lx-edge": {"router", "gateway", "store"},
        "lx-gateway": {"router", "store"},
        "lx-register": {"store"},
        "lx-router": {"router", "store", "valkey"},
        "lx-store": set(),
        "lx-valkey": set(),
        "lx-worker-cpu": {"router", "store", "valkey"},
    }
    rules = named(manifests, "NetworkPolicy", "lx-store")["spec"]["egress"]
    assert {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]} in rules
    assert {"port": 53, "protocol": "UDP"} in rules[0]["ports"]


@pytest.mark.parametrize(
    ("example", "settings", "message"),
    [
        ("laptop", ("store.replicas=2",), "/store/bucket"),
        ("laptop", ("store.replicas=2", "store.bucket=s3://a/b"), "/store/database/urlSecret/name"),
        ("laptop", ("store.bucket=acme",), "/store/bucket"),
        ("laptop", ("image.digests.router=sha256:1",), "/image/digests/router"),
        ("laptop", ("image.digests.nosuch=x",), "additional properties 'nosuch' not allowed"),
        ("laptop", ("router.env[0].value=A",), "/router/env/0"),
        ("laptop", ("router.env[0].name=A", "router.env[0].value=x", "router.env[0].valueFrom.a=b"), "/router/env/0"),
        (
            "laptop",
            ("router.env[0].name=POD_NAME", "router.env[0].value=x"),
            "router.env: POD_NAME is set by the chart",
        ),
        (
            "laptop",
            ("router.extraVolumes[0].name=tmp", "router.extraVolumes[0].emptyDir.medium=Memory"),
            "router.extraVolumes: the chart has a volume tmp; give it another name",
        ),
        ("laptop", (r"store.podLabels.app\.kubernetes\.io/name=x",), "store.podLabels: app.kubernetes.io/name is the"),
        ("gpu", ("networkPolicies.egress=true",), "closes the way to models.qwen; name where that is"),
        (
            "two-cells",
            ("networkPolicies.egress=true",),
            "router.egress: networkPolicies.egress closes the way to redis",
        ),
        ("laptop", ("workers.cpu.affinity=x",), "/workers/cpu/affinity"),
        ("laptop", ("workers.cpu.revision=v2",), "workers.cpu.revision: v2 is not one of models.base.revisions"),
        ("laptop", ("models.base.revisions.v2.quantize=int8",), "/models/base/revisions/v2"),
        ("laptop", (f"models.base.digest=sha256:{'a' * 64}",), "models.base.digest: operator.enabled is false"),
        (
            "gpu",
            (f"models.qwen.digest=sha256:{'a' * 64}", "operator.namespaces.llm[0]=acme"),
            "give operator.namespaces",
        ),
        ("two-bases", ("workers.qwen-cpu.scaled=true",), "workers.qwen-int8 has another one; set the replicas of both"),
        ("laptop", ("workerDefaults.revision=v2",), "/workerDefaults/revision"),
        ("laptop", ("backup.schedule=@daily",), "/backup/claim"),
        ("laptop", ("backup.schedule=daily", "backup.claim=b"), "/backup/schedule"),
        (
            "restricted",
            ("backup.schedule=@daily", "backup.claim=b", "networkPolicies.egress=false"),
            "backup.schedule: the catalog is in store.database",
        ),
        ("gpu", ("backup.schedule=@daily", "backup.claim=b"), "backup.schedule: the files are in store.bucket"),
        ("laptop", ("backup.restore=2026-01-02T000000Z",), "backup.restore: copies from backup.claim"),
        ("laptop", ("backup.restore=../x", "backup.claim=b"), "/backup/restore"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(example: str, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(example, settings)
    assert message in str(refused.value)
