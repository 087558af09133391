"""Steps of the engine on a device: decode steps of so many rows at a context, and prefills of one long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.bare_engine import BareEngine
from bench.device_ceilings import now_s
from bench.limit import Step, recorded_steps
from bench.workload import Request, Workload

# The rows of a case begin within so many steps.
_BEGINNING_STEPS = 64


@dataclass(frozen=True)
class StepSetup:
    """A decode case is timed in `windows` of `steps` steps around `context` tokens; a prefill has `prefill` tokens."""

    context: int = 512
    prefill: int = 4096
    windows: int = 5
    steps: int = 16

    @property
    def prompt(self) -> int:
        """Tokens of a decode case's prompts, so that what is timed has the context in its middle."""
        return max(1, self.context - self.steps - self.windows * self.steps // 2)

    @property
    def answer(self) -> int:
        """Tokens that a row may come to, so that the first that begins is there as long as the last."""
        return (self.windows + 1) * self.steps + _BEGINNING_STEPS


@dataclass(frozen=True)
class StepCase:
    """So many rows, which share so many adapters, decode; or one prompt is prefilled."""

    rows: int
    adapters: int = 0
    prefill: bool = False

    def __str__(self) -> str:
        adapters = f"{self.adapters} adapter{'s' * (self.adapters > 1)}" if self.adapters else "no adapter"
        return f"prefill, {adapters}" if self.prefill else f"decode, {self.rows} rows, {adapters}"


@dataclass(frozen=True)
class Window:
    """Steps that were timed together."""

    seconds: float
    steps: tuple[Step, ...]

    @property
    def step_ms(self) -> float:
        """The mean of its steps, in milliseconds."""
        return 1e3 * self.seconds / len(self.steps)


def time_case(
    engine: BareEngine, case: StepCase, setup: StepSetup, vocabulary: int, seed: int, device: torch.device
) -> list[Window]:
    """Run a case once, with prompts that no other seed gives; a prefill is one window."""
    prompt, answer = (setup.prefill, 1) if case.prefill else (setup.prompt, setup.answer)
    requests = Workload(case.rows, prompt, answer, answer).draw(seed, vocabulary, case.adapters)
    return [_prefill(engine, requests, device)] if case.prefill else _decode(engine, requests, setup, device)


def _decode(engine: BareEngine, requests: Sequence[Request], setup: StepSetup, device: torch.device) -> list[Window]:
    """Start them, wait until all of them decode, time the steps after, forget them."""
    # Their prompts are in the prefix cache then: the rows begin together, whatever the scheduler thinks of prompts that
    # come while others decode.
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
    """From a prompt's arrival to its first token."""
    with recorded_steps() as steps:
        start = now_s(device)
        engine.add_requests(requests)
        while not any(output.finish for output in engine.step()):
            pass
        return Window(now_s(device) - start, tuple(steps))
