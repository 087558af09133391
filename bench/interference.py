"""Delay of running answers by a long prompt: `python -m bench.interference [--quick] [--json FILE]`.

A prompt of 4,000 tokens is prefilled alone by the 28 M model. Then 8 sequences decode, and a prompt as long arrives;
when it is done, three at once, of different tenants.

    gap_p99_over_target        the 99th percentile of all gaps between two tokens of the 8, beside the one prompt, over
                               the engine's target, 50 ms
    prompt_beside_over_alone   the prompt's tokens/s beside the 8, over those alone
    least_share                the tokens/s of the slowest of the three prompts, over the mean of the three
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.command import run_command
from bench.models import LLAMA_28M, ModelShape, save_model
from bench.report import Aim, Report, progress
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.process import freeze_gc
from loraplex.worker.engine.torch_engine import TorchEngine, build_engine
from loraplex.worker.engine_api import EngineConfig, NewSequence

AIMS = {
    "gap_p99_over_target": Aim(at_most=1),
    "prompt_beside_over_alone": Aim(at_least=0.6),
    "least_share": Aim(at_least=0.9),
    "longest_step_s": Aim(at_most=0.5),
}


@dataclass(frozen=True)
class Setup:
    """Sizes of a run. `calm_gaps` is the number of each decode's gaps that are measured before the prompt comes."""

    shape: ModelShape
    repeats: int
    decodes: int = 8
    decodes_prompt: int = 64
    prompt: int = 4_000
    calm_gaps: int = 100


FULL = Setup(LLAMA_28M, repeats=5)
QUICK = Setup(LLAMA_28M, repeats=2, calm_gaps=30)
TENANTS = ("acme", "globex", "initech")


@dataclass(frozen=True)
class Interference:
    """The result of a repeat, in seconds: `gaps` of all decodes beside the prompt; `longest_step_s` over all steps.

    `firsts_s` are the times to the first token of the three prompts.
    """

    alone_s: float
    calm_gap_s: float
    gaps: tuple[float, ...]
    prefill_s: float
    prefill_steps: int
    firsts_s: tuple[float, ...]
    longest_step_s: float

    @property
    def shares(self) -> tuple[float, ...]:
        """Return each of the three prompts' share of their tokens per second."""
        speeds = [1 / first_s for first_s in self.firsts_s]
        return tuple(speed / sum(speeds) for speed in speeds)


def main() -> None:
    """Run the benchmark with the command's arguments."""
    run_command("interference", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Make the model, then measure `repeats` times: a prompt alone, beside decodes, and three."""
    progress(f"making {setup.shape.name}")
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        model = save_model(setup.shape, Path(directory) / setup.shape.name)
        config = EngineConfig(str(model), dtype="bfloat16", rows=setup.decodes + len(TENANTS))
        engine = build_engine(config)
        freeze_gc()  # as the engine's process does
        try:
            # The first repeat is a warm-up and dropped: its memory pages are allocated while it runs.
            repeats = [_interfere(engine, setup, seed) for seed in range(setup.repeats + 1)][1:]
        finally:
            engine.close()
    rows = [_row(number, repeat) for number, repeat in enumerate(repeats, 1)]
    return Report(
        name="interference",
        command="python -m bench.interference" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"dtype": "bfloat16", "itl_target_ms": config.itl_target_ms},
        rows=rows,
        page_rows=[],
        ratios={
            "gap_p99_over_target": _p99([gap for repeat in repeats for gap in repeat.gaps])
            / (config.itl_target_ms / 1000),
            "prompt_beside_over_alone": median(repeat.alone_s / repeat.prefill_s for repeat in repeats),
            "least_share": median(min(repeat.shares) * len(TENANTS) for repeat in repeats),
            "longest_step_s": max(repeat.longest_step_s for repeat in repeats),
        },
        aims=AIMS,
    )


def _interfere(engine: TorchEngine, setup: Setup, seed: int) -> Interference:
    recorder = _StepRecorder(engine)
    # Random ids, with another seed in each repeat, so that nothing is found in the prefix cache.
    chance = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(5, setup.shape.vocabulary) for _ in range(count))

    alone_s = recorder.prefill({"alone": ids(setup.prompt)})["alone"]
    names = [f"decode-{index}" for index in range(setup.decodes)]
    for name in names:
        recorder.add(name, ids(setup.decodes_prompt), setup.shape.context // 2)
    while any(len(recorder.times.get(name, ())) <= setup.calm_gaps for name in names):
        recorder.step()
    calm = [gap for name in names for gap in recorder.gaps(name)]
    came, steps = time.perf_counter(), len(recorder.steps)
    prefill_s = recorder.prefill({"": ids(setup.prompt)})[""]
    prefill_steps = len(recorder.steps) - steps
    # A further step, which ends the gaps of decodes that got no token beside the prompt's last chunk.
    recorder.step()
    gaps = [gap for name in names for gap in recorder.gaps(name, since=came)]
    firsts = recorder.prefill({tenant: ids(setup.prompt) for tenant in TENANTS})
    for name in names:
        engine.abort(name)
    result = Interference(
        alone_s,
        median(calm),
        tuple(gaps),
        prefill_s,
        prefill_steps,
        tuple(firsts.values()),
        max(recorder.steps),
    )
    progress(f"p99 of gaps {_p99(gaps) * 1000:.1f} ms, prefill {prefill_s:.2f} s, alone {alone_s:.2f} s")
    return result


class _StepRecorder:
    """Runs an engine's steps, and records the times of each sequence's tokens and of each step."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.times: dict[str, list[float]] = {}
        self.steps: list[float] = []

    def add(self, name: str, prompt_ids: tuple[int, ...], tokens: int, tenant: str = "") -> None:
        self._engine.add_sequence(NewSequence(name, prompt_ids, stopping=StoppingParams(tokens), tenant=tenant))

    def prefill(self, prompts: dict[str, tuple[int, ...]]) -> dict[str, float]:
        """Add these tenants' prompts at once, and step until all have a token; return the seconds of each."""
        names = {tenant: f"prompt of {tenant}, {len(self.steps)}" for tenant in prompts}
        came = time.perf_counter()
        for tenant, prompt_ids in prompts.items():
            self.add(names[tenant], prompt_ids, 1, tenant)
        while any(name not in self.times for name in names.values()):
            self.step()
        return {tenant: self.times[name][0] - came for tenant, name in names.items()}

    def step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        now = time.perf_counter()
        self.steps.append(now - start)
        for output in outputs:
            if output.failure:
                raise RuntimeError(f"the engine failed: {output.failure.message}")
            if output.token_ids:
                self.times.setdefault(output.sequence_id, []).append(now)

    def gaps(self, name: str, since: float = 0.0) -> list[float]:
        """Return the seconds between consecutive tokens of which the later came after `since`."""
        times = self.times[name]
        return [later - earlier for earlier, later in pairwise(times) if later > since]


def _p99(gaps: list[float]) -> float:
    return sorted(gaps)[int(0.99 * len(gaps))]


def _row(number: int, result: Interference) -> dict[str, Any]:
    gaps = list(result.gaps)
    return {
        "repeat": number,
        "gap before ms": result.calm_gap_s * 1000,
        "median gap ms": median(gaps) * 1000,
        "p99 gap ms": _p99(gaps) * 1000,
        "longest gap ms": max(gaps) * 1000,
        "prefill s": result.prefill_s,
        "alone s": result.alone_s,
        "prefill steps": result.prefill_steps,
        "shares of three": " ".join(f"{share:.2f}" for share in result.shares),
        "longest step ms": result.longest_step_s * 1000,
    }


if __name__ == "__main__":
    main()
