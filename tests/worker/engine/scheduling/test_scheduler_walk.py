"""Random walks of the scheduler: whatever comes, ends, fails or does not fit, every answer is right and ends once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import integers

from tests.worker.engine.scheduling.paged_model import LIMITS, VOCAB, PagedModel, oracle
from worker.engine.scheduling import adapter_demand as demand
from worker.engine_api import AdapterSource, Failure, NewSequence, Sampling, Stopping

# A walk has a little less than EXAMPLES * LENGTH operations.
EXAMPLES, LENGTH, OPERATIONS = 80, 60, 4_000
NAN_LOGITS = Failure("INTERNAL", "NAN_LOGITS", "not a number")
SEEDS = integers(0, 1 << 32)


def random_spec(chance: random.Random, name: str) -> NewSequence:
    adapter = chance.choice(["", "", "a", "b", "c", "d", "broken"])
    tokens = chance.randint(1, 30)
    made = NewSequence(
        name,
        # Few prompts, so that prefixes meet.
        tuple([chance.randrange(2)] * chance.randint(1, 20) + chance.choices(range(VOCAB), k=chance.randint(0, 14))),
        adapter=AdapterSource(adapter, f"/adapters/{adapter}") if adapter else None,
        sampling=Sampling(presence_penalty=chance.choice([0.0, 0.0, 1.0])),
        stopping=Stopping(
            max_tokens=tokens,
            min_tokens=chance.randint(0, tokens),
            stop_token_ids=tuple(chance.sample(range(VOCAB), chance.choice([0, 0, 1, 5]))),
            ignore_eos=chance.random() < 0.5,
        ),
        tenant=chance.choice(["acme", "globex"]),
        priority=chance.choice([0, 0, 0, 1, -1, 100]),
    )
    if chance.random() < 0.3:
        answer, _ = oracle(made)
        made = replace(made, emitted_ids=answer[: chance.randint(0, len(answer))])
    return made


class SchedulerWalk(RuleBasedStateMachine):
    """Walk a scheduler; the model checks every step, `holds` every operation and the end."""

    loads_class: Any
    ahead: bool
    blocks: int
    operations = 0

    def __init__(self) -> None:
        super().__init__()
        self.loads = self.loads_class(LIMITS.adapter_slots, frozenset(["broken"]))
        self.model = PagedModel(self.loads, replace(LIMITS, blocks=self.blocks), ahead=self.ahead)
        self.added = 0
        self.dropped: set[str] = set()
        # Hypothesis checks `holds` once before the first operation.
        type(self).operations -= 1

    @property
    def living(self) -> list[str]:
        return [name for name in self.model.answers if name not in self.model.ended and name not in self.dropped]

    @rule(seed=SEEDS)
    def add(self, seed: int) -> None:
        if len(self.living) < 12:
            self.model.add(random_spec(random.Random(seed), f"s{self.added}"))
            self.added += 1

    @rule(pick=SEEDS)
    def abort(self, pick: int) -> None:
        if self.living:
            name = self.living[pick % len(self.living)]
            self.model.scheduler.abort(name)
            self.dropped.add(name)

    @rule(pick=SEEDS)
    def fail(self, pick: int) -> None:
        if self.living:
            name = self.living[pick % len(self.living)]
            self.model.take(self.model.scheduler.fail([name], NAN_LOGITS))
            self.dropped.add(name)

    @rule()
    def finish_load(self) -> None:
        if self.loads.loading():
            self.loads.finish_load()

    @rule()
    def step(self) -> None:
        self.model.step()

    @rule()
    def few_steps(self) -> None:
        for _ in range(4):
            self.model.step()

    @rule()
    def run_out_of_memory(self) -> None:
        self.model.step(fits=False)

    @invariant()
    def holds(self) -> None:
        type(self).operations += 1
        self.model.check()

    def teardown(self) -> None:
        self.model.run_until_idle()
        self.model.assert_idle()
        for name in self.model.answers.keys() - self.dropped:
            failure = self.model.failures.get(name)
            if failure is None:
                self.model.assert_right(name)
            else:
                assert failure.reason in ("ADAPTER_UNLOADABLE", "OUT_OF_MEMORY")
        self.loads.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize(("blocks", "most"), [(16, 2), (24, 64), (60, 2)])
def test_random_walks(gated_loads: Any, ahead: bool, blocks: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "PASSED_OVER_MOST", most)
    members = {"loads_class": gated_loads, "ahead": ahead, "blocks": blocks}
    walk: Any = type("Walk", (SchedulerWalk,), members)
    settled = settings(
        max_examples=EXAMPLES, stateful_step_count=LENGTH, deadline=None, derandomize=True, database=None
    )
    run_state_machine_as_test(walk, settings=settled)
    assert walk.operations >= OPERATIONS
