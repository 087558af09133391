"""Rows shared by tenants: who waits below its share takes a row of who is above it, and no token changes by that."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.worker.engine.scheduling.paged_model import LIMITS, PagedModel, spec

RUN_TOKENS = 3
TENANTS = {"greedy": 1.0, "other": 1.0, "heavy": 2.0}


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def model(gated_loads: Any, request: pytest.FixtureRequest) -> Iterator[PagedModel]:
    loads = gated_loads(LIMITS.adapter_slots, frozenset())
    limits = replace(LIMITS, rows=6, blocks=60)
    yield PagedModel(loads, limits, step_tokens=40, ahead=request.param, run_tokens=RUN_TOKENS)
    loads.close()


def add(model: PagedModel, tenant: str, count: int, tokens: int = 40, prompt: int = 5) -> list[str]:
    """Add sequences of a tenant; returns their names."""
    names = [f"{tenant} {len(model.specs) + number}" for number in range(count)]
    for name in names:
        model.add(spec(name, prompt, tokens, tenant=tenant, weight=TENANTS[tenant]))
    return names


def rows(model: PagedModel) -> Counter[str]:
    """Count the running sequences of each tenant."""
    return Counter(sequence.spec.tenant for sequence in model.scheduler._running.in_rank)


def steps(model: PagedModel, count: int) -> None:
    for _ in range(count):
        model.step()


def test_a_tenant_below_its_share_gets_rows_at_once_and_no_more_than_its_share(model: PagedModel) -> None:
    greedy = add(model, "greedy", 6)
    steps(model, 10)
    other = add(model, "other", 5)
    steps(model, 2)
    assert rows(model)["other"] >= 1
    steps(model, 10)
    assert rows(model) == {"greedy": 3, "other": 3}
    preempted = model.scheduler.stats().preemptions
    assert preempted == 3
    # Neither takes a row from the other again.
    steps(model, 10)
    assert model.scheduler.stats().preemptions == preempted
    model.run_until_idle()
    for name in (*greedy, *other):
        model.assert_right(name)


def test_a_tenant_of_twice_the_weight_gets_twice_the_rows(model: PagedModel) -> None:
    add(model, "greedy", 6)
    steps(model, 10)
    heavy = add(model, "heavy", 6)
    steps(model, 12)
    assert rows(model) == {"greedy": 2, "heavy": 4}
    model.run_until_idle()
    for name in heavy:
        model.assert_right(name)


def test_nobody_is_preempted_before_it_has_made_some_tokens(model: PagedModel) -> None:
    add(model, "greedy", 6)
    model.step()
    add(model, "other", 1)
    while not model.scheduler.stats().preemptions:
        model.step()
    stopped = [one for one in model.specs if one not in model.rows_of_last and one not in model.ended]
    assert all(len(model.answers[name]) >= RUN_TOKENS for name in stopped)


def test_whoever_lacks_blocks_takes_them_too_and_keeps_them(gated_loads: Any) -> None:
    """Few blocks: rows are free, memory is not."""
    loads = gated_loads(LIMITS.adapter_slots, frozenset())
    model = PagedModel(loads, replace(LIMITS, rows=6, blocks=24), step_tokens=40, run_tokens=RUN_TOKENS)
    greedy = add(model, "greedy", 4, tokens=40, prompt=12)
    steps(model, 12)
    (other,) = add(model, "other", 1, tokens=20, prompt=20)
    steps(model, 2)
    running = model.scheduler._running.in_rank
    while other not in model.ended:
        assert other in [sequence.sequence_id for sequence in running], "the greedy tenant's blocks grew at its cost"
        model.step()
    model.run_until_idle()
    for name in (*greedy, other):
        model.assert_right(name)
    loads.close()


def test_who_cannot_get_all_that_it_lacks_preempts_nobody(model: PagedModel) -> None:
    add(model, "greedy", 3, tokens=40, prompt=20)
    add(model, "other", 3, tokens=40, prompt=20)
    steps(model, 6)
    add(model, "other", 1, tokens=2, prompt=60)
    steps(model, 6)
    assert model.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("seed", range(20))
def test_whoever_comes_a_tenant_below_its_share_waits_few_steps_and_every_answer_is_right(
    gated_loads: Any, seed: int
) -> None:
    """Once it is first, for as long as others run their least tokens, and their prompts before; then it runs."""
    chance = random.Random(seed)
    loads = gated_loads(LIMITS.adapter_slots, frozenset())
    limits = replace(LIMITS, rows=6, blocks=chance.choice([60, 100]))
    model = PagedModel(loads, limits, step_tokens=40, ahead=seed % 2 == 1, run_tokens=RUN_TOKENS)
    waits: Counter[str] = Counter()
    for _ in range(150):
        if chance.random() < 0.2:
            add(model, chance.choice(list(TENANTS)), 1, tokens=chance.randint(1, 40), prompt=chance.randint(1, 20))
        model.step()
        now = rows(model)
        waiting = {one.spec.tenant for one in model.scheduler._sequences.values()} - now.keys()
        # Without any row, and another tenant has two more than one in proportion.
        below = {t for t in waiting if max(((n - 1) / TENANTS[o] for o, n in now.items()), default=0) >= 1 / TENANTS[t]}
        waits = Counter({tenant: waits[tenant] + 1 for tenant in below})
        assert max(waits.values(), default=0) <= 4 * (RUN_TOKENS + 2)
        model.check()
    model.run_until_idle()
    model.assert_idle()
    for name in model.specs:
        model.assert_right(name)
    loads.close()
