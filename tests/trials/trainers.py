"""`make trainers`: TRL's own clients push an adapter at each step and sample with it, while a worker is killed.

    python -m tests.trials.trainers --steps 20 --staleness 4 --rollouts 8

Each step trains a peft adapter of rank 8 on rollouts of an earlier revision, saves it and loads it as TRL's trainer
does, under a name of its own; rollouts of the last revisions run meanwhile. Afterwards peft scores the ids of every
rollout at the rollout's own revision: the log probabilities must be those that the cluster told, and must not be those
of the revision before it. At last revisions are pushed from memory with the SDK, and the first token is waited for.

TRL comes without its dependencies into a folder of its own, which this process imports beside the project's packages.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from loraplex_client import Client
from tests.e2e.conftest import Cluster, running_cluster

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/model"
TRL = ROOT / ".cache/clients/trl"
PACKAGES = (
    "trl==1.16.0", "datasets==4.7.0", "pandas==3.1.1", "pyarrow==26.0.1", "dill==0.4.1", "multiprocess==0.70.19",
    "xxhash==4.1.0", "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0",
)  # fmt: skip
FLAGS = ("--dtype", "float32", "--threads", "1", "--rows", "16", "--kv-blocks", "512", "--adapter-slots", "8")
# Maximum difference of a log probability from peft's in float64, relative to the largest score (logit by temperature)
# of its place: 32 eps of float32, where peft's own float32 needs as many. And the least difference from those of the
# revision before, without which the scores would not tell revisions apart.
TOLERANCE, APART = 32 * 2.0**-23, 1e-3
# The report counts the log probabilities beyond this difference.
NEAR = 1e-5
# Maximum time in seconds from a push to the first token of its revision.
FIRST_TOKEN_S = 0.2
# How rollouts are sampled; the limits are those of the distribution that log probabilities are told of.
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "max_tokens": 48}
EXTRA = {"logprobs_mode": "processed_logprobs", "ignore_eos": True}


@dataclass
class Rollout:
    """Answers to a prompt by one revision, with the log probabilities that the cluster told."""

    version: int
    prompt: list[int]
    ids: list[list[int]]
    logprobs: list[list[float]]


@dataclass
class Report:
    """What was measured, in seconds."""

    rollouts: list[Rollout] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    pushes: list[float] = field(default_factory=list)
    pushed_first_tokens: list[float] = field(default_factory=list)
    # Largest differences of log probabilities from peft's in float64: the cluster's, also relative to the largest
    # score, and those of peft in float32; and the smallest of those from another revision's.
    worst: float = 0.0
    relative: float = 0.0
    rounding: float = 0.0
    beyond: int = 0
    nearest: float = float("inf")
    problems: list[str] = field(default_factory=list)


def install_trl() -> None:
    """Install TRL where it is not, and let this process import it. Raises SystemExit."""
    stamp = TRL / "packages.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(PACKAGES):
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--upgrade", "--target", TRL, *PACKAGES], check=False)
        if done.returncode:
            raise SystemExit("error: TRL could not be installed")
        stamp.write_text("\n".join(PACKAGES))
    sys.path.append(str(TRL))
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def clients(url: str) -> tuple[Any, Any]:
    """Return TRL's client that samples, and the one of its trainer that pushes adapters."""
    pusher: Any = import_module("trl.experimental.async_grpo.vllm_client")
    sampler: Any = import_module("trl.generation.vllm_client")
    # It only runs beside an installed vLLM, of which its HTTP calls need nothing.
    sampler.is_vllm_available = lambda *_, **__: True
    return sampler.VLLMClient(url, connection_timeout=30.0), pusher.VLLMClient(url)


class Policy:
    """The model in training, with an adapter of rank 8; saved revisions score what was sampled of them."""

    def __init__(self, folder: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(7)
        torch.set_num_threads(1)
        self._torch, self._folder = torch, folder
        auto: Any = AutoModelForCausalLM
        base = auto.from_pretrained(MODEL, dtype=torch.float32)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(base, config)
        self._optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=5e-4)

    def save(self, version: int) -> str:
        """Save the revision of a step; return its folder."""
        path = self._folder / f"policy-v{version}"
        self.model.save_pretrained(path)
        return str(path)

    def train(self, rollout: Rollout) -> None:
        """Make a step of REINFORCE, whose reward grows with the share of ids that are even."""
        losses = []
        for ids in rollout.ids:
            reward = sum(one % 2 == 0 for one in ids) / len(ids) - 0.49
            losses.append(-reward * self._logprobs(self.model, rollout.prompt, ids)[0].mean())
        loss: Any = self._torch.stack(losses).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def check(self, report: Report, last: int) -> None:
        """Score every rollout at its revision, and at the one before it."""
        for version in range(last):
            self.model.load_adapter(self._folder / f"policy-v{version}", adapter_name=f"v{version}")
        with self._torch.inference_mode():
            singles = [self._score(rollout, rollout.version) for rollout in report.rollouts]
            self.model.double()
            for rollout, single in zip(report.rollouts, singles, strict=True):
                self._check(report, rollout, single[0])

    def _check(self, report: Report, rollout: Rollout, single: Any) -> None:
        told = self._torch.tensor([value for one in rollout.logprobs for value in one])
        own, largest = self._score(rollout, rollout.version)
        other, _ = self._score(rollout, rollout.version - 1 if rollout.version else 1)
        difference = (own - told).abs()
        relative, apart = float((difference / largest).max()), float((other - told).abs().max())
        report.beyond += int((difference > NEAR).sum())
        report.worst = max(report.worst, float(difference.max()))
        report.relative = max(report.relative, relative)
        report.rounding = max(report.rounding, float((own - single).abs().max()))
        report.nearest = min(report.nearest, apart)
        if relative > TOLERANCE:
            report.problems.append(f"a rollout of v{rollout.version} is {relative:.1e} of its scores from peft's")
        if apart < APART:
            report.problems.append(f"a rollout of v{rollout.version} could be of another revision: {apart:.1e}")

    def _score(self, rollout: Rollout, version: int) -> tuple[Any, Any]:
        """Return the log probabilities of all ids of a rollout at a revision, and the largest score at their places."""
        self.model.set_adapter(f"v{version}")
        parts = [self._logprobs(self.model, rollout.prompt, ids) for ids in rollout.ids]
        logprobs, largest = zip(*parts, strict=True)
        return self._torch.cat(logprobs), self._torch.cat(largest)

    def _logprobs(self, model: Any, prompt: Sequence[int], ids: Sequence[int]) -> tuple[Any, Any]:
        """Return the log probability of each id in what it was drawn from, by transformers' own steps.

        And the largest score at its place.
        """
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        torch = self._torch
        logits = model(input_ids=torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
        for warper in (
            TemperatureLogitsWarper(SAMPLING["temperature"]),
            TopKLogitsWarper(int(SAMPLING["top_k"])),
            TopPLogitsWarper(SAMPLING["top_p"]),
        ):
            logits = warper(None, logits)
        return logits.log_softmax(-1)[range(len(ids)), list(ids)], logits.abs().masked_fill(logits.isinf(), 0).amax(-1)


class Run:
    """One run: its clients, its policy, and the rollouts that are under way."""

    def __init__(self, cluster: Cluster, folder: Path, options: argparse.Namespace) -> None:
        self._cluster, self._options, self.report = cluster, options, Report()
        self._url = f"http://{cluster.local.http}"
        self.sampler, self.pusher = clients(self._url)
        self.policy = Policy(folder)
        trainer: Any = import_module("trl.experimental.async_grpo.async_grpo_trainer")
        settings = SimpleNamespace(max_staleness=options.staleness)
        if not trainer.select_adapter_sync(self.pusher.get_server_info(), self.policy.model, settings):
            self.report.problems.append("TRL's trainer would not load adapters here")
        self._under_way: dict[int, asyncio.Task[list[Rollout]]] = {}

    async def steps(self) -> None:
        """Make all steps; the worker that runs most is killed in the middle."""
        steps, staleness = self._options.steps, self._options.staleness
        for step in range(steps):
            await asyncio.to_thread(self._push, step)
            self._under_way[step] = asyncio.create_task(self._sample(step))
            if step == steps // 2:
                self._cluster.local.kill(self._worker(), group=True)
                await self._cluster.local.start_worker()
            if (oldest := step - staleness) >= 0:
                rollouts = await self._under_way.pop(oldest)
                self.report.rollouts += rollouts
                await asyncio.to_thread(self.policy.train, rollouts[0])
                await asyncio.to_thread(self.pusher.unload_lora_adapter, f"policy-v{oldest}")
            else:  # nothing has ended yet: the revisions still have to differ
                await asyncio.to_thread(self.policy.train, Rollout(step, _prompt(step), [_prompt(step + 1)], []))
            print(f"step {step}: {len(self._under_way)} revisions sample", flush=True)
        for task in self._under_way.values():
            self.report.rollouts += await task
        for step in range(steps, 2 * steps):
            await asyncio.to_thread(self.policy.train, Rollout(step, _prompt(step), [_prompt(step + 1)], []))
            self.report.idle.append(await asyncio.to_thread(self._push, step))

    def _worker(self) -> str:
        return next(name for name in self._cluster.local.processes if name.startswith("worker"))

    def _push(self, step: int) -> float:
        """Pause, save, load and resume, as TRL's trainer does, and sample; return the time until the first token."""
        name = f"policy-v{step}"
        self.pusher.pause()
        path = self.policy.save(step)
        began = time.perf_counter()
        self.pusher.load_lora_adapter(name, path)
        loaded = time.perf_counter()
        self.pusher.resume()
        self._generate(name, [_prompt(step)], max_tokens=1)
        until_first_token = time.perf_counter() - began
        if step < self._options.steps:
            self.report.loads.append(loaded - began)
            self.report.first_tokens.append(until_first_token)
        return until_first_token

    async def _sample(self, step: int) -> list[Rollout]:
        prompts = [_prompt(100 * step + number) for number in range(self._options.rollouts)]
        calls = [asyncio.to_thread(self._generate, f"policy-v{step}", [prompt], n=2) for prompt in prompts]
        rollouts = []
        for prompt, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
            told = [[place[0] for place in one] for one in answer["logprobs"]]
            rollouts.append(Rollout(step, prompt, answer["completion_ids"], told))
        return rollouts

    def _generate(self, name: str, prompts: list[list[int]], **options: Any) -> Any:
        self.sampler.model = name
        extra = {"model": name, "seed": hash((name, *prompts[0])) % 2**63, **EXTRA}
        return self.sampler.generate(prompts, **{**SAMPLING, **options}, generation_kwargs=extra)

    def push_from_memory(self) -> None:
        """Push revisions with the SDK, and wait for the first token of each by its digest."""
        config, weights = raw_files(self.policy)
        with Client(self._cluster.local.router, "default", store=self._cluster.local.store) as client:
            for number in range(self._options.steps):
                changed = bytes(weights[:-4]) + number.to_bytes(2, "little") + bytes(weights[-2:])
                began = time.perf_counter()
                pushed = client.store.push_adapter(config, changed, "memory", ttl_s=60)
                self.report.pushes.append(time.perf_counter() - began)
                name = f"memory@{pushed.revision.digest}"
                with client.generate_stream(token_ids=_prompt(number), adapter_id=name, max_tokens=1) as stream:
                    next(iter(stream))
                    self.report.pushed_first_tokens.append(time.perf_counter() - began)


def raw_files(policy: Policy) -> tuple[dict[str, Any], bytes]:
    """Return the configuration and the weights of the policy as a trainer has them in memory."""
    import json

    path = Path(policy.save(10_000))
    return json.loads((path / "adapter_config.json").read_text()), (path / "adapter_model.safetensors").read_bytes()


def _prompt(number: int) -> list[int]:
    return [3 + (number * 31 + at * 7) % 300 for at in range(5 + number % 23)]


def _table(report: Report) -> str:
    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values) * 1e3:.0f} ms, at most {max(values) * 1e3:.0f} ms"

    tokens = sum(len(ids) for rollout in report.rollouts for ids in rollout.ids)
    return "\n".join(
        (
            f"{len(report.rollouts)} rollouts, {tokens} tokens, each scored by peft at its revision",
            f"log probabilities: at most {report.worst:.1e} from peft's in float64, {report.relative:.1e} of the score",
            f"  {report.beyond} are more than {NEAR:g} away; peft's own in float32 at most {report.rounding:.1e}",
            f"  those of the revision before differ by {report.nearest:.1e} or more in each rollout",
            f"load of a saved step while others sample: {spread(report.loads)}",
            f"  with the first token: {spread(report.first_tokens)}; when nobody samples: {spread(report.idle)}",
            f"push from memory: {spread(report.pushes)}",
            f"  with the first token: {spread(report.pushed_first_tokens)}",
        )
    )


async def main(options: argparse.Namespace) -> int:
    """Run all; print what was measured, and return 1 if something is wrong."""
    install_trl()
    with TemporaryDirectory(prefix="loraplex-trainers-") as directory:
        folder, sources = Path(directory) / "runs", Path(directory) / "sources.toml"
        folder.mkdir()
        sources.write_text(f'[[source]]\nprefix = "file://{folder}"\n')
        async with running_cluster(
            Path(directory) / "cluster", str(MODEL), {}, workers=2, worker_flags=FLAGS, http=True,
            store_flags=("--sources", str(sources)),
        ) as cluster:  # fmt: skip
            run = await asyncio.to_thread(Run, cluster, folder, options)
            await run.steps()
            await asyncio.to_thread(run.push_from_memory)
        await asyncio.to_thread(run.policy.check, run.report, options.steps)
    report = run.report
    for name, values in (("a load", report.idle), ("a push", report.pushed_first_tokens)):
        if statistics.median(values) > FIRST_TOKEN_S:
            report.problems.append(f"{name} with its first token takes {statistics.median(values):.3f} s")
    print("\n".join([_table(report), *report.problems]))
    return int(bool(report.problems))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.trials.trainers", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps, in the middle of which a worker is killed")
    parser.add_argument("--staleness", type=int, default=4, help="steps by which a rollout may be behind")
    parser.add_argument("--rollouts", type=int, default=8, help="prompts of a step, with two answers each")
    sys.exit(asyncio.run(main(parser.parse_args())))
