"""Runs what the chart renders as processes of this machine: `python -m tests.deploy.rehearsal [--streams N]`.

Each pod gets an address of its own (127.x), and its container's command runs with its flags, variables, files, probes,
preStop and grace. Services are proxies to the ready pods, as kube-proxy is; names of services and pods are replaced by
their addresses, since there is no name server. Rollouts go in the order that Kubernetes keeps. Without TLS, because
certificates name hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from loraplex.cli import valkey
from loraplex.contracts.options import StoppingParams
from loraplex.runtime.rpc.children.process import Process
from loraplex_client import AsyncClient
from tests.debian_program import debian_program
from tests.deploy.kubernetes_tools import ROOT, Manifest, render
from tests.hash_oracle import expected_ids
from tests.valkey_cluster import ReplicatedCluster
from tests.valkey_sentinel import WatchedValkeys

# Interval in seconds of the probes and of looks at a rollout; Kubernetes' own are seconds.
_LOOK_S = 0.1
# Pause in seconds before a container that ended is started again.
_RESTART_S = 0.5
# Maximum time in seconds until a pod is ready.
_READY_S = 120.0
# Maximum time in seconds until a pool has the scaler's number of pods: it holds a higher one for five minutes.
_SCALED_S = 500.0
_COMPONENT = "app.kubernetes.io/component"
# The model of the example `laptop`.
MODEL = "hash:?vocab=32000&step_ms=5&seed=1&end_after=0"
# Settings of a chart whose Redis is elsewhere, at the URL that a Secret has.
_OWN_REDIS = ("router.replicas=2", "redis.embedded=false", "redis.urlSecret.name=redis", "gateway.enabled=false")
# The workloads of which a pod is killed.
_KILLED = ("lx-router", "lx-worker-cpu", "lx-store", "lx-valkey")


@dataclass(eq=False)
class Pod:
    """A pod: its container's process, which is started again when it ends, until the pod is terminated."""

    name: str
    address: str
    labels: dict[str, str]
    spec: Manifest
    # Makes the command and the environment of the pod's first container.
    command: Callable[[Pod], tuple[list[str], dict[str, str]]]
    logs: Path
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
        """Return the container that runs; init containers download models, and there are none here."""
        container: Manifest = self.spec["containers"][0]
        return container

    def start(self) -> None:
        """Run the container, and probe it."""
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._probe())]

    async def _run(self) -> None:
        while not self._terminating:
            argv, environ = self.command(self)
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
                    async with Redis(host=self.address, port=6379) as client:
                        return bool(await client.ping())
                return (
                    await _http_status(self.address, self.port(probe["httpGet"]["port"]), probe["httpGet"]["path"])
                    == 200
                )
        except (OSError, TimeoutError, ValueError):
            return False

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
        return code

    async def kill(self) -> None:
        """Kill the container; it is started again."""
        assert self.process is not None
        await self.process.kill()


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

    def __init__(self, directory: Path, redis_url: str = "", namespace: str = "llm") -> None:
        """Take the URL that the Secret of Redis has, where the chart runs no Valkey of its own."""
        self._directory = directory
        self._redis_url = redis_url
        self._namespace = namespace
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
        workloads = [one for one in manifests if one["kind"] in {"Deployment", "StatefulSet"}]
        for job in (one for one in manifests if one["kind"] == "Job"):
            if job["metadata"]["name"] not in self._jobs:
                self._jobs[job["metadata"]["name"]] = self._start(job, job["metadata"]["name"])
        await asyncio.gather(*(self._roll_out(workload) for workload in workloads))
        await asyncio.gather(*(job.done.wait() for job in self._jobs.values()))

    async def kill(self, *names: str) -> None:
        """Kill the containers of workloads' first pods at once; wait until all have started again and are ready."""
        killed = {pod: pod.restarts for pod in (self.pods[name][0] for name in names)}
        await asyncio.gather(*(pod.kill() for pod in killed))
        await self._until(lambda: all(pod.restarts > before and pod.ready for pod, before in killed.items()))

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
            self._changed,
        )
        pod.start()
        return pod

    def _command(self, pod: Pod) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment of a pod's container, with addresses and folders of this machine."""
        home = self._directory / pod.name
        home.mkdir(exist_ok=True)
        variables = {one["name"]: self._value(one, pod) for one in pod.container.get("env", [])}

        def here(word: str) -> str:
            word = word.replace("$(POD_NAME)", pod.name).replace("0.0.0.0", pod.address)
            word = word.replace("/var/lib/loraplex", str(home)).replace("/data", str(home))
            return self._with_addresses(word)

        program, *arguments = [here(str(word)) for word in pod.container["command"]]
        if program == "valkey-server":
            argv = [valkey.command(home)[0], *arguments, "--bind", pod.address]
        elif program == "python":
            argv = [sys.executable, *arguments]
        elif program == "haproxy":
            argv = [
                debian_program(program),
                *(word.replace("/etc/loraplex", str(ROOT / "deploy")) for word in arguments),
            ]
        else:
            argv = [str(Path(sys.executable).with_name(program)), *arguments]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
        return argv, environ | {key: here(value) for key, value in variables.items()}

    def _value(self, variable: Manifest, pod: Pod) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            return self._redis_url
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


class Streams:
    """Clients that ask one request after the other; every answer is compared with the hash model's."""

    def __init__(self, routers: str, count: int, tokens: int = 40) -> None:
        self._client = AsyncClient(routers, "acme")
        self._stop = False
        self._tokens = tokens
        self.answers = self.continued = 0
        self._answered = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop:
            turn += 1
            await self.ask(f"stream {number} turn {turn}")

    async def ask(self, prompt: str) -> None:
        """Ask once, and compare the answer."""
        answer = await self._client.generate(prompt, max_tokens=self._tokens)
        stopping = StoppingParams(max_tokens=self._tokens)
        truth = list(expected_ids(MODEL, list(prompt.encode()), stopping=stopping))
        assert list(answer.token_ids) == truth, (prompt, list(answer.token_ids), truth)
        self.answers += 1
        self._answered.set()
        self.continued += answer.continuations > 0

    async def during(self, change: Any) -> None:
        """Await a change of the cluster, and as many more answers as there are streams. Raises what a stream got."""
        done, _ = await asyncio.wait(
            {changing := asyncio.create_task(change), *self._tasks}, return_when="FIRST_COMPLETED"
        )
        for task in done:
            task.result()
        await changing
        target = self.answers + len(self._tasks)
        while self.answers < target:
            self._answered.clear()
            answered = asyncio.create_task(self._answered.wait())
            done, _ = await asyncio.wait({answered, *self._tasks}, return_when="FIRST_COMPLETED")
            for task in done - {answered}:
                task.result()
            answered.cancel()

    async def end(self) -> None:
        """Let the last answers end."""
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._client.close()


async def rehearse(directory: Path, streams: int, say: Callable[[str], None]) -> None:
    """Install the chart, and under load roll out every part, scale the workers, and kill parts. Raises on any fault."""
    sizes = ("router.replicas=2", "workers.cpu.replicas=2")
    cluster = Cluster(directory)
    try:
        await cluster.apply(render("laptop", sizes))
        say(f"installed: {sum(map(len, cluster.pods.values()))} pods are ready")
        await _change(
            cluster,
            Streams(cluster.routers, streams),
            say,
            {
                "a new version of every part": lambda: cluster.apply(render("laptop", (*sizes, "image.tag=next"))),
                "workers from 2 to 6": lambda: cluster.scale("lx-worker-cpu", 6),
                "workers from 6 to 2": lambda: cluster.scale("lx-worker-cpu", 2),
                **{f"{name} is killed": partial(cluster.kill, name) for name in _KILLED},
                "a node is lost, with one of each": partial(cluster.kill, *_KILLED),
            },
        )
    finally:
        await cluster.close()


async def rehearse_failover(directory: Path, streams: int, say: Callable[[str], None]) -> None:
    """Install the chart with a Valkey that a sentinel watches, whose primary is lost under load."""
    async with WatchedValkeys(directory / "v") as valkeys:
        await _lose(directory, streams, say, valkeys.url, {"Sentinel fails over": valkeys.lose_primary})


async def rehearse_cluster(directory: Path, streams: int, say: Callable[[str], None]) -> None:
    """Install the chart with a Redis Cluster, each of whose primaries is lost under load, one after the other."""
    async with ReplicatedCluster(directory / "v") as valkeys:
        losses = {f"the Cluster's shard {one} fails over": partial(valkeys.lose_primary, one) for one in range(3)}
        await _lose(directory, streams, say, valkeys.url, losses)


async def _lose(
    directory: Path, streams: int, say: Callable[[str], None], url: str, losses: Mapping[str, Callable[[], Any]]
) -> None:
    cluster = Cluster(directory, url)
    try:
        await cluster.apply(render("laptop", _OWN_REDIS))
        await _change(cluster, Streams(cluster.routers, streams), say, losses)
    finally:
        await cluster.close()


async def _change(
    cluster: Cluster, load: Streams, say: Callable[[str], None], changes: Mapping[str, Callable[[], Any]]
) -> None:
    for what, change in changes.items():
        await load.during(change())
        say(f"{what}: {load.answers} answers, of which {load.continued} continued elsewhere; 0 failed")
    await load.end()
    assert {code for _, code in cluster.ended} <= {0}, cluster.ended


def main() -> None:
    """Rehearse with the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.rehearsal", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="requests that run at any time")
    streams = parser.parse_args().streams
    for part in (rehearse, rehearse_failover, rehearse_cluster):
        with tempfile.TemporaryDirectory(prefix="lx-") as directory:
            asyncio.run(part(Path(directory), streams, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
