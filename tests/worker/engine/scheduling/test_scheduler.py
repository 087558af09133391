"""The scheduler against a paged model whose tokens tell every mix-up, case by case and in both modes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from loraplex.contracts.options import FinishReason, StoppingParams
from loraplex.worker.engine_api import Failure, NewSequence, SequenceRefusedError
from tests.worker.engine.scheduling.paged_model import END, LIMITS, PagedModel, oracle, spec


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def model(gated_loads: Any, ahead: bool) -> Iterator[PagedModel]:
    loads = gated_loads(LIMITS.adapter_slots, frozenset(["broken"]))
    yield PagedModel(loads, ahead=ahead)
    loads.close()


# ---- batching


def test_a_long_prompt_does_not_stop_the_others(model: PagedModel) -> None:
    for name in ("a", "b"):
        model.add(spec(name, tokens=30))
    model.step()
    model.add(spec("long", prompt=50, tokens=2))
    while "long" not in model.ended:
        model.step()
        assert model.rows_of_last["a"] == model.rows_of_last["b"] == 1
    model.assert_right("long")


def test_prompts_share_a_step_and_its_tokens(model: PagedModel) -> None:
    for name in ("a", "b", "c"):
        model.add(spec(name, prompt=5))
    model.step()
    assert model.rows_of_last == {"a": 5, "b": 5, "c": 2}


def test_tenants_prompts_get_equal_shares_of_a_step(model: PagedModel) -> None:
    model.add(replace(spec("long", prompt=50, tokens=2), tenant="a"))
    model.add(replace(spec("longs own", prompt=4, tokens=2), tenant="a"))
    model.step()
    assert model.rows_of_last == {"long": 12}
    model.add(replace(spec("short", prompt=4, tokens=2), tenant="b"))
    model.add(replace(spec("middle", prompt=20, tokens=2), tenant="c"))
    model.step()
    assert model.rows_of_last == {"short": 4, "middle": 4, "long": 4}
    model.step()
    assert model.rows_of_last == {"short": 1, "middle": 6, "long": 5}
    while len(model.ended) < 4:
        model.step()
    for name in ("long", "longs own", "short", "middle"):
        model.assert_right(name)


def test_who_waits_for_blocks_is_not_overtaken_by_another_tenant_with_more_rows(model: PagedModel) -> None:
    for name in ("x", "y"):
        model.add(replace(spec(name, prompt=4, tokens=30), tenant="b"))
    model.step()
    for name in ("long", "big"):
        model.add(replace(spec(name, prompt=44, tokens=2), tenant="a"))
    model.step()
    model.add(replace(spec("small", prompt=1, tokens=1), tenant="b"))
    while "long" not in model.ended:
        model.step()
        assert "small" not in model.rows_of_last


def test_higher_priority_goes_first_but_not_for_ever(model: PagedModel) -> None:
    model.add(spec("low", priority=-1))
    for number in range(3 * 64):
        model.add(spec(f"high{number}", tokens=3))
    order = []
    while "low" not in model.ended:
        order += [output.sequence_id for output in model.step() if output.finish]
    # The number that overtook it is the worth of one level, give or take the rows of a batch.
    assert 64 - 8 <= order.index("low") <= 64 + 8


def test_preemption_takes_the_newest_and_keeps_tokens_exact(model: PagedModel) -> None:
    for name in ("a", "b", "c", "d"):
        model.add(spec(name, prompt=16, tokens=40))
    preempted = set[str]()
    for _ in range(400):
        model.step()
        running = model.rows_of_last.keys()
        assert "a" in running or "a" in model.ended
        preempted |= {
            name for name in ("b", "c", "d") if model.answers[name] and name not in running | model.ended.keys()
        }
    assert "d" in preempted
    for name in ("a", "b", "c", "d"):
        model.assert_right(name)


def test_high_priority_keeps_its_blocks_though_it_came_last(model: PagedModel) -> None:
    for name in ("a", "b", "c"):
        model.add(spec(name, prompt=16, tokens=40))
    for _ in range(6):
        model.step()
    model.add(spec("d", prompt=4, tokens=40, priority=1))
    stopped = set[str]()
    while "d" not in model.ended:
        model.step()
        assert "d" in model.rows_of_last or "d" in model.ended
        stopped |= {"a", "b", "c"} - model.rows_of_last.keys() - model.ended.keys()
    assert stopped == {"b", "c"}


def test_who_waits_for_blocks_is_not_overtaken(model: PagedModel) -> None:
    for name in ("a", "b"):
        model.add(spec(name, prompt=30, tokens=20))
    for _ in range(6):
        model.step()
    model.add(spec("big", prompt=60, tokens=4))
    model.add(spec("small", prompt=1, tokens=1))
    while "big" not in model.ended:
        model.step()
        assert "small" not in model.ended or model.answers["big"]


# ---- adapters


def test_a_slow_adapter_delays_nobody_else(model: PagedModel) -> None:
    model.add(spec("waits", adapter="a"))
    model.add(spec("plain"))
    for _ in range(10):
        model.step()
    assert model.ended == {"plain": FinishReason.LENGTH}
    assert not model.scheduler.has_work()
    model.loads.finish_load()
    assert model.scheduler.has_work()
    first = (model.step() or model.step())[0]
    assert first.adapter_ms is not None
    assert first.adapter_ms > 0
    model.run_until_idle()
    model.assert_right("waits")


def test_a_broken_adapter_fails_its_sequences_alone(model: PagedModel) -> None:
    for name in ("x", "y"):
        model.add(spec(name, adapter="broken"))
    model.add(spec("plain"))
    model.loads.finish_load()
    outputs = {output.sequence_id: output for output in model.step()}
    for name in ("x", "y"):
        failure = outputs[name].failure
        assert outputs[name].finish is FinishReason.FAILED
        assert failure
        assert (failure.code, failure.reason, failure.field) == ("INTERNAL", "ADAPTER_UNLOADABLE", "adapter")
        assert "/adapters/broken is broken" in failure.message
    model.run_until_idle()
    model.assert_right("plain")
    model.assert_idle()


def test_a_third_adapter_gets_its_turn_among_two_busy_ones(model: PagedModel) -> None:
    """Two adapters with never ending work hold both slots; the third is served all the same."""
    numbers = itertools.count()

    def keep_busy() -> None:
        for adapter in ("a", "b"):
            busy = [name for name in model.answers if name.startswith(adapter) and name not in model.ended]
            for _ in range(4 - len(busy)):
                model.add(spec(f"{adapter}{next(numbers)}", tokens=10, adapter=adapter))

    keep_busy()
    for step in range(1000):
        if step == 20:
            model.add(spec("third", tokens=10, adapter="c"))
        if model.loads.loading():
            model.loads.finish_load()
        model.step()
        keep_busy()
        if "third" in model.ended:
            break
    model.assert_right("third")


def test_a_prompt_that_is_given_back_half_computed_goes_on_where_it_was(model: PagedModel) -> None:
    model.add(spec("long", prompt=50, tokens=2))
    for _ in range(3):
        model.step()
    model.scheduler.abort("long")
    model.add(replace(spec("long", prompt=50, tokens=2), sequence_id="again"))
    while "again" not in model.ended:
        model.step()
    assert model.scheduler.stats().prefix_hits >= 2 * 12 - LIMITS.block_size


def test_aborting_who_waits_drops_the_load(model: PagedModel) -> None:
    for adapter in ("a", "b", "c"):
        model.add(spec(adapter, adapter=adapter))
    for adapter in ("a", "b", "c"):
        model.scheduler.abort(adapter)
    for _ in range(2):
        model.loads.finish_load()
    model.step()
    assert not model.loads.loading()
    assert model.scheduler.stats().slots_used == 0
    model.assert_idle()


# ---- endings


def answer_of(model: PagedModel, made: NewSequence) -> tuple[list[int], FinishReason]:
    model.add(made)
    model.run_until_idle()
    model.assert_right(made.sequence_id)
    return model.answers[made.sequence_id], model.ended[made.sequence_id]


def test_stop_tokens_end_an_answer_but_not_before_min_tokens(model: PagedModel) -> None:
    answer, finish = answer_of(model, spec("whole", tokens=20))
    assert finish is FinishReason.LENGTH
    stop = answer[3]
    assert stop not in answer[:3]
    prompt = model.specs["whole"].prompt_ids
    stopping = StoppingParams(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)
    stopped, finish = answer_of(model, NewSequence("stopped", prompt, stopping=stopping))
    assert (stopped, finish) == (answer[:4], FinishReason.STOP)
    later, _ = answer_of(model, NewSequence("later", prompt, stopping=replace(stopping, min_tokens=4)))
    assert later[:3] == answer[:3]
    assert len(later) > 4
    assert stop not in later[:4]


def test_the_models_end_token_ends_an_answer_unless_ignored(model: PagedModel) -> None:
    ends = next(
        made
        for made in (spec(f"e{number}", stopping=StoppingParams(max_tokens=30)) for number in range(100))
        if 2 < len(oracle(made)[0]) < 20
    )
    answer, finish = answer_of(model, ends)
    assert (answer[-1], finish) == (END, FinishReason.END)
    goes_on = replace(ends, sequence_id="on", stopping=StoppingParams(max_tokens=30, ignore_eos=True))
    longer, finish = answer_of(model, goes_on)
    assert (longer[: len(answer)], finish, len(longer)) == (answer, FinishReason.LENGTH, 30)


@pytest.mark.parametrize(
    ("emitted", "stopping", "finish"),
    [
        ((1, 2, 3), StoppingParams(max_tokens=3), FinishReason.LENGTH),
        ((1, END), StoppingParams(max_tokens=9), FinishReason.END),
        ((1, 2), StoppingParams(max_tokens=9, stop_token_ids=(2,)), FinishReason.STOP),
    ],
)
def test_a_complete_answer_ends_without_a_token(
    model: PagedModel, emitted: tuple[int, ...], stopping: StoppingParams, finish: FinishReason
) -> None:
    model.add(NewSequence("done", (1,), emitted_ids=emitted, stopping=stopping))
    assert model.scheduler.has_work()
    [output] = model.step()
    assert (output.offset, output.token_ids, output.finish) == (len(emitted), (), finish)
    assert not model.scheduler.has_work()
    # Its name is free again.
    model.add(spec("done"))


def test_a_refused_sequence_leaves_no_trace(model: PagedModel) -> None:
    model.add(spec("taken"))
    for refused in (spec("taken"), spec("empty", prompt=0)):
        with pytest.raises(SequenceRefusedError):
            model.scheduler.add_sequence(refused)
    model.run_until_idle()
    model.assert_right("taken")
    model.assert_idle()


def test_the_last_token_needs_no_block(gated_loads: Any) -> None:
    loads = gated_loads(0)
    try:
        model = PagedModel(loads, replace(LIMITS, blocks=4, max_tokens=17, adapter_slots=0))
        model.add(spec("fits", prompt=7, tokens=10))
        model.run_until_idle()
        model.assert_right("fits")
    finally:
        loads.close()


def test_an_aborted_sequence_frees_all_it_holds(model: PagedModel) -> None:
    model.add(spec("running", adapter="a"))
    model.loads.finish_load()
    model.step()
    model.add(spec("parked", adapter="b"))
    assert model.scheduler.stats().slots_pinned == 1
    for name in ("running", "parked", "unknown"):
        model.scheduler.abort(name)
    model.assert_idle()


def test_a_sequence_aborted_during_its_step_is_skipped(model: PagedModel) -> None:
    for name in ("a", "b"):
        model.add(spec(name))
    batch = model.scheduler.schedule()
    assert batch
    sampled = model.run(batch)
    [failed] = model.scheduler.fail(["a"], Failure("INTERNAL", "NAN_LOGITS", "not a number"))
    assert failed.finish is FinishReason.FAILED
    assert [output.sequence_id for output in model.scheduler.commit(batch, sampled)] == ["b"]
