"""Test the chart with credentials: users and TLS of Redis, what leaves a pod, and the objects of a Gateway."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from loraplex.cli import valkey
from loraplex.contracts.broker.connection import connect
from loraplex.runtime.rpc.children.process import Process
from tests.credentials_files import CA
from tests.debian_program import debian_program
from tests.deploy.kubernetes_tools import HelmError, Manifest, needs_helm, pods_of, render
from tests.deploy.pods import for_redis_7
from tests.deploy.test_chart_values import named, pod_of
from tests.free_ports import free_port

pytestmark = pytest.mark.usefixtures("has_helm")


@pytest.fixture(scope="module")
def has_helm() -> None:
    needs_helm()


def variable(manifests: list[Manifest], name: str, variable_name: str = "LORAPLEX_REDIS_URL") -> Any:
    """Return a variable of a workload's container: its value, or where it comes from."""
    (container,) = pod_of(manifests, name)["containers"]
    (found,) = [one for one in container["env"] if one["name"] == variable_name]
    return found.get("value", found.get("valueFrom"))


def test_routers_and_workers_are_users_of_redis_with_rights_of_their_own() -> None:
    manifests = render("gpu")
    for role, name in (("router", "lx-router"), ("worker", "lx-worker-h100")):
        url = variable(manifests, name)
        assert url.startswith(f"rediss://{role}@lx-valkey.llm.svc:6379?")
        assert "password_file=/etc/loraplex/redis/password" in url
        secrets = [one for one in pod_of(manifests, name)["volumes"] if one["name"] == "redis"]
        items = [{"key": role, "path": "password"}]
        assert secrets == [{"name": "redis", "secret": {"secretName": "loraplex-redis-users", "items": items}}]
    assert named(manifests, "Certificate", "lx-valkey")["spec"]["dnsNames"] == ["lx-valkey.llm.svc"]
    own = render("restricted")
    for role, name in (("router", "lx-router"), ("worker", "lx-worker-cpu")):
        assert variable(own, name) == {"secretKeyRef": {"name": "loraplex-redis", "key": role}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[int]:
    """The embedded server of the example `gpu`, run by Debian's Redis: Valkey's wheel has no TLS. Yields its port."""
    manifests = render("gpu")
    pod = pod_of(manifests, "lx-valkey")
    for folder in ("tls", "acl", "data", "rights"):
        (tmp_path / folder).mkdir()
    (tmp_path / "rights" / "users.acl").write_text(named(manifests, "ConfigMap", "lx-valkey")["data"]["users.acl"])
    for role in ("router", "worker", "operator"):
        (tmp_path / "users" / role).mkdir(parents=True)
        (tmp_path / "users" / role / "password").write_text(f"secret-of-{role}\n")
    certificate, key = CA.issue("loraplex://valkey/lx", ["127.0.0.1"])
    for name, content in {"tls.crt": certificate, "tls.key": key, "ca.crt": CA.pem}.items():
        (tmp_path / "tls" / name).write_bytes(content)

    def here(word: str) -> str:
        return word.replace("/etc/loraplex", str(tmp_path)).replace("/data", str(tmp_path / "data"))

    (users,) = pod["initContainers"]
    for path in (tmp_path / "users").rglob("*"):
        path.chmod(0o500)  # as a mounted Secret: nothing is written there
    await asyncio.to_thread(subprocess.run, [here(word) for word in users["command"]], check=True, timeout=60)
    port = str(free_port())
    (container,) = pod["containers"]
    words = [port if word == "6379" else here(str(word)) for word in container["command"]]
    program = await asyncio.to_thread(debian_program, "redis-server")
    argv = [program, *for_redis_7(words[1:]), "--bind", "127.0.0.1"]
    process = await Process.start("redis", argv, log_path=tmp_path / "log", ready=valkey.READY)
    await process.wait_ready()
    yield int(port)
    await process.kill()


async def test_the_embedded_server_has_tls_and_the_roles_users(server: int, tmp_path: Path) -> None:
    def url(role: str) -> str:
        files = f"password_file={tmp_path}/users/{role}/password&ssl_ca_certs={tmp_path}/tls/ca.crt"
        return f"rediss://{role}@127.0.0.1:{server}?{files}"

    async with await connect(url("router")) as router, await connect(url("worker")) as worker:
        assert await router.set("lp:{ledger}:x", "1")
        assert await worker.lrange("lp:{qwen/main}:wake", 0, -1) == []
        with pytest.raises(NoPermissionError):
            await worker.get("lp:{ledger}:x")
        with pytest.raises(NoPermissionError):
            await worker.lrange("lp:{other/main}:wake", 0, -1)
    options: Any = {"ssl": True, "ssl_ca_certs": str(tmp_path / "tls" / "ca.crt")}
    async with Redis(host="127.0.0.1", port=server, **options) as nobody:
        with pytest.raises(AuthenticationError):
            await nobody.ping()


def test_what_must_outlive_a_pod_does_not_lie_in_it() -> None:
    commands = {
        one["metadata"]["name"]: [str(word) for word in pod["containers"][0]["command"]]
        for one, pod in pods_of(render("restricted"))
    }
    for name in ("lx-router", "lx-store", "lx-worker-cpu"):
        assert "--audit=-" in commands[name], name
    assert "--usage-url=https://billing.platform.svc/events" in commands["lx-router"]
    for flag in ("--usage-file=/var/lib/loraplex/usage.jsonl", "--audit=/var/lib/loraplex/audit.jsonl"):
        with pytest.raises(HelmError, match=re.escape(f"router.args: {flag}: the file would be lost with its pod")):
            render("laptop", (f"router.args={{{flag}}}",))
    mount = ("router.extraVolumes[0].name=logs", "router.extraVolumes[0].hostPath.path=/logs")
    mounted = (*mount, "router.extraVolumeMounts[0].name=logs", "router.extraVolumeMounts[0].mountPath=/logs")
    assert render("laptop", ("router.args={--usage-file=/logs/usage.jsonl}", *mounted))


# Rules of the Gateway API, as its pages of HTTPRoute, GRPCRoute and BackendTLSPolicy have
# them; the schemas are in no package.
_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DURATION = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")


def test_a_gateway_takes_the_routes_and_calls_their_services_by_tls() -> None:
    manifests = render("oidc-gateway")
    kinds = ("HTTPRoute", "GRPCRoute", "BackendTLSPolicy")
    objects = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in manifests if one["kind"] in kinds}
    assert set(objects) == {
        *(("HTTPRoute", "lx-gateway"), ("GRPCRoute", "lx-router")),
        *(("BackendTLSPolicy", "lx-gateway"), ("BackendTLSPolicy", "lx-router")),
    }
    http, grpc = objects["HTTPRoute", "lx-gateway"], objects["GRPCRoute", "lx-router"]
    assert not set(http["hostnames"]) & set(grpc["hostnames"]), "it takes one of two such routes"
    assert all(_HOST.fullmatch(host) for route in (http, grpc) for host in route["hostnames"])
    (rule,) = http["rules"]
    assert _DURATION.fullmatch(rule["timeouts"]["request"])
    assert set(rule) == {"backendRefs", "timeouts"}
    (call,) = grpc["rules"]
    assert set(call) == {"backendRefs", "matches"}, "a GRPCRoute has no timeouts"
    (match,) = call["matches"]
    services = {one.full_name for one in inference_pb2.DESCRIPTOR.services_by_name.values()}
    assert match == {"method": {"service": match["method"]["service"]}}
    assert match["method"]["service"] in services
    certificates = {
        one["metadata"]["name"]: one["spec"]["dnsNames"] for one in manifests if one["kind"] == "Certificate"
    }
    for route in (http, grpc):
        assert route["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
        ((backend,),) = [one["backendRefs"] for one in route["rules"]]
        ports = named(manifests, "Service", backend["name"])["spec"]["ports"]
        (port,) = [one for one in ports if one["port"] == backend["port"]]
        assert port.get("appProtocol") in {None, "https"}, "h2c is without TLS"
        policy = objects["BackendTLSPolicy", backend["name"]]
        assert policy["targetRefs"] == [{"group": "", "kind": "Service", "name": backend["name"]}]
        assert policy["validation"]["hostname"] in certificates[backend["name"]]
        (authority,) = policy["validation"]["caCertificateRefs"]
        assert authority == {"group": "", "kind": "ConfigMap", "name": "company-ca"}


def test_gateways_sign_people_in_with_files_of_a_secret() -> None:
    manifests = render("oidc-gateway")
    pod = named(manifests, "Deployment", "lx-gateway")["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in command if "=" in flag)
    mounted = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert flags["page-url"] == "https://llm.example.com"
    (issuer,) = json.loads(named(manifests, "ConfigMap", "lx-issuers")["data"]["issuers.json"])["issuers"]
    for file in (flags["session-key"], issuer["sign_in"]["client_secret_file"]):
        assert volumes[mounted[file.rpartition("/")[0]]]["secret"] == {"secretName": "loraplex-sign-in"}
    assert volumes[mounted[flags["jwt-issuers"].rpartition("/")[0]]]["configMap"] == {"name": "lx-issuers"}
    without = render("oidc-gateway", ("gateway.signIn.url=",))
    command = named(without, "Deployment", "lx-gateway")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert not [flag for flag in command if "issuers" in flag or "session" in flag]


def test_an_ingress_is_told_of_the_backends_tls() -> None:
    ingress = ("gateway.route.enabled=false", "gateway.ingress.enabled=true", "gateway.ingress.host=llm.example.com")
    with pytest.raises(HelmError, match=r"gateway.ingress.annotations: with credentials gateways speak HTTPS alone"):
        render("oidc-gateway", ingress)
    annotation = r"gateway.ingress.annotations.nginx\.ingress\.kubernetes\.io/backend-protocol=HTTPS"
    manifests = render("oidc-gateway", (*ingress, annotation))
    ingress_object = named(manifests, "Ingress", "lx-gateway")
    assert ingress_object["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}
    ((path,),) = [rule["http"]["paths"] for rule in ingress_object["spec"]["rules"]]
    ports = named(manifests, "Service", "lx-gateway")["spec"]["ports"]
    assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in ports}


@pytest.mark.parametrize(
    ("example", "settings", "message"),
    [
        ("gpu", ("redis.usersSecret=",), "redis.usersSecret: name the Secret with the passwords of Redis' users"),
        ("laptop", ("redis.usersSecret=x",), "redis.usersSecret: credentials.mode is none, and Redis has no users"),
        ("restricted", ("redis.usersSecret=x",), "/redis/usersSecret"),
        ("laptop", ("redis.caSecret=x",), "/redis/caSecret"),
        ("gpu", ("credentials.mode=secrets",), "credentials.secrets."),
        (
            "oidc-gateway",
            ("credentials.jwt.issuers[0].rules[0].tenant={acme,globex}",),
            "/credentials/jwt/issuers/0/rules/0/tenant",
        ),
        ("oidc-gateway", ("credentials.jwt.issuers[0].rules[0].role=root",), "/credentials/jwt/issuers/0/rules/0/role"),
        ("oidc-gateway", ("credentials.jwt.issuers[0].audience=null",), "/credentials/jwt/issuers/0/audience"),
        ("oidc-gateway", ("gateway.signIn.secret=",), "gateway.signIn.secret: name the Secret with session.key"),
        ("oidc-gateway", ("gateway.signIn.url=http://llm.example.com",), "/gateway/signIn/url"),
        ("laptop", ("gateway.signIn.url=https://a", "gateway.signIn.secret=b"), "gateway.signIn.url: no issuer of"),
        ("oidc-gateway", ("gateway.route.caConfigMap=",), "gateway.route.caConfigMap: with credentials the Gateway"),
        (
            "oidc-gateway",
            ("gateway.route.grpcHosts={*.example.com}",),
            "gateway.route.grpcHosts: *.example.com is also a host of the HTTPRoute (llm.example.com)",
        ),
        ("oidc-gateway", ("gateway.route.hosts=null", "gateway.route.grpcHosts=null"), "/gateway/route"),
        ("laptop", ("router.usageUrl=billing:80",), "/router/usageUrl"),
        ("laptop", ("router.contentHook=guard:9000",), "/router/contentHook"),
    ],
)
def test_values_that_contradict_credentials_are_refused(example: str, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(example, settings)
    assert message in str(refused.value)
