"""guidellm and locust beside `loraplex loadtest`, on one cluster in turn: their figures must agree within 5%.

The cluster has the hash model, whose steps take a fixed time: so its throughput and its times to the first token are
the same for each tester, however fast the machine is.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.trials.libraries.environments import running_cluster
from tests.trials.libraries.library import ROOT

# guidellm imports torch; the version is that of constraints.txt.
GUIDELLM = ("guidellm==0.8.1", "torch==2.13.0")
LOCUST = ("locust==2.47.0", "grpcio==1.85.1", "grpcio-tools==1.85.1")
_LOCUSTFILE = ROOT / "examples/loadtest/locustfile.py"
_PROTO = "loraplex/inference/v1/inference.proto"
# A step is long beside the few milliseconds that testers, gateway and router need for a request.
_STEP_MS = 200
_MODEL = f"hash:?vocab=32000&step_ms={_STEP_MS}"
# Maximum difference of a figure from ours, relative to it.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Workload:
    """Requests of one length in a closed loop."""

    concurrency: int
    requests: int
    prompt_tokens: int = 64
    answer_tokens: int = 8


# Numbers of requests at once that the testers are compared with.
_WORKLOADS = (Workload(1, 10), Workload(8, 80))


@dataclass(frozen=True)
class Figures:
    """The figures of a tester: whole answers and their tokens by time, and the median time to the first token."""

    requests_per_s: float
    tokens_per_s: float
    ttft_ms: float


Addresses = Mapping[str, str]
Tester = Callable[[Workload, Addresses], Figures]


def _output(command: Sequence[object], directory: Path, **environ: str) -> str:
    """Run a tester in a directory and return its output. Exits where it fails."""
    words = [str(word) for word in command]
    with (directory / "tester.log").open("wb") as log:
        done = subprocess.run(
            words, cwd=directory, env=os.environ | environ, stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"error: {Path(words[0]).name} failed; see {log.name}\n{done.stdout[-2000:]}")
    return done.stdout


def ours(directory: Path, target: Sequence[str], workload: Workload) -> Figures:
    """Load a target by `loraplex loadtest`."""
    command = [
        Path(sys.executable).with_name("loraplex"), "loadtest", *target, "--json", "--out", directory / "loadtest",
        "--concurrency", workload.concurrency, "--requests", workload.requests,
        "--prompt-tokens", workload.prompt_tokens, "--answer-tokens", workload.answer_tokens,
    ]  # fmt: skip
    run = json.loads(_output(command, directory))["runs"][0]
    figures = run["figures"]
    return Figures(figures["requests_per_s"], figures["tokens_per_s"], run["times"]["ttft"]["p50"] * 1e3)


def guidellm(program: Path, directory: Path, workload: Workload, addresses: Addresses) -> Figures:
    """Load the gateway by guidellm, with prompts of a file; a letter is a token of the hash model."""
    letters, prompts, report = random.Random(1), directory / "prompts.jsonl", directory / "report.json"
    lines = [
        {"prompt": "".join(letters.choices("abcdefgh ", k=workload.prompt_tokens)),
         "output_tokens_count": workload.answer_tokens}
        for _ in range(workload.requests)
    ]  # fmt: skip
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.unlink(missing_ok=True)
    backend = f"kind=openai_http,target=http://{addresses['http']},model=hash,request_format=/v1/completions"
    command = [
        program, "run", "--disable-progress", "--backend", backend,
        "--profile", f"kind=concurrent,streams={workload.concurrency}",
        "--constraint", f"kind=max_requests,count={workload.requests}",
        "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    _output(command, directory, HF_HUB_OFFLINE="1", HF_HOME=str(directory / "cache"))
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    if metrics["request_totals"]["successful"] != workload.requests:
        raise SystemExit(f"error: guidellm reports {metrics['request_totals']}")
    return Figures(
        metrics["requests_per_second"]["successful"]["mean"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["time_to_first_token_ms"]["successful"]["median"],
    )


def make_stubs(interpreter: str, directory: Path) -> Path:
    """Make the stubs of the proto as docs/guides/loadtest.md says; returns their directory."""
    stubs = directory / "stubs"
    stubs.mkdir(exist_ok=True)
    protoc = [interpreter, "-m", "grpc_tools.protoc", "-I", ROOT / "protos"]
    _output([*protoc, f"--python_out={stubs}", f"--grpc_python_out={stubs}", _PROTO], directory)
    return stubs


def locust(program: Path, stubs: Path, workload: Workload, addresses: Addresses) -> Figures:
    """Load the router by locust over gRPC, whose user prints a line of figures at the end."""
    users = workload.concurrency
    command = [
        program, "-f", _LOCUSTFILE, "--headless", "--only-summary", "--host", addresses["router"],
        "--users", users, "--spawn-rate", users, "--requests", workload.requests,
        "--prompt-tokens", workload.prompt_tokens, "--answer-tokens", workload.answer_tokens,
    ]  # fmt: skip
    printed = _output(command, stubs.parent, PYTHONPATH=str(stubs))
    figures = re.search(r"(\S+) answers/s, (\S+) tokens/s, first token after (\S+) ms", printed)
    if figures is None:
        raise SystemExit(f"error: locust has no figures:\n{printed}")
    return Figures(*map(float, figures.groups()))


async def compare_guidellm(interpreter: str, directory: Path, _questions: int) -> bool:
    """Compare guidellm with `loraplex loadtest --url`; print a table, tell whether they agree."""
    program = Path(interpreter).with_name("guidellm")
    return await _compare(
        "guidellm",
        lambda workload, addresses: guidellm(program, directory, workload, addresses),
        lambda workload, addresses: ours(directory, ("--url", f"http://{addresses['http']}"), workload),
    )


async def compare_locust(interpreter: str, directory: Path, _questions: int) -> bool:
    """Compare locust with `loraplex loadtest --router`; print a table, tell whether they agree."""
    program, stubs = Path(interpreter).with_name("locust"), make_stubs(interpreter, directory)
    return await _compare(
        "locust",
        lambda workload, addresses: locust(program, stubs, workload, addresses),
        lambda workload, addresses: ours(directory, ("--router", addresses["router"]), workload),
    )


async def _compare(name: str, theirs: Tester, own: Tester) -> bool:
    row, agree = "{:>9}  {:26}  {:>9}  {:>9}  {:>10}", True
    print(row.format("at a time", "figure", name, "loraplex", "difference"), flush=True)
    labels = ("requests/s", "output tokens/s", "time to first token, ms")
    async with running_cluster("--model", _MODEL) as addresses:
        for workload in _WORKLOADS:
            pairs = zip(labels, astuple(theirs(workload, addresses)), astuple(own(workload, addresses)), strict=True)
            for label, their, our in pairs:
                difference = their / our - 1
                agree = agree and abs(difference) <= _TOLERANCE
                values = (f"{their:.2f}", f"{our:.2f}", f"{difference:+.1%}")
                print(row.format(workload.concurrency, label, *values), flush=True)
    return agree
