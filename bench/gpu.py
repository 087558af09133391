"""The engine on CUDA against the device's own limits: `python -m bench.gpu [--quick] [--json FILE]`.

llama3-8b in bfloat16 with random weights; decode steps at a context of 512, with and without adapters, and prefills of
4,096 tokens. Each is compared with the time of its bytes and operations at the bandwidth and the rate that are measured
between the runs. Then transformers' continuous batching and peft's mixed batches run in turn with ours.

A full run writes docs/results/benchmarks-gpu.md. Without a CUDA device the benchmark says so and ends with exit code 0.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.bare_engine import BareEngine
from bench.ceilings import Ceilings
from bench.command import run_command
from bench.device_ceilings import DeviceCeilingMeter, spread
from bench.device_peers import PeerSetup, against_peers
from bench.device_steps import StepCase, StepSetup, Window, time_case
from bench.gpu_page import PAGE, device_facts, page
from bench.limit import limit_s
from bench.models import LLAMA3_8B, LLAMA3_QUICK, ModelShape, save_adapter, save_model
from bench.report import Aim, Report, progress
from bench.workload import Workload

# Rank and number of the adapters.
RANK, ADAPTERS = 16, 64
# Tokens of a KV cache block.
_BLOCK = 16
# Number of distinct adapter files; the adapters link to them, and each is read into its own slot.
_ADAPTER_FILES = 4
AIMS = {
    "decode_of_limit_1": Aim(at_least=0.85),
    "decode_of_limit_64": Aim(at_least=0.75),
    "lora_of_limit": Aim(at_least=0.70),
    "prefill_of_limit": Aim(at_least=0.60),
    "lora_over_base": Aim(),
    "distinct_over_identical": Aim(),
    "base_vs_hf_continuous": Aim(),
    "mixed_vs_peft_static": Aim(),
}

_ONE, _BASE = StepCase(1), StepCase(64)
_MIXED, _IDENTICAL = StepCase(64, ADAPTERS), StepCase(64, 1)
_PREFILL = StepCase(1, prefill=True)
# In an order that puts compared cases next to each other.
CASES = (
    _ONE, StepCase(32), StepCase(128), _BASE, _MIXED, _IDENTICAL, StepCase(64, 8), _PREFILL,
    StepCase(1, 1, prefill=True),
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """The sizes of a run. Every step case runs `repeats` times; the last two fields are those of DeviceCeilingMeter."""

    shape: ModelShape
    peers: PeerSetup
    repeats: int
    steps: StepSetup = field(default_factory=StepSetup)
    buffer_bytes: int = 2 * 2**30
    matrix_side: int = 8192


FULL = Setup(LLAMA3_8B, PeerSetup(Workload(64, prompt=448, short=16, long=32), 32, rounds=2), repeats=3)
QUICK = Setup(LLAMA3_QUICK, PeerSetup(Workload(64, prompt=448, short=8, long=16), 32, rounds=1), repeats=1)


def main() -> int:
    """Run the benchmark with the command line's arguments; return the exit code."""
    if not torch.cuda.is_available():
        print("no CUDA device: torch finds none, so there is nothing to measure")
        return 0
    report = run_command("gpu", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick, "cuda"))
    if not report.quick:
        PAGE.write_text(page(report))
        progress(f"{PAGE} is written")
    return 0


def measure(setup: Setup, quick: bool, device: str) -> Report:
    """Make the model and the adapters, time our engine against the limits, then our engine and the peers in turn."""
    shape, place = setup.shape, torch.device(device)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as name:
        directory = Path(name)
        _check_disk(shape, directory)
        progress(f"making {shape.name} and {ADAPTERS} adapters of rank {RANK}")
        model = save_model(shape, directory / shape.name, device=device)
        adapters = _save_adapters(shape, directory)
        progress("loading the model into the engine")
        engine = _engine(setup, model, adapters, device)
        try:
            meter = DeviceCeilingMeter(place, setup.buffer_bytes, setup.matrix_side)
            windows = _measure_cases(setup, engine, meter, place)
            ceilings, ceiling_rows = meter.median(), meter.rows()
            # The peers need the meter's memory.
            del meter
            peers = against_peers(setup.peers, engine, model, adapters, shape.vocabulary, device)
        finally:
            engine.close()
    facts = device_facts(place)
    return Report(
        name="gpu",
        command="python -m bench.gpu" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"adapters": ADAPTERS, "rank": RANK, "dtype": "bfloat16", "device": device},
        rows=[*_rows(windows, ceilings, shape), *ceiling_rows, *peers.rows],
        ratios=_ratios(windows, ceilings, shape) | dict(peers.ratios),
        aims=AIMS,
        machine=facts.machine,
        versions=facts.versions,
    )


def _check_disk(shape: ModelShape, directory: Path) -> None:
    needed = 2 * (shape.parameters + _ADAPTER_FILES * shape.adapter_parameters(RANK))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise SystemExit(
            f"bench.gpu: the model takes {needed / 1e9:.1f} GB in {directory.parent}, where {free / 1e9:.1f} GB are "
            "free; set TMPDIR to a directory with room"
        )


def _save_adapters(shape: ModelShape, directory: Path) -> list[Path]:
    made = [save_adapter(shape, RANK, directory / f"file{index}", seed=index) for index in range(_ADAPTER_FILES)]
    adapters = [directory / f"a{index}" for index in range(ADAPTERS)]
    for index, path in enumerate(adapters):
        path.symlink_to(made[index % _ADAPTER_FILES])
    return adapters


def _engine(setup: Setup, model: Path, adapters: Sequence[Path], device: str) -> BareEngine:
    rows, steps, work = max(case.rows for case in CASES), setup.steps, setup.peers.workload
    tokens = max(steps.prompt + steps.answer, work.prompt + work.long)
    # Only the blocks that the largest case fills, because the peers need memory too.
    blocks = rows * -(-tokens // _BLOCK) + -(-steps.prefill // _BLOCK) + 1
    return BareEngine(
        model, adapters, rows, device, kv_blocks=blocks, block_size=_BLOCK, adapter_slots=ADAPTERS, max_rank=RANK,
        step_tokens=steps.prefill,
    )  # fmt: skip


def _measure_cases(
    setup: Setup, engine: BareEngine, meter: DeviceCeilingMeter, device: torch.device
) -> dict[StepCase, list[Window]]:
    """Time all cases in turn, `repeats` times; an earlier turn is a warm-up and dropped."""
    windows: dict[StepCase, list[Window]] = {case: [] for case in CASES}
    seed = 0
    for turn in range(setup.repeats + 1):
        for case in CASES:
            meter.measure()
            seed += 1
            timed = time_case(engine, case, setup.steps, setup.shape.vocabulary, seed, device)
            which = f"turn {turn} of {setup.repeats}" if turn else "warming up"
            progress(f"{which}: {case}: {median(window.step_ms for window in timed):.2f} ms a step")
            if turn:
                windows[case] += timed
    return windows


def _rows(
    windows: Mapping[StepCase, Sequence[Window]], ceilings: Ceilings, shape: ModelShape
) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for case, timed in windows.items():
        limit = median(1e3 * limit_s(window.steps, shape, RANK, ceilings) / len(window.steps) for window in timed)
        rows.append(spread(str(case), "ms/step", [window.step_ms for window in timed]) | {"limit": limit})
    return rows


def _ratios(windows: Mapping[StepCase, Sequence[Window]], ceilings: Ceilings, shape: ModelShape) -> dict[str, float]:
    def of_limit(case: StepCase) -> float:
        return median(limit_s(window.steps, shape, RANK, ceilings) / window.seconds for window in windows[case])

    def over(case: StepCase, other: StepCase) -> float:
        return median(b.step_ms / a.step_ms for a, b in zip(windows[case], windows[other], strict=True))

    return {
        "decode_of_limit_1": of_limit(_ONE),
        "decode_of_limit_64": of_limit(_BASE),
        "lora_of_limit": of_limit(_MIXED),
        "prefill_of_limit": of_limit(_PREFILL),
        "lora_over_base": over(_MIXED, _BASE),
        "distinct_over_identical": over(_MIXED, _IDENTICAL),
    }


if __name__ == "__main__":
    sys.exit(main())
