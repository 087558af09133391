"""The way of one request through the code: `python -m bench.request_trace [--files] [--json FILE]`.

A cluster of one router and one worker serves examples/model. One `Generate` with an adapter that the worker does not
have yet is traced in every process: files and functions of the project that run, without those that run as often while
no request comes; and forms, the classes of the objects that have the request's seed, prompt or ids, or ids of the
answer, in a field. sys.setprofile records them, because sys.monitoring is of Python 3.12.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.local_cluster import serving_cluster
from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex_client import AsyncClient, AsyncStoreClient

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapter_store", "clients", "loraplex", "router", "worker")
TENANT, ADAPTER = "acme", "shout"
PROMPT, TOKENS, SEED = "Return a list of", 12, 918_273_645
# Seconds of a window without a request, and number of such windows.
IDLE_S, IDLE_WINDOWS = 6.0, 3
# The client, which is traced in a process of its own: it connects, and asks when it is told to.
CLIENT = f"""
import sys
from loraplex_client import Client
with Client(sys.argv[1], {TENANT!r}) as client:
    sys.stdin.readline()
    client.generate({PROMPT!r}, adapter_id={ADAPTER!r}, max_tokens={TOKENS}, temperature=0.0, seed={SEED})
    print("answered", flush=True)
    sys.stdin.readline()
"""


@dataclass(frozen=True)
class Process:
    """Keeps what one process ran for the request: calls by `file:function`, and where each form was seen first."""

    name: str
    calls: Mapping[str, int]
    forms: Mapping[str, str]

    @property
    def files(self) -> set[str]:
        """Return the files of the functions."""
        return {function.partition(":")[0] for function in self.calls}


def main() -> None:
    """Trace a request and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.request_trace", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list files and forms too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what ran there")
    arguments = parser.parse_args()
    processes = asyncio.run(trace())
    print(table(processes, lists_files=arguments.files))
    if arguments.json:
        ran = {one.name: {"calls": dict(one.calls), "forms": dict(one.forms)} for one in processes}
        arguments.json.write_text(json.dumps(ran, indent=2) + "\n")


def table(processes: Sequence[Process], *, lists_files: bool = False) -> str:
    """Return the numbers by process; with `lists_files` also the files and the forms."""
    rows = [(one.name, len(one.files), len(one.calls), len(one.forms)) for one in processes]
    calls, forms = {call for one in processes for call in one.calls}, {form for one in processes for form in one.forms}
    rows.append(("all", len({call.partition(":")[0] for call in calls}), len(calls), len(forms)))
    lines = [f"{'process':<16}{'files':>8}{'functions':>12}{'forms':>8}"]
    lines += [f"{name:<16}{files:>8}{functions:>12}{forms:>8}" for name, files, functions, forms in rows]
    for one in processes if lists_files else ():
        lines += ["", f"{one.name}: files", *(f"  {file}" for file in sorted(one.files))]
        lines += [f"{one.name}: forms", *(f"  {form}  {function}" for form, function in one.forms.items())]
    return "\n".join(lines)


async def trace() -> list[Process]:
    """Trace the request, after a cluster that tells the ids of its prompt and its answer."""
    async with _cluster() as cluster, AsyncClient(cluster.router, TENANT) as client:
        await _push(cluster)
        answer = await client.generate(PROMPT, adapter_id=ADAPTER, max_tokens=TOKENS, temperature=0.0, seed=SEED)
        ids = {"prompt_ids": list(await client.tokenize(PROMPT)), "answer_ids": list(answer.token_ids)}
    settings = {"root": str(ROOT), "packages": PACKAGES, "seed": SEED, "prompt": PROMPT} | ids
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        os.environ["PYTHONPATH"] = str(Path(__file__).parent / "traced")
        os.environ["LORAPLEX_TRACE"] = folder
        os.environ["LORAPLEX_TRACE_SETTINGS"] = json.dumps(settings)
        async with _cluster() as cluster:
            await _push(cluster)
            dumps = await _traced_request(cluster, Path(folder))
    processes = [_process(dump) for dump in dumps]
    return sorted((one for one in processes if one.calls), key=lambda one: one.name)


def _cluster() -> Any:
    return serving_cluster(ClusterSettings(model=str(ROOT / "examples" / "model"), port=0, store_port=0))


async def _push(cluster: LocalCluster) -> None:
    async with AsyncStoreClient(cluster.store, TENANT) as store:
        await store.push(ROOT / "examples" / "adapters" / TENANT / ADAPTER, ADAPTER)


async def _traced_request(cluster: LocalCluster, folder: Path) -> list[dict[str, Any]]:
    """Let a client ask after windows without a request; return what each process recorded."""
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, cluster.router, stdin=pipe, stdout=pipe)
    assert client.stdin is not None
    assert client.stdout is not None
    for number in range(IDLE_WINDOWS):
        _tell(folder, f"window {number}")
        await asyncio.sleep(IDLE_S)
    _tell(folder, "window request")
    client.stdin.write(b"\n")
    await client.stdout.readline()
    await asyncio.sleep(IDLE_S / 2)  # the request's last steps come after its answer
    dumps = [json.loads(answer) for answer in _tell(folder, "dump")]
    client.stdin.write(b"\n")
    await client.wait()
    return dumps


def _tell(folder: Path, command: str) -> list[bytes]:
    """Send a command to each traced process that lives; return the answers."""
    answers = []
    for path in folder.iterdir():
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                continue
            connection.sendall(command.encode())
            with connection.makefile("rb") as answer:
                answers.append(answer.read())
    return answers


def _process(dump: Mapping[str, Any]) -> Process:
    """Return what a process ran, without what it runs as often while no request comes."""
    idle = Counter[str]()
    for window in range(IDLE_WINDOWS):
        idle |= Counter(dump["windows"].get(str(window), {}))
    calls = {call: count for call, count in dump["windows"].get("request", {}).items() if count > idle[call]}
    program = str(Path(dump["argv"][0]).relative_to(ROOT)) if dump["argv"][0].startswith(str(ROOT)) else "client"
    program = program.removesuffix("/__main__.py").removesuffix(".py")
    program = dump["argv"][1] if program == "loraplex" else program
    return Process(program.rpartition("loraplex/")[2].removeprefix("worker/"), calls, dump["forms"])


if __name__ == "__main__":
    main()
