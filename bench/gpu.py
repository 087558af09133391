"""The engine on CUDA: checked, profiled and measured in half an hour: `python -m bench.gpu [--quick] [--out DIR]`.

    checks, sanitizer, waits │ model │ steps │ profile │ load │ peers      each in its own process, under eight minutes

A part's figures are in DIR/parts.json as soon as it ends; the next call goes on with those that have none, and makes
the model again on another machine. When all are there, a full run writes docs/results/benchmarks-gpu.md. llama3-8b in
bfloat16 with random weights: decode steps at a context of 512, with and without adapters, and prefills of 4,096 tokens,
each compared with the time of its bytes and operations at the bandwidth and the rate that are measured between the
runs; closed loops; then transformers' continuous batching and peft's mixed batches run in turn with ours.

Without a CUDA device the programme says so and ends with exit code 0; `--rehearse` runs all parts with a tiny model,
whose engine computes nothing (bench/fake_cuda.py). It needs no network, and no packages but torch, triton,
transformers, peft, safetensors and pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.bare_engine import BareEngine
from bench.ceilings import Ceilings
from bench.device_ceilings import DeviceCeilingMeter, spread
from bench.device_checks import check_waits, run_sanitizer, run_tests
from bench.device_load import LoadSetup, measure_load
from bench.device_peers import PeerSetup, against_peers
from bench.device_steps import StepCase, StepSetup, Window, profile_steps, time_case
from bench.gpu_page import PAGE, device_facts, page
from bench.limit import limit_s
from bench.models import LLAMA3_8B, LLAMA3_QUICK, TINY, ModelShape, save_adapter, save_model
from bench.report import Aim, Figures, Report, progress
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

    name: str
    shape: ModelShape
    peers: PeerSetup
    repeats: int
    steps: StepSetup = field(default_factory=StepSetup)
    load: LoadSetup = field(default_factory=LoadSetup)
    profiled_rows: int = 64
    buffer_bytes: int = 2 * 2**30
    matrix_side: int = 8192
    requests: int = 120
    device: str = "cuda"

    @property
    def model(self) -> Path:
        """Return the model's directory, which all parts share."""
        return Path(tempfile.gettempdir()) / f"loraplex-gpu-{self.shape.name}"


_ROUND = Workload(64, prompt=448, short=16, long=32)
SETUPS = {
    "full": Setup("full", LLAMA3_8B, PeerSetup(_ROUND, 32, rounds=2), repeats=3),
    "quick": Setup(
        "quick", LLAMA3_QUICK, PeerSetup(Workload(64, prompt=448, short=8, long=16), 32, rounds=1), repeats=1,
        load=LoadSetup((64,), (0, 64), answer=32),
    ),
    "rehearsal": Setup(
        "rehearsal",
        TINY,
        PeerSetup(Workload(requests=4, prompt=12, short=2, long=4), static_requests=3, rounds=1),
        repeats=1,
        steps=StepSetup(context=24, prefill=600, windows=2, steps=2),
        load=LoadSetup((2,), (0, 3), prompt=12, answer=4),
        profiled_rows=4,
        buffer_bytes=2**16,
        matrix_side=32,
        requests=14,
        device="cpu",
    ),
}  # fmt: skip


def make_model(setup: Setup) -> Figures:
    """Write the model and the adapters, unless they are there."""
    if not (setup.model / "complete").is_file():
        shutil.rmtree(setup.model, ignore_errors=True)
        setup.model.mkdir(parents=True)
        _check_disk(setup.shape, setup.model)
        progress(f"making {setup.shape.name} and {ADAPTERS} adapters of rank {RANK}")
        save_model(setup.shape, setup.model / "model", device=setup.device)
        _save_adapters(setup.shape, setup.model)
        (setup.model / "complete").touch()
    return Figures([])


def measure_steps(setup: Setup) -> Figures:
    """Time all cases of steps against the device's limits."""
    place, engine = torch.device(setup.device), _engine(setup)
    try:
        meter = DeviceCeilingMeter(place, setup.buffer_bytes, setup.matrix_side)
        windows = _measure_cases(setup, engine, meter, place)
    finally:
        engine.close()
    ceilings = meter.median()
    return Figures([*_rows(windows, ceilings, setup.shape), *meter.rows()], _ratios(windows, ceilings, setup.shape))


def profile(setup: Setup) -> Figures:
    """Profile a replayed and a mixed step, each row with an adapter."""
    engine = _engine(setup)
    try:
        return profile_steps(
            engine, setup.profiled_rows, ADAPTERS, setup.steps, setup.shape, RANK, torch.device(setup.device)
        )
    finally:
        engine.close()


def measure_loops(setup: Setup) -> Figures:
    """Run the closed loops."""
    make_model(setup)
    return measure_load(setup.load, setup.model / "model", _adapters(setup), setup.shape.vocabulary, setup.device)


def measure_peers(setup: Setup) -> Figures:
    """Run our engine in turn with the peers."""
    engine = _engine(setup)
    try:
        return against_peers(
            setup.peers, engine, setup.model / "model", _adapters(setup), setup.shape.vocabulary, setup.device
        )
    finally:
        engine.close()


# The parts in their order: what fails first costs least.
PARTS: Mapping[str, Callable[[Setup], Figures]] = {
    "checks": lambda setup: run_tests(),
    "waits": lambda setup: check_waits(setup.device, setup.requests),
    "sanitizer": lambda setup: run_sanitizer(),
    "model": make_model,
    "steps": measure_steps,
    "profile": profile,
    "load": measure_loops,
    "peers": measure_peers,
}
# Timeout in seconds for a part.
PART_S = 470
_PARTS_FILE = "parts.json"


def main() -> int:
    """Run the programme with the command line's arguments; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a model of four layers, and fewer loops")
    parser.add_argument("--rehearse", action="store_true", help="all parts with a tiny model and a fake device")
    parser.add_argument("--out", type=Path, default=Path(".cache/gpu"), metavar="DIR", help="where figures are written")
    parser.add_argument("--only", default="", metavar="PART,...", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--again", action="store_true", help="run parts whose figures are there too")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setup = SETUPS["rehearsal" if arguments.rehearse else "quick" if arguments.quick else "full"]
    chosen = arguments.only.split(",") if arguments.only else list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only {arguments.only}: {', '.join(sorted(unknown))} is not one of {', '.join(PARTS)}")
    if setup.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch finds none, so there is nothing to measure")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        threading.Thread(target=_end_with_caller, daemon=True).start()
        write_part(setup, arguments.part, arguments.out)
        return 0
    return run_parts(setup, chosen, arguments.out, again=arguments.again)


def _end_with_caller() -> None:
    """Kill this part with what it has started once the process that started it has gone, and with it our input."""
    # Not by sys.stdin, whose lock this thread would hold when the part ends: the interpreter would abort.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def write_part(setup: Setup, part: str, out: Path) -> None:
    """Run a part in this process, and write its figures."""
    began = time.perf_counter()
    with _rehearsed() if setup.name == "rehearsal" else nullcontext():
        figures = PARTS[part](setup)
    values = {
        "setup": setup.name, "part": part, "seconds": time.perf_counter() - began,
        "rows": [dict(row) for row in figures.rows], "ratios": dict(figures.ratios),
    }  # fmt: skip
    unfinished = out / "parts.json.new"
    unfinished.write_text(json.dumps(_read(out) | {part: values}, indent=1) + "\n")
    unfinished.replace(out / _PARTS_FILE)


@contextmanager
def _rehearsed() -> Iterator[None]:
    """Let engines be on a fake CUDA device: what an engine on the CPU needs is not on a machine for CUDA."""
    from bench import bare_engine, device_checks
    from bench.fake_cuda import RehearsedEngine  # Triton is not everywhere

    engines = [patch.object(module, "build_engine", RehearsedEngine) for module in (bare_engine, device_checks)]
    with engines[0], engines[1]:
        yield


def run_parts(setup: Setup, parts: Sequence[str], out: Path, *, again: bool = False, timeout_s: float = PART_S) -> int:
    """Run the parts that have no figures yet, each in a process of its own; return the exit code."""
    failed = []
    for part in parts:
        if _figures(setup, part, out) is not None and not again:
            progress(f"{part}: its figures are there")
        elif not _run_part(setup, part, out, timeout_s):
            failed.append(part)
    found = [figures for part in PARTS if (figures := _figures(setup, part, out)) is not None]
    if len(found) == len(PARTS):
        _report(setup, found, out)
        shutil.rmtree(setup.model, ignore_errors=True)
    missing = [part for part in PARTS if _figures(setup, part, out) is None]
    progress(f"{len(found)} of {len(PARTS)} parts are there" + (f"; missing: {', '.join(missing)}" if missing else ""))
    return 1 if failed else 0


def _run_part(setup: Setup, part: str, out: Path, timeout_s: float) -> bool:
    progress(f"{part}: at most {timeout_s:.0f} s")
    size = {"rehearsal": ["--rehearse"], "quick": ["--quick"]}.get(setup.name, [])
    command = [sys.executable, "-m", "bench.gpu", *size, "--out", str(out), "--part", part]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            # With what it has started: pytest, the sanitizer.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        progress(f"{part}: " + (f"ended with {code}" if code is not None else f"not done within {timeout_s:.0f} s"))
    return code == 0


def _figures(setup: Setup, part: str, out: Path) -> dict[str, Any] | None:
    """Return a part's figures of this setup, once they are there."""
    values = _read(out).get(part, {})
    return values if values.get("setup") == setup.name else None


def _read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the figures that are there, by part."""
    file = out / _PARTS_FILE
    figures: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    return figures


def _report(setup: Setup, parts: Sequence[Mapping[str, Any]], out: Path) -> None:
    facts = device_facts(torch.device(setup.device))
    seconds = [spread(f"part: {part['part']}", "s", [part["seconds"]]) for part in parts]
    report = Report(
        name="gpu",
        command="python -m bench.gpu" + ("" if setup.name == "full" else f" --{setup.name}"),
        quick=setup.name != "full",
        setup=asdict(setup) | {"adapters": ADAPTERS, "rank": RANK, "dtype": "bfloat16"},
        rows=[*(row for part in parts for row in part["rows"]), *seconds],
        ratios={name: value for part in parts for name, value in part["ratios"].items()},
        aims=AIMS,
        machine=facts.machine,
        versions=facts.versions,
    )
    report.write(out / "gpu.json")
    target = PAGE if setup.name == "full" else out / "gpu.md"
    target.write_text(page(report))
    progress(f"{target} is written")


def _check_disk(shape: ModelShape, directory: Path) -> None:
    needed = 2 * (shape.parameters + _ADAPTER_FILES * shape.adapter_parameters(RANK))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise SystemExit(
            f"bench.gpu: the model takes {needed / 1e9:.1f} GB in {directory.parent}, where {free / 1e9:.1f} GB are "
            "free; set TMPDIR to a directory with room"
        )


def _save_adapters(shape: ModelShape, directory: Path) -> None:
    made = [save_adapter(shape, RANK, directory / f"file{index}", seed=index) for index in range(_ADAPTER_FILES)]
    adapters = [directory / f"a{index}" for index in range(ADAPTERS)]
    for index, path in enumerate(adapters):
        path.symlink_to(made[index % _ADAPTER_FILES])


def _adapters(setup: Setup) -> list[Path]:
    return [setup.model / f"a{index}" for index in range(ADAPTERS)]


def _engine(setup: Setup) -> BareEngine:
    make_model(setup)
    rows, steps, work = max(case.rows for case in CASES), setup.steps, setup.peers.workload
    tokens = max(steps.prompt + steps.answer, work.prompt + work.long)
    # Only the blocks that the largest case fills, because the peers need memory too.
    blocks = rows * -(-tokens // _BLOCK) + -(-steps.prefill // _BLOCK) + 1
    return BareEngine(
        setup.model / "model", _adapters(setup), rows, setup.device, kv_blocks=blocks, block_size=_BLOCK,
        adapter_slots=ADAPTERS, max_rank=RANK, step_tokens=steps.prefill,
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
