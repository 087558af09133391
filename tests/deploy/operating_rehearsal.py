"""Rehearses what operators do with the chart: `python -m tests.deploy.operating_rehearsal [--streams N]`.

The third part of `make rehearsal`: values of five kinds run as processes, with their credentials. With those for GPUs
an object's adapter comes from a bucket, the release is upgraded three times, and a router is lost, its collector away;
with those for two bases a revision is rolled out. No request may fail, and no usage event be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

from loraplex.cli.credentials import make_first_key
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.job_keys import new_job_key
from loraplex_client import AsyncClient, Tls, UnauthenticatedError
from tests.adapter_store.conftest import files_of
from tests.adapter_store.sources.places import bucket_of, put_files, seaweed
from tests.clients.operator.kubernetes_api import KubernetesApi
from tests.deploy.kubernetes_tools import CHART, Manifest, render
from tests.deploy.pods import Cluster
from tests.deploy.rehearsal import MODEL, Streams
from tests.issuers.test_tokens import AUDIENCE, ISSUER, KEYS, token
from tests.postgres_server import PostgresServer
from tests.router.usage_events.test_sender import Collector
from tests.valkey_server import ValkeyServer

NEXT = MODEL.replace("seed=1", "seed=2")
# Values that replace the source of a model (hub, bucket or volume) with the hash model.
_NO_FILES = {"hub": None, "bucket": None, "volume": None, "hash": MODEL}
_ON_CPU = {"device": "cpu", "replicas": 2, "resources": {"limits": {"memory": "1Gi"}}, "drainSeconds": 5}
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
# Maximum time in seconds until routers know a new key, and interval of looks.
_KEY_S, _LOOK_S = 30.0, 0.1
Values = Mapping[str, Any]
Say = Callable[[str], None]


def merged(values: Values, changes: Values) -> dict[str, Any]:
    """Return values with changes; None removes one, which Helm does with those of the chart alone."""
    result = dict(values)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = merged(result.get(name) or {}, value)
        else:
            result[name] = value
    return result


@dataclass
class Installed:
    """A release with its credentials; `values` are those beside an example's."""

    directory: Path
    example: str
    values: Values
    cluster: Cluster
    kube: KubernetesApi

    def rendered(self, **changes: Any) -> list[Manifest]:
        """Render the release with further values."""
        example = yaml.safe_load((CHART / "examples" / f"{self.example}.yaml").read_text())
        path = self.directory / "values.yaml"
        path.write_text(yaml.safe_dump(merged(merged(example, self.values), changes)))
        return render(path)

    async def upgrade(self, **changes: Any) -> None:
        """Do as `helm upgrade` does, with these values beside."""
        await self.cluster.apply(self.rendered(**changes))

    @property
    def tls(self) -> Tls:
        """Return the authority as clients take it."""
        path = self.directory / "ca.pem"
        path.write_bytes(self.cluster.ca.pem)
        return Tls(path)

    async def tenant_key(self) -> str:
        """Make a key of the tenant acme, as an operator does; return it."""
        teams = {"tenants": {"acme": {"keys": {"ci": {"scopes": ["generate"]}}}}}
        (self.directory / "teams.yaml").write_text(yaml.safe_dump(teams))
        words = [
            "--ca",
            str(self.tls.ca),
            "--api-key-file",
            "first-operator.key",
            "tenants",
            "apply",
            "-f",
            "teams.yaml",
        ]
        store = f"{self.cluster.address_of('lx-store')}:50062"
        command = [sys.executable, "-m", "loraplex", *words, "--store", store]
        await asyncio.to_thread(subprocess.run, command, cwd=self.directory, check=True, capture_output=True)
        return (self.directory / "keys" / "acme-ci.key").read_text().strip()

    async def client(self) -> AsyncClient:
        """Return a tenant's client of the routers, once all of them know its key, which takes a second."""
        key = await self.tenant_key()
        async with asyncio.timeout(_KEY_S):
            for address in self.cluster.routers.split(","):
                async with AsyncClient(address, api_key=key, tls=self.tls) as client:
                    while not await _is_known(client):  # noqa: ASYNC110  # routers hear of it by looks of their own
                        await asyncio.sleep(_LOOK_S)
        return AsyncClient(self.cluster.routers, api_key=key, tls=self.tls)


async def _is_known(client: AsyncClient) -> bool:
    try:
        await client.models()
    except UnauthenticatedError:
        return False
    return True


@asynccontextmanager
async def installed(
    directory: Path,
    example: str,
    values: Values,
    secrets: Mapping[str, Mapping[str, bytes]] | None = None,
    parts: Sequence[str] = (),
) -> AsyncIterator[Installed]:
    """Install an example with further values, as an operator who has made the Secrets of the page.

    `parts`: those whose certificates are in Secrets of the operator's, PART-tls.
    """
    make_first_key(directory / "first-operator.key")
    keys = {
        "job.key": new_job_key().encode(),
        "first-operator.key": (directory / "first-operator.key").read_bytes(),
    }
    users = {role: f"secret-of-{role}".encode() for role in ("router", "worker", "operator")}
    given = {"loraplex-keys": keys, "other-keys": keys, "loraplex-redis-users": users, **(secrets or {})}
    async with KubernetesApi() as kube:
        cluster = Cluster(directory, given, kube)
        release = Installed(directory, example, values, cluster, kube)
        for part in parts:
            names = [f"lx-{part}.llm.svc", f"*.lx-{part}s.llm.svc"]
            cluster.issue({"secretName": f"{part}-tls", "uris": [f"loraplex://{part}/lx"], "dnsNames": names})
        try:
            await release.upgrade()
            yield release
            assert {code for _, code in cluster.ended} <= {0}, cluster.ended
        finally:
            await cluster.close()


def bucket_values(url: str) -> Values:
    """Return the values of the kind of GPUs, whose buckets are at a URL."""
    source = {"prefix": "s3://acme/adapters", "endpoint": url, "allow_private": True, "credentials": "acme"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in source.items()]
    secrets = ['access_key_id_env = "AWS_ACCESS_KEY_ID"', 'secret_access_key_env = "AWS_SECRET_ACCESS_KEY"']
    env = {**_CREDENTIALS, "AWS_ENDPOINT": url}
    return {
        "models": {"qwen": _NO_FILES},
        "workers": {"h100": _ON_CPU},
        "store": {
            "bucket": "s3://acme/store",
            "env": [{"name": name, "value": value} for name, value in env.items()],
            "envFrom": [],
            "sources": "\n".join(["[[source]]", *lines, "[credentials.acme]", *secrets]),
        },
        "operator": {"namespaces": {"llm": [], "assistants": None}},
    }


async def rehearse_operations(directory: Path, streams: int, say: Say) -> None:
    """Import an adapter by its object, upgrade three times under streams, lose a router while its collector is away."""
    collector = Collector()
    collector.start()
    (directory / "bucket").mkdir()
    with seaweed(directory / "bucket") as url:
        put_files(bucket_of(url), "adapters/support", files_of(1))
        values = {**bucket_values(url), "router": {"usageUrl": collector.url}}
        async with installed(directory, "gpu", values) as release:
            digest = await _import_adapter(release)
            say("an adapter's object: imported from the bucket, and live")
            load = Streams(await release.client(), streams // 2)
            adapted = Streams(await release.client(), streams // 2, adapter="support", digest=digest)
            changes: tuple[dict[str, Any], ...] = (
                {"image": {"tag": "next"}, "router": {"podAnnotations": {"company/change": "1"}}},
                {"store": {"disk": "90Gi"}, "redis": {"disk": "9Gi"}, "workers": {"h100": {"args": ["--rows=16"]}}},
                {"credentials": {"secret": {"name": "other-keys"}}, "podSecurity": {"runAsUser": 20001}},
            )
            for number, change in enumerate(changes, 1):
                await adapted.during(load.during(release.upgrade(**change)))
                say(f"upgrade {number}: {load.answers + adapted.answers} answers, 0 failed")
            collector.stop()
            await adapted.during(load.during(release.cluster.delete("lx-router")))
            await asyncio.gather(load.end(), adapted.end())
            say(
                f"a router's pod is deleted with its collector away: {load.answers + adapted.answers} answers, 0 failed"
            )
            collector.start()
            asked = load.requests | adapted.requests
            await asyncio.to_thread(collector.wait_requests, asked)
            say(f"the collector is back: it has the events of {len(asked)} requests; 0 lost")
    collector.stop()


async def _import_adapter(release: Installed) -> str:
    """Apply a LoraAdapter, and wait until it is live; return its digest."""
    await release.tenant_key()  # which makes the tenant known
    release.kube.apply("LoraAdapter", "support", tenant="acme", base="qwen", source="s3://acme/adapters/support")

    def status() -> Any:
        return (release.kube.get("support") or {}).get("status", {})

    await release.kube.until(lambda: status().get("state") == "Live", "the adapter is not live")
    return str(status()["digest"])


async def rehearse_rollout(directory: Path, streams: int, say: Say) -> None:
    """Roll out a revision of one of two bases under streams: staged, promoted by its object, the former taken away."""
    revisions = {"int8": {**_NO_FILES, "hash": NEXT, "quantize": None, "kvCacheDtype": None}}
    digest = read_base_model(NEXT, "qwen").digest
    before = {"qwen": {**_NO_FILES, "revisions": {"int8": None}}, "llama": _NO_FILES}
    during = {"qwen": {**_NO_FILES, "revisions": revisions}}
    pools = {"qwen-cpu": _ON_CPU, "qwen-int8": None, "llama-gpu": {**_ON_CPU, "scaled": False, "replicas": 1}}
    values = {"models": before, "workers": pools, "scaler": {"enabled": False}, "credentials": {"mode": "none"}}
    async with installed(directory, "two-bases", values) as release:
        load = Streams(release.cluster.routers, streams, models=(MODEL, NEXT), name="qwen")
        staged = {"models": during, "workers": {**pools, "qwen-int8": {**_ON_CPU, "model": "qwen", "revision": "int8"}}}
        await load.during(release.upgrade(**staged))
        say(f"a revision is staged, and its workers serve: {load.answers} answers, 0 failed")
        promoted = {"models": {"qwen": {**during["qwen"], "digest": digest}}, "workers": staged["workers"]}

        async def promote() -> None:
            await release.upgrade(**promoted)
            await release.kube.until(
                lambda: (release.kube.get("qwen", "basemodels") or {}).get("status", {}).get("digest") == digest
            )

        await load.during(promote())
        say(f"it is promoted by its object: {load.answers} answers, 0 failed")
        alone = {"qwen-cpu": None, "qwen-int8": {**_ON_CPU, "model": "qwen", "revision": "int8"}}
        await load.during(release.upgrade(models=promoted["models"], workers=alone))
        say(f"the former one's workers are gone: {load.answers} answers, 0 failed")
        await load.end()


async def rehearse_restricted(directory: Path, streams: int, say: Say) -> None:
    """Run two stores on a database and a bucket, Redis elsewhere, certificates of Secrets."""
    database, collector, redis = await asyncio.to_thread(PostgresServer), Collector(), ValkeyServer(directory / "v")
    collector.start()
    await redis.start()
    redis_url = f"redis://127.0.0.1:{redis.port}".encode()
    (directory / "bucket").mkdir()
    with seaweed(directory / "bucket") as url:
        bucket_of(url)
        environment = {**_CREDENTIALS, "AWS_ENDPOINT": url}
        secrets = {
            "loraplex-redis": {"router": redis_url, "worker": redis_url},
            "redis-ca": {"ca.crt": b""},
            "catalog": {"url": database.new_database().encode()},
            "store-bucket": {name: value.encode() for name, value in environment.items()},
        }
        values = {
            "models": {"qwen": _NO_FILES},
            "store": {"bucket": "s3://acme/store"},
            "router": {"usageUrl": collector.url, "extraVolumes": [], "extraVolumeMounts": [], "env": []},
        }
        parts = ("store", "router", "worker", "edge", "batches")
        async with installed(directory, "restricted", values, secrets, parts) as release:
            load = Streams(await release.client(), streams)
            await load.during(release.cluster.delete("lx-store"))
            await load.end()
            await asyncio.to_thread(collector.wait_requests, load.requests)
            say(f"restricted: {load.answers} answers, 0 failed while a store was lost; 0 events lost")
    collector.stop()
    await redis.kill()
    await asyncio.to_thread(database.close)


async def rehearse_oidc(directory: Path, streams: int, say: Say) -> None:
    """Ask gateways over HTTPS with tokens of an issuer, all at once."""
    (directory / "jwks.json").write_text(json.dumps({"keys": KEYS}))
    rules = [{"group": "acme-staff", "role": "tenant-user", "tenant": "acme"}]
    issuer: dict[str, Any] = {
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "jwks": str(directory / "jwks.json"),
        "rules": rules,
    }
    issuer["sign_in"] = {"client_id": "page"}
    values = {"models": {"qwen": _NO_FILES}, "credentials": {"jwt": {"issuers": [issuer]}}}
    secrets = {"loraplex-sign-in": {"session.key": b"0123456789abcdef" * 4}}
    async with installed(directory, "oidc-gateway", values, secrets) as release:
        made = token(exp=time.time() + 3600, tenant=None, groups=["acme-staff"])
        bearer = {"authorization": f"Bearer {made}"}
        url = f"https://{release.cluster.address_of('lx-gateway')}/v1/completions"
        body = {"model": "qwen", "prompt": "x", "max_tokens": 4}
        async with httpx2.AsyncClient(verify=str(release.tls.ca)) as http:
            calls = (http.post(url, json=body, headers=bearer, timeout=60) for _ in range(streams))
            answers = await asyncio.gather(*calls)
            nobody = await http.post(url, json=body, timeout=60)
            offered = (await http.get(url.replace("v1/completions", "session"))).json()["issuers"]
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [4] * streams
        assert nobody.status_code == 401
        assert [one["issuer"] for one in offered] == [ISSUER], "people may sign in there"
        say(
            f"oidc-gateway: {streams} callers with tokens of the issuer have answers over HTTPS; one without is refused"
        )


def main() -> None:
    """Rehearse with the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.operating_rehearsal", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="requests that run at any time")
    streams = parser.parse_args().streams

    def say(line: str) -> None:
        print(line, flush=True)

    for part in (rehearse_operations, rehearse_rollout, rehearse_restricted, rehearse_oidc):
        with tempfile.TemporaryDirectory(prefix="lx-") as directory:
            asyncio.run(part(Path(directory), streams, say))


if __name__ == "__main__":
    main()
