"""The loop of the engine process with an engine and a connection that follow a script."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.contracts.options import TokenLogprobs
from loraplex.runtime.interpreter import importing
from loraplex.worker.engine import process
from loraplex.worker.engine.process import serve
from loraplex.worker.engine_api import CaptureFailedError, EngineConfig, Output
from loraplex.worker.ipc import (
    PROMPT_TOKENS,
    Abort,
    Configure,
    FromEngine,
    PromptLogprobsPart,
    Stepped,
    ToEngine,
    Unusable,
    step_messages,
)


class IdleEngine:
    """An engine that only counts how often its accounts are checked."""

    def __init__(self) -> None:
        self.checks = 0
        self.adapters = SimpleNamespace(ended_commands=lambda: [])
        self.working = False

    def has_work(self) -> bool:
        return self.working

    def step(self) -> list[Output]:
        self.working = False
        return []

    def abort(self, sequence_id: str) -> None:
        self.working = True

    def stats(self) -> Any:
        return None

    def block_changes(self, most: int) -> None:
        return None

    def check(self) -> None:
        self.checks += 1


class ScriptedEnd:
    """An EngineEnd that receives lists of messages, and notes the engine's checks before each."""

    def __init__(self, engine: IdleEngine, script: list[list[ToEngine] | None]) -> None:
        self._engine, self._script = engine, script
        self.checks: list[int] = []
        self.sent: list[FromEngine] = []

    def receive(self, *, wait_s: float) -> list[ToEngine] | None:
        self.checks.append(self._engine.checks)
        return self._script.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def test_the_accounts_are_checked_once_in_each_idle_time() -> None:
    engine = IdleEngine()
    work: list[ToEngine] = [Abort(["s"])]
    end: Any = ScriptedEnd(engine, [work, work, [], [], [], work, work, [], [], None])
    idle: Any = engine
    serve(idle, end, [], cast(Any, None))
    # Beats two and later of an idle time, and messages, bring no check.
    assert end.checks == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_imports_are_left_out_of_garbage_collections() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept: list[list[object]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_log_probabilities_of_a_long_prompt_come_in_parts_before_its_first_output() -> None:
    # One message of 15,000 tokens with 20 alternatives held the loop of the I/O process for a fifth of a second.
    tokens = tuple(TokenLogprobs(-float(place), ((place, -1.5),)) for place in range(2 * PROMPT_TOKENS + 7))
    short = Output("b", 0, (4,))
    *parts, stepped = step_messages([Output("a", 0, (3,), prompt_logprobs=tokens), short], cast(Any, None))
    assert isinstance(stepped, Stepped)
    assert stepped.outputs == [Output("a", 0, (3,)), short]
    lengths, received = [], list[TokenLogprobs]()
    for part in parts:
        assert isinstance(part, PromptLogprobsPart)
        assert part.sequence_id == "a"
        lengths.append(len(part.tokens))
        received += part.tokens
    assert lengths == [PROMPT_TOKENS, PROMPT_TOKENS, 7]
    assert tuple(received) == tokens


def test_a_failed_capture_is_told_to_the_process_that_starts_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise CaptureFailedError("out of memory")

    monkeypatch.setattr(process, "_build", build)
    end = ScriptedEnd(IdleEngine(), [[Configure(EngineConfig("m"))]])
    assert process.run(cast(Any, end)) == 2
    assert end.sent == [Unusable("out of memory", without_graphs=True)]
