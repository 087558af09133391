"""Runs the pods of rendered objects as processes of this machine.

Each pod gets an address of its own (127.x); its containers' commands run with their flags, variables, files, probes,
preStop and grace. An emptyDir is gone with its pod, a claim stays. Secrets are the objects', the caller's, and those of
Certificates, which an authority issues as cert-manager does. Services are proxies to the ready pods, as kube-proxy is.
Names of services and pods are replaced by their addresses, since there is no name server; certificates are for both.
Rollouts go in the order that Kubernetes keeps.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from loraplex.cli import valkey
from loraplex.cli.development_ca import DevelopmentCa
from loraplex.runtime.rpc.children.process import Process
from tests.clients.operator.kubernetes_api import KubernetesApi
from tests.debian_program import debian_program
from tests.deploy.kubernetes_tools import Manifest

# Interval in seconds of the probes and of looks at a rollout; Kubernetes' own are seconds.
_LOOK_S = 0.1
# Pause in seconds before a container that ended is started again.
_RESTART_S = 0.5
# Maximum time in seconds until a pod is ready.
_READY_S = 120.0
# Maximum time in seconds until a pool has the scaler's number of pods: it holds a higher one for five minutes.
_SCALED_S = 500.0
_COMPONENT = "app.kubernetes.io/component"


@dataclass(eq=False)
class Pod:
    """A pod: its container's process, which is started again when it ends, until the pod is terminated."""

    name: str
    address: str
    labels: dict[str, str]
    spec: Manifest
    # Makes the command and the environment of a container of the pod.
    command: Callable[[Pod, Manifest], tuple[list[str], dict[str, str]]]
    logs: Path
    # Its emptyDirs and Secrets.
    folder: Path
    # Set whenever `ready` or `restarts` changes; shared by all pods.
    changed: asyncio.Event
    ready: bool = False
    restarts: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    process: Process | None = None
    _terminating: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def container(self) -> Manifest:
        """Return the container that runs."""
        container: Manifest = self.spec["containers"][0]
        return container

    def start(self) -> None:
        """Run the container, and probe it."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._probe())]

    async def _initialize(self) -> None:
        """Run the init containers, but for those that download models: there are none here."""
        for container in self.spec.get("initContainers", []):
            code = None
            while container["name"] != "download" and code != 0:
                argv, environ = self.command(self, container)
                log_path = self.logs / f"{self.name}-{container['name']}.log"
                self.process = await Process.start(self.name, argv, log_path=log_path, environ=environ)
                code = await asyncio.shield(self.process.exited)
                await self.process.kill()

    async def _run(self) -> None:
        await self._initialize()
        while not self._terminating:
            argv, environ = self.command(self, self.container)
            log_path = self.logs / f"{self.name}-{self.restarts}.log"
            self.process = await Process.start(self.name, argv, log_path=log_path, environ=environ)
            code = await asyncio.shield(self.process.exited)
            await self.process.kill()
            if code == 0 and self.spec.get("restartPolicy") == "OnFailure":
                self.done.set()
                return
            if not self._terminating:
                self.ready = False
                self.restarts += 1
                self.changed.set()
                await asyncio.sleep(_RESTART_S)

    async def _probe(self) -> None:
        """Set `ready` as the readiness probe says, once the startup probe has succeeded since the last start."""
        started_of = -1
        while not self._terminating and "readinessProbe" in self.container:
            if started_of != self.restarts and await self._succeeds("startupProbe"):
                started_of = self.restarts
            ready = started_of == self.restarts and await self._succeeds("readinessProbe")
            if ready != self.ready and not self._terminating:
                self.ready = ready
                self.changed.set()
            await asyncio.sleep(_LOOK_S)

    async def _succeeds(self, kind: str) -> bool:
        probe = self.container[kind]
        try:
            async with asyncio.timeout(8):
                if "exec" in probe:  # valkey-cli ping
                    async with Redis(host=self.address, port=6379, **self._probe_options()) as client:
                        return bool(await client.ping())
                return (
                    await _http_status(self.address, self.port(probe["httpGet"]["port"]), probe["httpGet"]["path"])
                    == 200
                )
        except (OSError, TimeoutError, ValueError, RedisError):
            return False

    def _probe_options(self) -> dict[str, Any]:
        if "--tls-port" not in self.container["command"]:
            return {}
        password = (self.folder / "users" / "operator" / "password").read_text().strip()
        return {"ssl": True, "ssl_cert_reqs": "none", "username": "operator", "password": password}

    def port(self, name: str) -> int:
        """Return the number of one of the container's ports."""
        (number,) = [port["containerPort"] for port in self.container["ports"] if port["name"] == name]
        return int(number)

    async def terminate(self) -> int | None:
        """Stop the pod as Kubernetes does: no new connections, preStop, SIGTERM, SIGKILL; returns the exit status."""
        self._terminating, self.ready = True, False
        hook = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        await asyncio.sleep(hook)
        code = None
        if self.process is not None:
            await self.process.stop(self.spec.get("terminationGracePeriodSeconds", 30) - hook)
            code = self.process.exited.result()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        return code

    async def kill(self) -> None:
        """Kill the container; it is started again."""
        assert self.process is not None
        await self.process.kill()


def for_redis_7(arguments: Sequence[str]) -> list[str]:
    """Return a server's flags without the one that Redis 7.0 does not know, and its value."""
    at = list(arguments).index("--tls-auto-reload-interval")
    return [*arguments[:at], *arguments[at + 2 :]]


async def _http_status(host: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()


class Cluster:
    """The objects that were applied last, and the pods that run for them."""

    def __init__(
        self,
        directory: Path,
        given: Mapping[str, Mapping[str, bytes]] | None = None,
        kube: KubernetesApi | None = None,
        namespace: str = "llm",
    ) -> None:
        """Take Secrets that are there before the chart, and the API whose objects an operator follows."""
        self._directory, self._kube, self._namespace = directory, kube, namespace
        # Contents of Secrets and ConfigMaps.
        self._files: dict[tuple[str, str], Mapping[str, bytes]] = {
            ("Secret", name): content for name, content in (given or {}).items()
        }
        self.ca = DevelopmentCa()
        # A network of its own, so that two rehearsals beside each other do not meet.
        self._network = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        self._addresses: dict[str, str] = {}
        self._workloads: dict[str, Manifest] = {}
        self._services: dict[str, Manifest] = {}
        self._proxies: list[asyncio.Server] = []
        self._jobs: dict[str, Pod] = {}
        self._changed = asyncio.Event()
        self.pods: dict[str, list[Pod]] = {}
        # Exit statuses of terminated pods, by component.
        self.ended: Counter[tuple[str, int | None]] = Counter()

    def address_of(self, name: str) -> str:
        """Return the address of a service or of a pod of a StatefulSet."""
        if name not in self._addresses:
            self._addresses[name] = f"{self._network}.{len(self._addresses) + 2}"
        return self._addresses[name]

    @property
    def routers(self) -> str:
        """Return the routers' addresses, as clients take them."""
        return ",".join(f"{pod.address}:{pod.port('grpc')}" for pod in self.pods["lx-router"])

    async def apply(self, manifests: Sequence[Manifest]) -> None:
        """Make the pods as the objects say: all at once where there were none, else one after the other."""
        for manifest in manifests:
            name = manifest["metadata"]["name"]
            if manifest["kind"] == "Service" and name not in self._services:
                self._services[name] = manifest
                await self._serve(manifest)
            elif manifest["kind"] in {"Secret", "ConfigMap"}:
                data: dict[str, str] = manifest.get("stringData") or manifest.get("data") or {}
                self._files[manifest["kind"], name] = {key: text.encode() for key, text in data.items()}
            elif manifest["kind"] == "Certificate":
                self.issue(manifest["spec"])
            elif manifest["kind"] in {"BaseModel", "LoraAdapter"} and self._kube is not None:
                self._kube.apply(manifest["kind"], name, self._namespace, **manifest["spec"])
        workloads = [one for one in manifests if one["kind"] in {"Deployment", "StatefulSet"}]
        for job in (one for one in manifests if one["kind"] == "Job"):
            if job["metadata"]["name"] not in self._jobs:
                self._jobs[job["metadata"]["name"]] = self._start(job, job["metadata"]["name"])
        await asyncio.gather(*(self._roll_out(workload) for workload in workloads))
        for gone in self.pods.keys() - {one["metadata"]["name"] for one in workloads}:
            await self.scale(gone, 0)
            del self.pods[gone], self._workloads[gone]
        await asyncio.gather(*(job.done.wait() for job in self._jobs.values()))

    async def kill(self, *names: str) -> None:
        """Kill the containers of workloads' first pods at once; wait until all have started again and are ready."""
        killed = {pod: pod.restarts for pod in (self.pods[name][0] for name in names)}
        await asyncio.gather(*(pod.kill() for pod in killed))
        await self._until(lambda: all(pod.restarts > before and pod.ready for pod, before in killed.items()))

    async def delete(self, name: str) -> None:
        """Delete a workload's first pod, as `kubectl delete pod` does; wait until another one is ready."""
        workload, pods = self._workloads[name], self.pods[name]
        await self._end(old := pods[0])
        pods[0] = self._start(workload, old.name if workload["kind"] == "StatefulSet" else "")
        await self._until_ready(pods)

    async def scale(self, name: str, replicas: int) -> None:
        """Set the number of a workload's pods."""
        workload = self._workloads[name]
        await self._roll_out({**workload, "spec": {**workload["spec"], "replicas": replicas}})

    async def _roll_out(self, workload: Manifest) -> None:
        name, spec = workload["metadata"]["name"], workload["spec"]
        pods = self.pods.setdefault(name, [])
        changed = self._workloads.get(name, workload)["spec"]["template"] != spec["template"]
        self._workloads[name] = workload
        stateful = workload["kind"] == "StatefulSet"
        if changed:
            surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
            for old in list(reversed(pods)) if stateful else list(pods):
                if surge and not stateful:
                    new = self._start(workload)
                    pods.append(new)
                    await self._until_ready([new])
                    await self._end(old)
                    pods.remove(old)
                else:
                    await self._end(old)
                    new = self._start(workload, old.name if stateful else "")
                    pods[pods.index(old)] = new
                    await self._until_ready([new])
                    await asyncio.sleep(spec.get("minReadySeconds", 0))
        # Without a number an autoscaler's stays as it is; a new workload gets one pod.
        replicas = spec.get("replicas", len(pods) or 1)
        while len(pods) < replicas:
            pods.append(self._start(workload, f"{name}-{len(pods)}" if stateful else ""))
            if stateful and spec.get("podManagementPolicy") != "Parallel":
                await self._until_ready(pods)
        surplus = pods[replicas:]
        del pods[replicas:]
        await asyncio.gather(*(self._end(pod) for pod in surplus))
        await self._until_ready(pods)
        self._changed.set()

    async def _end(self, pod: Pod) -> None:
        self.ended[pod.labels[_COMPONENT], await pod.terminate()] += 1

    async def until_pods(self, name: str, count: int) -> None:
        """Wait until a workload that another task scales has so many pods, and all are ready."""
        pods = self.pods[name]
        await self._until(lambda: len(pods) == count and all(pod.ready for pod in pods), _SCALED_S)

    async def _until_ready(self, pods: Sequence[Pod]) -> None:
        await self._until(lambda: all(pod.ready for pod in pods))

    async def _until(self, reached: Callable[[], bool], timeout_s: float = _READY_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not reached():
                self._changed.clear()
                await self._changed.wait()

    def _start(self, workload: Manifest, name: str = "") -> Pod:
        template = workload["spec"]["template"]
        name = name or f"{workload['metadata']['name']}-{secrets.token_hex(3)}"
        pod = Pod(
            name,
            self.address_of(name),
            template["metadata"]["labels"],
            template["spec"],
            self._command,
            self._directory,
            self._directory / "pods" / f"{name}-{secrets.token_hex(3)}",
            self._changed,
        )
        pod.start()
        return pod

    def issue(self, spec: Manifest) -> None:
        """Make a Certificate's Secret, once."""
        if ("Secret", spec["secretName"]) in self._files:
            return
        hosts = [*spec["dnsNames"], *(f"{self._network}.{number}" for number in range(2, 255))]
        certificate, key = self.ca.issue(spec.get("uris", [f"loraplex://other/{self._namespace}"])[0], hosts)
        files = {"tls.crt": certificate, "tls.key": key, "ca.crt": self.ca.pem}
        self._files["Secret", spec["secretName"]] = files

    def _command(self, pod: Pod, container: Manifest) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment of a container, with addresses and folders of this machine."""
        folders = self._folders(pod, container)
        # With no folder at all the pattern matches nothing.
        paths = "|".join(re.escape(path) for path in sorted(folders, key=len, reverse=True)) or r"(?!)"
        mounted = re.compile(rf"(?<![\w/.-])({paths})(?![\w.-])")

        def here(word: str) -> str:
            word = word.replace("$(POD_NAME)", pod.name).replace("0.0.0.0", pod.address)
            return mounted.sub(lambda match: str(folders[match[1]]), self._with_addresses(word))

        variables = {one["name"]: self._value(one, pod) for one in container.get("env", [])}
        for source in container.get("envFrom", []):
            content = self._files["Secret", source["secretRef"]["name"]]
            variables |= {key: value.decode() for key, value in content.items()}
        program, *arguments = [here(str(word)) for word in container["command"]]
        bin_folder = Path(sys.executable).parent
        if program == "valkey-server" and "--tls-port" in arguments:
            # The wheel's Valkey has no TLS.
            argv = [debian_program("redis-server"), *for_redis_7(arguments), "--bind", pod.address]
        elif program == "valkey-server":
            argv = [valkey.command(pod.folder)[0], *arguments, "--bind", pod.address]
        elif program == "haproxy":
            argv = [debian_program(program), *arguments]
        else:
            argv = [program if program == "sh" else str(bin_folder / program), *arguments]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
        environ["PATH"] = f"{bin_folder}:{os.environ['PATH']}"
        if pod.labels[_COMPONENT] == "edge":
            environ["HAPROXY"] = debian_program("haproxy")
        if pod.spec["automountServiceAccountToken"] and self._kube is not None:
            environ["KUBECONFIG"] = str(self._kube.write_kubeconfig(pod.folder / "kubeconfig"))
        # The proxy checks names in certificates: these stay.
        return argv, environ | {
            key: value if key.endswith("_NAME") else here(value) for key, value in variables.items()
        }

    def _folders(self, pod: Pod, container: Manifest) -> dict[str, Path]:
        """Return a container's mounted folders by their paths, with the files of Secrets and ConfigMaps."""
        pod.folder.mkdir(parents=True, exist_ok=True)
        volumes, folders = {one["name"]: one for one in pod.spec.get("volumes", [])}, {}
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] == "/tmp":  # the machine's own
                continue
            volume = volumes[mount["name"]]
            folder = pod.folder / mount["name"]
            if "persistentVolumeClaim" in volume:
                folder = self._directory / "claims" / volume["persistentVolumeClaim"]["claimName"]
            folder.mkdir(parents=True, exist_ok=True)
            if "secret" in volume or "configMap" in volume:
                self._write_files(volume, folder)
            folders[mount["mountPath"]] = folder
        return folders

    def _write_files(self, volume: Manifest, folder: Path) -> None:
        source = volume.get("secret") or volume["configMap"]
        kind, name = ("Secret", source["secretName"]) if "secret" in volume else ("ConfigMap", source["name"])
        content = self._files[kind, name]
        for item in source.get("items") or [{"key": key, "path": key} for key in content]:
            (folder / item["path"]).parent.mkdir(exist_ok=True)
            (folder / item["path"]).write_bytes(content[item["key"]])

    def _value(self, variable: Manifest, pod: Pod) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            secret = source["secretKeyRef"]
            return self._files["Secret", secret["name"]][secret["key"]].decode()
        return pod.name if "fieldRef" in source else str(variable["value"])

    def _with_addresses(self, word: str) -> str:
        """Replace the names of pods and services in a flag or URL by their addresses."""
        for name in sorted(self._services, key=len, reverse=True):
            suffix = rf"(?:\.{self._namespace}\.svc(?:\.cluster\.local)?)?(?=[:,/]|$)"
            if self._services[name]["spec"].get("clusterIP") == "None":
                word = re.sub(rf"([\w-]+)\.{name}{suffix}", lambda match: self.address_of(match[1]), word)
            else:
                word = re.sub(rf"(?<![\w.-]){name}{suffix}", self.address_of(name), word)
        return word

    async def _serve(self, service: Manifest) -> None:
        """Listen on a service's address, and forward each connection to one of the ready pods in turn."""
        spec = service["spec"]
        if spec.get("clusterIP") == "None":
            return
        address, turn = self.address_of(service["metadata"]["name"]), [0]

        async def forward(port: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pods = [pod for pod in self._all_pods() if pod.ready and spec["selector"].items() <= pod.labels.items()]
            if not pods:
                writer.close()
                return
            turn[0] += 1
            pod = pods[turn[0] % len(pods)]
            try:
                there, to = await asyncio.open_connection(pod.address, pod.port(port))
            except OSError:
                writer.close()
                return
            await asyncio.gather(_copy(reader, to), _copy(there, writer))

        for port in spec["ports"]:

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = port["targetPort"]
            ) -> None:
                await forward(name, reader, writer)

            self._proxies.append(await asyncio.start_server(accept, address, port["port"]))

    def _all_pods(self) -> Iterator[Pod]:
        return (pod for pods in self.pods.values() for pod in pods)

    async def close(self) -> None:
        """End all pods at once."""
        for proxy in self._proxies:
            proxy.close()
        for pod in [*self._all_pods(), *self._jobs.values()]:
            if pod.process is not None:
                pod.process.send_signal(signal.SIGKILL, group=True)
            await pod.terminate()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
