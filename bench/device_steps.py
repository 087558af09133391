"""Steps of the engine on a device, timed and profiled: decodes of some rows at a context, prefills of one prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from bench.bare_engine import BareEngine
from bench.device_ceilings import now_s, spread
from bench.limit import Step, recorded_steps, step_bytes
from bench.models import ModelShape
from bench.report import Figures
from bench.workload import Request, Workload
from loraplex.worker.engine.sampling.step import InFlight, Sampled

# Maximum number of steps within which the rows of a case begin.
_BEGINNING_STEPS = 64


@dataclass(frozen=True)
class StepSetup:
    """Sizes of the cases: decodes run `windows` of `steps` steps around `context` tokens, prefills `prefill` tokens."""

    context: int = 512
    prefill: int = 4096
    windows: int = 5
    steps: int = 16

    @property
    def prompt(self) -> int:
        """Return the tokens of a decode case's prompts, so that the timed steps have the context in their middle."""
        return max(1, self.context - self.steps - self.windows * self.steps // 2)

    @property
    def answer(self) -> int:
        """Return the tokens of a row's answer, enough that the first row to begin runs until the last timed step."""
        return (self.windows + 1) * self.steps + _BEGINNING_STEPS


@dataclass(frozen=True)
class StepCase:
    """A case: `rows` rows decode and share `adapters` adapters; or one prompt is prefilled."""

    rows: int
    adapters: int = 0
    prefill: bool = False

    def __str__(self) -> str:
        adapters = f"{self.adapters} adapter{'s' * (self.adapters > 1)}" if self.adapters else "no adapter"
        return f"prefill, {adapters}" if self.prefill else f"decode, {self.rows} rows, {adapters}"


@dataclass(frozen=True)
class Window:
    """The steps that were timed together, and the seconds that they took."""

    seconds: float
    steps: tuple[Step, ...]

    @property
    def step_ms(self) -> float:
        """Return the mean milliseconds of a step."""
        return 1e3 * self.seconds / len(self.steps)


def time_case(
    engine: BareEngine, case: StepCase, setup: StepSetup, vocabulary: int, seed: int, device: torch.device
) -> list[Window]:
    """Run a case once, with prompts drawn from the seed; a prefill is one window."""
    prompt, answer = (setup.prefill, 1) if case.prefill else (setup.prompt, setup.answer)
    requests = Workload(case.rows, prompt, answer, answer).draw(seed, vocabulary, case.adapters)
    return [_prefill(engine, requests, device)] if case.prefill else _decode(engine, requests, setup, device)


def _decode(engine: BareEngine, requests: Sequence[Request], setup: StepSetup, device: torch.device) -> list[Window]:
    """Add the requests, wait until all decode, time the steps after that, then abort the requests."""
    # This run puts the prompts into the prefix cache, so that the rows begin together even if the scheduler delays
    # prefills while others decode.
    engine.run([replace(request, tokens=1) for request in requests])
    engine.add_requests(requests)
    begun: set[str] = set()
    while len(begun) < len(requests):
        begun.update(output.sequence_id for output in engine.step() if output.token_ids)
    for _ in range(setup.steps):
        engine.step()
    timed = []
    for _ in range(setup.windows):
        with recorded_steps() as steps:
            start = now_s(device)
            for _ in range(setup.steps):
                engine.step()
            timed.append(Window(now_s(device) - start, tuple(steps)))
        if any(step.samples != len(requests) for step in steps):
            raise RuntimeError(f"not all of {len(requests)} rows decode in every step that is timed")
    engine.abort(requests)
    return timed


def _prefill(engine: BareEngine, requests: Sequence[Request], device: torch.device) -> Window:
    """Time a prompt from its arrival to its first token."""
    with recorded_steps() as steps:
        start = now_s(device)
        engine.add_requests(requests)
        while not any(output.finish for output in engine.step()):
            pass
        return Window(now_s(device) - start, tuple(steps))


# Number of profiled decode steps, and of kernels that are reported of a step: those that take longest.
_PROFILED, _KERNELS = 8, 16
# Tokens of the chunk of a profiled mixed step.
_CHUNK = 512
# Seeds that no other measurement uses, so that no prompt is in the prefix cache.
_PROFILE_SEED = 4_000_000


def profile_steps(
    engine: BareEngine, rows: int, adapters: int, setup: StepSetup, shape: ModelShape, rank: int, device: torch.device
) -> Figures:
    """Profile decode steps of some rows, replayed where there are graphs, and the steps that a prompt then joins."""
    requests = Workload(rows - 1, setup.prompt, setup.answer, setup.answer).draw(
        _PROFILE_SEED, shape.vocabulary, adapters
    )
    prompt = Workload(1, _CHUNK, 2, 2).draw(_PROFILE_SEED + 1, shape.vocabulary, adapters)
    engine.run([replace(request, tokens=1) for request in requests])
    engine.add_requests(requests)
    begun: set[str] = set()
    while len(begun) < len(requests):
        begun.update(output.sequence_id for output in engine.step() if output.token_ids)
    adapter = shape.adapter_parameters(rank)
    figures = [*_profiled("replayed step", engine, _PROFILED, shape, adapter, device)]
    engine.add_requests(prompt, len(requests))
    figures += _profiled("mixed step", engine, 1, shape, adapter, device)
    engine.abort([*requests, *prompt])
    return Figures(figures)


def _profiled(
    name: str, engine: BareEngine, count: int, shape: ModelShape, adapter: float, device: torch.device
) -> Iterator[dict[str, object]]:
    """Run steps under torch's profiler; yield microseconds of a step by kernel, and what host and device take of it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_cuda = device.type == "cuda"
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    now_s(device)
    with recorded_steps() as steps, _waiting() as waits, torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(count):
            engine.step()
        host_s = time.perf_counter() - start - sum(waits)
        now_s(device)
    kernels = sorted(
        (
            (float(event.self_device_time_total if on_cuda else event.self_cpu_time_total), event.count, event.key)
            for event in profiler.key_averages()
            # Operators have their kernels' times too.
            if event.device_type.name == device.type.upper()
        ),
        reverse=True,
    )
    device_us = sum(taken for taken, _, _ in kernels) / count
    for taken, launches, kernel in kernels[:_KERNELS]:
        case = f"{name}: {kernel[:70]}, {launches / count:g} launches"
        yield spread(case, "us/step", [taken / count])
    yield spread(f"{name}: all kernels", "us/step", [device_us])
    yield spread(f"{name}: host, without waiting", "us/step", [1e6 * host_s / count])
    read = sum(step_bytes(step, shape, adapter) for step in steps) / len(steps)
    yield spread(f"{name}: bytes that must be read", "GB/s", [read / device_us / 1e3])
    yield spread(f"{name}: size", "tokens", [steps[-1].tokens])


@contextmanager
def _waiting() -> Iterator[list[float]]:
    """Record the seconds that the host waits in for the device."""
    waits: list[float] = []
    collect = InFlight.collect

    def waited(step: InFlight) -> Sampled:
        start = time.perf_counter()
        if step.done is not None:
            step.done.synchronize()
        waits.append(time.perf_counter() - start)
        return collect(step)

    with patch.object(InFlight, "collect", waited):
        yield waits
