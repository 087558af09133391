"""Checks on a CUDA device before anything is measured: tests/gpu, kernels under compute-sanitizer, no step waits."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.device_requests import SAMPLINGS, draw_requests, run_requests
from bench.models import TINY, save_adapter, save_model
from bench.report import Figures, progress
from loraplex.worker.engine.torch_engine import build_engine
from loraplex.worker.engine_api import EngineConfig

_ROOT = Path(__file__).parents[1]
# Without the conftest of the whole suite, which needs packages of other rooms, and without its timeout of a test: here
# the first of a file compiles some 150 kernels.
PYTEST = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0", "--import-mode=importlib",
    "-p", "tests.tiny_models", "--confcutdir=tests/gpu",
)  # fmt: skip
# Programs that run every kernel and compare it; see tests/worker/engine/triton_runs.py.
KERNELS = ("attention_cases.py", "lora_cases.py", "row_cases.py", "sampling_cases.py", "invariant_cases.py")
# Timeout in seconds for a program under the sanitizer, which makes kernels up to fifty times slower.
_SANITIZED_S = 400
# Number of drawn requests with which no step may wait.
_REQUESTS = 120


def run_tests(command: Sequence[str] = PYTEST) -> Figures:
    """Run tests/gpu, its files side by side: most of their time is compiling. Raises RuntimeError, of all that fail."""
    files = sorted(path.relative_to(_ROOT) for path in (_ROOT / "tests" / "gpu").glob("test_*.py"))
    with ThreadPoolExecutor(len(files)) as pool:
        runs = [pool.submit(_run, [sys.executable, *command, str(file)]) for file in files]
    if failures := [str(error) for run in runs if (error := run.exception()) is not None]:
        raise RuntimeError("\n".join(failures))
    outputs = [run.result() for run in runs]
    found = Counter[str]()
    for output in outputs:
        found.update({what: int(count) for count, what in re.findall(r"(\d+) (passed|skipped|failed|error)", output)})
    return Figures([_count(f"tests/gpu: {what}", count) for what, count in found.items()])


def run_sanitizer(programs: Sequence[str] = KERNELS, device: str = "cuda", tool: str = "compute-sanitizer") -> Figures:
    """Run the kernels' comparisons under compute-sanitizer, where it is there. Raises RuntimeError for a finding."""
    found = shutil.which(tool)
    if found is None:
        progress(f"{tool} is not on PATH: kernels run without it")
        return Figures([_count(f"sanitizer: {tool} is not here", 0)])

    def run(name: str) -> Mapping[str, Any]:
        path = _ROOT / "tests" / "worker" / "engine" / name
        command = [found, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(path), device]
        try:
            _run(command, _SANITIZED_S)
        except subprocess.TimeoutExpired:
            return _count(f"sanitizer's findings: {name}, within {_SANITIZED_S} s", 0)
        return _count(f"sanitizer's findings: {name}", 0)

    with ThreadPoolExecutor(len(programs)) as pool:
        return Figures(list(pool.map(run, programs)))


def check_waits(device: str, requests: int = _REQUESTS) -> Figures:
    """Run requests of every kind on an engine whose host may not wait for the device.

    torch raises at once where it would. Raises RuntimeError for a sequence that fails.
    """
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as name:
        directory, shape = Path(name), replace(TINY, family="llama")
        model = save_model(shape, directory / "model")
        adapters = {
            adapter: str(save_adapter(shape, 8, directory / adapter, seed)) for seed, adapter in enumerate(("a", "b"))
        }
        config = EngineConfig(
            str(model), device, rows=8, block_size=4, kv_blocks=400, step_tokens=16, adapter_slots=2, max_rank=8
        )
        engine = build_engine(config, ahead=True, paced=False)
        try:
            with _Strict() if device.startswith("cuda") else nullcontext():
                chance = random.Random(7)
                steps = run_requests(engine, draw_requests(requests, chance, adapters), chance)
        finally:
            engine.close()
    case = f"steps that wait, of {steps} of {requests} requests with {len(SAMPLINGS)} ways to sample"
    return Figures([_count(case, 0)])


class _Strict:
    """torch raises where the host would wait for the device."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _run(command: Sequence[str], timeout_s: float | None = None) -> str:
    # Each tensor's memory is to be its own, so that the sanitizer sees what lies beyond it.
    environment = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "worker"), os.environ.get("PYTHONPATH", "")])}
        | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if timeout_s else {})
    )
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def _count(case: str, count: int) -> Mapping[str, Any]:
    return {"case": case, "unit": "", "median": count, "low": count, "high": count, "runs": 1}
