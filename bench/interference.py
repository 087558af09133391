"""Delay of running answers by a long prompt: `python -m bench.interference [--quick] [--json FILE]`.

8 sequences decode with the 28 M model; then a prompt of 4,000 tokens arrives. `gap_ratio` is the longest gap between
two tokens of any of the 8 while the prompt is prefilled, over their median gap before.
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
from options import StoppingParams
from worker.engine.process import freeze_gc
from worker.engine.torch_engine import TorchEngine, build_engine
from worker.engine_api import EngineConfig, NewSequence

AIMS = {"gap_ratio": Aim(at_most=2.5), "longest_step_s": Aim(at_most=0.5)}


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


@dataclass(frozen=True)
class Interference:
    """The result of a repeat: gaps in seconds, over all decodes; `longest_step_s` over all steps of the repeat."""

    calm_gap_s: float
    longest_gap_s: float
    prefill_s: float
    prefill_steps: int
    longest_step_s: float

    @property
    def gap_ratio(self) -> float:
        """Return the longest gap beside the prompt over the median gap before it."""
        return self.longest_gap_s / self.calm_gap_s


def main() -> None:
    """Run the benchmark with the command's arguments."""
    run_command("interference", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: Setup, quick: bool) -> Report:
    """Make the model, then measure `repeats` times: decodes, prompt, gaps."""
    progress(f"making {setup.shape.name}")
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        model = save_model(setup.shape, Path(directory) / setup.shape.name)
        engine = build_engine(EngineConfig(str(model), dtype="bfloat16", rows=setup.decodes + 1))
        freeze_gc()  # as the engine's process does
        try:
            # The first repeat is a warm-up and dropped: its memory pages are allocated while it runs.
            repeats = [_interfere(engine, setup, seed) for seed in range(setup.repeats + 1)][1:]
        finally:
            engine.close()
    return Report(
        name="interference",
        command="python -m bench.interference" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"dtype": "bfloat16"},
        rows=[_row(number, repeat) for number, repeat in enumerate(repeats, 1)],
        ratios={
            "gap_ratio": median(repeat.gap_ratio for repeat in repeats),
            "longest_step_s": max(repeat.longest_step_s for repeat in repeats),
        },
        aims=AIMS,
    )


def _interfere(engine: TorchEngine, setup: Setup, seed: int) -> Interference:
    recorder = _StepRecorder(engine)
    # Random ids, with another seed in each repeat, so that nothing is found in the prefix cache.
    chance = random.Random(seed)
    names = [f"decode-{index}" for index in range(setup.decodes)]
    for name in names:
        recorder.add(name, _random_ids(chance, setup.decodes_prompt, setup.shape.vocabulary), setup.shape.context // 2)
    while any(len(recorder.times.get(name, ())) <= setup.calm_gaps for name in names):
        recorder.step()
    calm = [gap for name in names for gap in recorder.gaps(name)]
    came, steps = time.perf_counter(), len(recorder.steps)
    recorder.add("prompt", _random_ids(chance, setup.prompt, setup.shape.vocabulary), 1)
    while "prompt" not in recorder.times:
        recorder.step()
    prefill_s, prefill_steps = time.perf_counter() - came, len(recorder.steps) - steps
    # A further step, which ends the gaps of decodes that got no token beside the prompt's last chunk.
    recorder.step()
    for name in names:
        engine.abort(name)
    after = [gap for name in names for gap in recorder.gaps(name, since=came)]
    progress(f"longest gap {max(after) * 1000:.1f} ms, before {median(calm) * 1000:.1f} ms, prefill {prefill_s:.2f} s")
    return Interference(median(calm), max(after), prefill_s, prefill_steps, max(recorder.steps))


class _StepRecorder:
    """Runs an engine's steps, and records the times of each sequence's tokens and of each step."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.times: dict[str, list[float]] = {}
        self.steps: list[float] = []

    def add(self, name: str, prompt_ids: tuple[int, ...], tokens: int) -> None:
        self._engine.add_sequence(NewSequence(name, prompt_ids, stopping=StoppingParams(tokens)))

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


def _random_ids(chance: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(chance.randrange(5, vocabulary) for _ in range(count))


def _row(number: int, result: Interference) -> dict[str, Any]:
    return {
        "repeat": number,
        "median gap before ms": result.calm_gap_s * 1000,
        "longest gap during ms": result.longest_gap_s * 1000,
        "gap ratio": result.gap_ratio,
        "prefill s": result.prefill_s,
        "prefill steps": result.prefill_steps,
        "longest step ms": result.longest_step_s * 1000,
    }


if __name__ == "__main__":
    main()
