"""Timed steps of the engine on a device: decode steps of some rows at a context, and prefills of one long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.bare_engine import BareEngine
from bench.device_ceilings import now_s
from bench.limit import Step, recorded_steps
from bench.workload import Request, Workload

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
