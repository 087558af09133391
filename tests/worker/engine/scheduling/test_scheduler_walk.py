"""Random walks of the scheduler: whatever comes, ends, fails or does not fit, every answer is right and ends once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine.scheduling import adapter_slots as demand
from loraplex.worker.engine_api import AdapterSource, Failure, NewSequence
from tests.worker.engine.scheduling.paged_model import LIMITS, VOCAB, PagedModel, Prophet, oracle

# Number of walks of each scheduler, and of operations of each walk.
WALKS, LENGTH = 70, 60
AT_NIGHT = [pytest.param(*case, marks=pytest.mark.nightly) for case in ((True, 24, 64), (False, 60, 2))]
NAN_LOGITS = Failure("INTERNAL", "NAN_LOGITS", "not a number")


def random_spec(chance: random.Random, name: str) -> NewSequence:
    adapter = chance.choice(["", "", "a", "b", "c", "d", "broken"])
    tokens = chance.randint(1, 30)
    # Few prompts, so that prefixes meet.
    prompt = [chance.randrange(2)] * chance.randint(1, 20) + chance.choices(range(VOCAB), k=chance.randint(0, 14))
    at = chance.choice([0, 0, chance.randrange(len(prompt))]) if adapter else 0
    invocation = tuple(prompt[at : at + 1]) if at else ()
    made = NewSequence(
        name,
        tuple(prompt),
        invoked_at=at,
        adapter=AdapterSource(adapter, f"/adapters/{adapter}", invocation=invocation) if adapter else None,
        sampling=SamplingParams(presence_penalty=chance.choice([0.0, 0.0, 1.0])),
        stopping=StoppingParams(
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


class SchedulerWalk:
    """Walk a scheduler; the model checks every step, `go` every operation and the end."""

    def __init__(
        self, chance: random.Random, loads: Any, blocks: int, *, ahead: bool, drafts: random.Random | None = None
    ) -> None:
        self.chance = chance
        self.loads = loads
        self.model = PagedModel(loads, replace(LIMITS, blocks=blocks), ahead=ahead)
        if drafts is not None:
            probability = drafts.choice((0.3, 0.95))
            self.model.scheduler.drafter = Prophet(lambda one: oracle(one.spec)[0], VOCAB, probability, drafts)
        self.added = 0
        self.dropped: set[str] = set()

    def go(self) -> None:
        """Walk to the end, where nothing is left. Walks differ in how often each operation comes."""
        good = [self.add, self.finish_load, self.step, self.few_steps]
        bad = [self.abort, self.fail, self.run_out_of_memory]
        weights = [self.chance.choice([1, 2, 4]) for _ in good] + [self.chance.choice([0, 0, 1]) for _ in bad]
        for operation in self.chance.choices(good + bad, weights, k=LENGTH):
            operation()
            self.model.check()
        self.finish()

    @property
    def living(self) -> list[str]:
        return [name for name in self.model.answers if name not in self.model.ended and name not in self.dropped]

    def add(self) -> None:
        if len(self.living) < 12:
            self.model.add(random_spec(self.chance, f"s{self.added}"))
            self.added += 1

    def abort(self) -> None:
        if living := self.living:
            name = self.chance.choice(living)
            self.model.scheduler.abort(name)
            self.dropped.add(name)

    def fail(self) -> None:
        if living := self.living:
            name = self.chance.choice(living)
            self.model.take(self.model.scheduler.fail([name], NAN_LOGITS))
            self.dropped.add(name)

    def finish_load(self) -> None:
        if self.loads.loading():
            self.loads.finish_load()

    def step(self) -> None:
        self.model.step()

    def few_steps(self) -> None:
        for _ in range(4):
            self.model.step()

    def run_out_of_memory(self) -> None:
        self.model.step(fits=False)

    def finish(self) -> None:
        self.model.run_until_idle()
        self.model.assert_idle()
        for name in self.model.answers.keys() - self.dropped:
            failure = self.model.failures.get(name)
            if failure is None:
                self.model.assert_right(name)
            else:
                assert failure.reason in ("ADAPTER_UNLOADABLE", "OUT_OF_MEMORY")
        self.loads.close()


@pytest.mark.parametrize(("ahead", "blocks", "most"), [(True, 16, 2), (False, 24, 64), *AT_NIGHT])
def test_random_walks(gated_loads: Any, ahead: bool, blocks: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "PASSED_OVER_MOST", most)
    seen: Counter[str] = Counter()
    for seed in range(WALKS):
        print(f"seed {seed}")
        loads = gated_loads(LIMITS.adapter_slots, frozenset(["broken"]))
        drafts = random.Random(seed) if seed % 3 else None
        walk = SchedulerWalk(random.Random(seed), loads, blocks, ahead=ahead, drafts=drafts)
        walk.go()
        seen.update(finish.name for finish in walk.model.ended.values())
        seen.update(failure.reason for failure in walk.model.failures.values())
        stats = walk.model.scheduler.stats()
        seen.update(accepted=stats.accepted, refused=stats.drafted - stats.accepted)
    print(seen)
    assert {"END", "STOP", "LENGTH", "ADAPTER_UNLOADABLE", "OUT_OF_MEMORY"} <= seen.keys()
    assert min(seen["accepted"], seen["refused"]) > 100
