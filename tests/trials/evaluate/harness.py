"""lm-evaluation-harness against the gateway and with its own `hf` backend: scores and samples must be the same."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.real import ADAPTERS, real_model
from examples.tasks import CHECK, TASKS
from tests.trials.libraries.environments import running_cluster

# The `hf` backend needs torch; the versions are those of constraints.txt.
PACKAGES = ("lm_eval[api]==0.4.13", "torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "accelerate==1.15.0")
# The files of tasks as lm-evaluation-harness reads them; `reviews` takes the texts of `sentiment`.
_TASKS = Path(__file__).parent / "tasks"
_GENERATED = ("triage", "extract")
_SCORED = ("sentiment", "reviews")
_METRICS = {"sentiment": "acc", "reviews": "word_perplexity", "triage": "exact_match", "extract": "exact_match"}
# The adapter that each task is also run with.
_ADAPTERS = {"sentiment": "sentiment", "reviews": "sentiment", "triage": "triage", "extract": "extract"}
_SEED = 1
# Maximum difference of two log probabilities of a text, relative and absolute. Both sides compute in float32, where
# torch's log_softmax of the `hf` backend rounds the sum over the vocabulary by up to 2e-5 for each token.
_RELATIVE, _ABSOLUTE = 2e-5, 1e-4


@dataclass(frozen=True)
class Backend:
    """A backend of lm-evaluation-harness: the path that it calls, "" for none, and the tasks that it can run."""

    name: str
    path: str
    tasks: Sequence[str]

    def arguments(self, url: str, model: Path, adapter: Path | None) -> list[str]:
        """Return the flags that name the model, and an adapter by its directory or that one's name."""
        if not self.path:
            arguments = {"pretrained": str(model), "dtype": "float32"}
            if adapter:
                arguments["peft"] = str(adapter)
        else:
            arguments = {"model": (adapter or model).name, "base_url": url + self.path, "num_concurrent": "8"}
            if "sentiment" in self.tasks:  # log probabilities need the prompt's length in tokens
                arguments |= {"tokenizer": str(model), "tokenizer_backend": "huggingface"}
        flags = ["--model", self.name, "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
        return [*flags, *(() if self.path else ("--device", "cpu", "--batch_size", "8"))]


HF = Backend("hf", "", (*_SCORED, *_GENERATED))
GATEWAY = (
    Backend("local-completions", "/v1/completions", (*_SCORED, *_GENERATED)),
    Backend("local-chat-completions", "/v1/chat/completions", _GENERATED),
)


@dataclass(frozen=True)
class Outcome:
    """The results of a backend: the score of each task, and the responses to its questions in their order."""

    scores: Mapping[str, float]
    samples: Mapping[str, Sequence[Any]]


def stage_adapters(directory: Path) -> None:
    """Copy the real model's adapters, without folders of tenants: so everybody may use them."""
    shutil.rmtree(directory, ignore_errors=True)
    for task in TASKS.values():
        shutil.copytree(ADAPTERS / task.tenant / task.adapter, directory / task.adapter)


def write_questions(directory: Path, count: int) -> None:
    """Write the questions of each task as lines of JSON."""
    for name, task in TASKS.items():
        lines = [
            json.dumps({"text": question.text, "answer": question.answer})
            for question in task.questions(count, _SEED, CHECK)
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def evaluate(program: Path, backend: Backend, flags: Sequence[str], tasks: Sequence[str], directory: Path) -> Outcome:
    """Run the command as its users do, in `directory`. Exits where it fails."""
    out = directory / "results"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        str(program), "run", *flags, "--tasks", *tasks, "--include_path", str(_TASKS), "--apply_chat_template",
        "--log_samples", "--output_path", str(out),
    ]  # fmt: skip
    environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache"), "OMP_WAIT_POLICY": "passive"}
    with (directory / "lm_eval.log").open("wb") as log:
        done = subprocess.run(command, cwd=directory, env=os.environ | environ, stdout=log, stderr=log, check=False)
    files = list(out.rglob("results_*.json"))
    if done.returncode or len(files) != 1:
        raise SystemExit(f"error: lm_eval with {backend.name} failed; see {log.name}")
    results = json.loads(files[0].read_text())["results"]
    samples = {
        task: [sample["filtered_resps"] for sample in sorted(_lines(file), key=lambda sample: int(sample["doc_id"]))]
        for task in tasks
        for file in out.rglob(f"samples_{task}_*.jsonl")
    }
    return Outcome({task: float(results[task][f"{_METRICS[task]},none"]) for task in tasks}, samples)


def _lines(file: Path) -> Iterator[Mapping[str, Any]]:
    return map(json.loads, file.read_text().splitlines())


def different(truth: Sequence[Any], answers: Sequence[Any]) -> int:
    """Return the number of questions whose responses differ: in their text, or in a log probability."""
    return sum(not _is_same(one, other) for one, other in zip(truth, answers, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    try:
        return math.isclose(float(one), float(other), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except ValueError:  # a text, or whether the answer is the greedy one
        return bool(one == other)


async def compare(interpreter: str, directory: Path, count: int) -> bool:
    """Compare the backends without adapters, and with each on its own tasks; print a table, tell whether all agree.

    Raises Unavailable where the model cannot be had.
    """
    model, staged = real_model(), directory / "adapters"
    write_questions(directory, count)
    stage_adapters(staged)
    print(_ROW.format("task", "adapter", "backend", "score", "answers unlike hf's"), flush=True)
    program, agree = Path(interpreter).with_name("lm_eval"), True
    async with running_cluster("--model", str(model), "--dtype", "float32", "--adapters", str(staged)) as addresses:
        for adapter in ("", *dict.fromkeys(_ADAPTERS.values())):
            tasks = [task for task, its in _ADAPTERS.items() if adapter in ("", its)]
            truth: Outcome | None = None
            for backend in (HF, *GATEWAY):
                if served := [task for task in tasks if task in backend.tasks]:
                    print(f"{backend.name}, {adapter or 'no'} adapter ...", file=sys.stderr, flush=True)
                    flags = backend.arguments(
                        f"http://{addresses['http']}", model, staged / adapter if adapter else None
                    )
                    outcome = evaluate(program, backend, flags, served, directory)
                    truth = truth or outcome
                    agree = _print_rows(backend, adapter, outcome, truth) and agree
    return agree


_ROW = "{:9}  {:9}  {:22}  {:>8}  {}"


def _print_rows(backend: Backend, adapter: str, outcome: Outcome, truth: Outcome) -> bool:
    """Print a row for each task; tell whether no response differs from the truth's."""
    differing = {task: different(truth.samples[task], samples) for task, samples in outcome.samples.items()}
    for task, count in differing.items():
        verdict = "" if outcome is truth else f"{count} of {len(outcome.samples[task])}"
        print(_ROW.format(task, adapter or "-", backend.name, f"{outcome.scores[task]:.4f}", verdict), flush=True)
    return not any(differing.values())
