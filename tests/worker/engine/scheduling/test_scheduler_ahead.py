"""Test a scheduler that is asked for the next step before this one's ids are known, or can't be run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import Failure, NewSequence
from tests.worker.engine.scheduling.paged_model import LIMITS, VOCAB, PagedModel, Prophet, oracle, spec

ENDLESS = StoppingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def model(gated_loads: Any) -> Iterator[PagedModel]:
    loads = gated_loads(LIMITS.adapter_slots)
    yield PagedModel(loads, ahead=True)
    loads.close()


def scheduled(model: PagedModel) -> Batch:
    batch = model.scheduler.schedule()
    assert batch
    return batch


def names(batch: Batch) -> list[str]:
    return [row.sequence.sequence_id for row in batch.rows]


def test_the_next_step_is_scheduled_with_a_placeholder(model: PagedModel) -> None:
    model.add(spec("a", prompt=5, tokens=3))
    prefill = scheduled(model)
    sampled = model.run(prefill)
    [row] = scheduled(model).rows
    assert (row.start, row.count, row.samples, row.last_is_placeholder) == (5, 1, True, True)
    [output] = model.scheduler.commit(prefill, sampled)
    assert output.token_ids == oracle(model.specs["a"])[0][:1]
    assert not row.last_is_placeholder


def test_nothing_is_scheduled_after_the_last_token(model: PagedModel) -> None:
    model.add(spec("a", prompt=5, tokens=2))
    batches = [scheduled(model), scheduled(model)]
    assert model.scheduler.schedule() is None
    for batch in batches:
        model.take(model.scheduler.commit(batch, model.run(batch)))
    model.assert_right("a")
    model.assert_idle()


def test_a_row_whose_choice_depends_on_ids_is_in_every_step_too(model: PagedModel) -> None:
    """They are committed before the next step samples."""
    model.add(spec("free"))
    model.add(spec("penalized", prompt=2, sampling=SamplingParams(repetition_penalty=1.1)))
    model.add(spec("bad words", prompt=2, sampling=SamplingParams(bad_word_ids=((3, 4),))))
    for _ in range(3):
        assert set(names(scheduled(model))) == {"free", "penalized", "bad words"}


def test_what_follows_a_stop_token_is_dropped(model: PagedModel) -> None:
    whole = spec("whole", tokens=20)
    answer, _ = oracle(whole)
    place = next(place for place in range(2, 20) if answer[place] not in answer[:place])
    stopping = StoppingParams(max_tokens=20, stop_token_ids=(answer[place],), ignore_eos=True)
    model.add(NewSequence("a", whole.prompt_ids, stopping=stopping))
    model.add(spec("b", tokens=30))
    while "a" not in model.ended:
        model.step()
    # A row of it is in flight still, whose blocks are free again.
    assert model.in_flight
    assert "a" in names(model.in_flight[0])
    model.check()
    model.run_until_idle()
    model.assert_right("a")
    model.assert_right("b")


def test_what_was_in_flight_of_an_aborted_sequence_is_not_taken_for_its_namesakes(model: PagedModel) -> None:
    model.add(spec("a", tokens=9))
    batch = scheduled(model)
    sampled = model.run(batch)
    model.scheduler.abort("a")
    model.add(spec("a", prompt=7, tokens=9))
    model.scheduler.schedule()
    not_a_number = Failure("INTERNAL", "NAN_LOGITS", "not a number")
    assert model.scheduler.commit(batch, sampled, failures={batch.rows[0]: not_a_number}) == []


def test_what_was_in_flight_before_a_preemption_is_dropped_though_the_sequence_runs_again(model: PagedModel) -> None:
    for name in ("a", "b"):
        model.add(spec(name, tokens=9))
    before = scheduled(model)
    sampled = model.run(before)
    model.scheduler.revoke(scheduled(model))
    model.scheduler.abort("a")
    [again] = scheduled(model).rows
    assert again.sequence is before.rows[1].sequence
    assert (again.start, again.sequence.placeholders) == (0, 1)
    assert model.scheduler.commit(before, sampled) == []
    assert again.sequence.placeholders == 1


def test_a_stop_token_ends_an_answer_as_soon_as_it_may(model: PagedModel) -> None:
    whole = spec("whole", tokens=20)
    answer, _ = oracle(whole)
    place = next(place for place in range(2, 20) if answer[place] not in answer[:place])
    stopping = StoppingParams(max_tokens=20, min_tokens=place, stop_token_ids=(answer[place],), ignore_eos=True)
    model.add(NewSequence("a", whole.prompt_ids, stopping=stopping))
    model.run_until_idle()
    assert tuple(model.answers["a"]) == answer[: place + 1]
    model.assert_right("a")


def test_an_answer_is_found_in_the_prefix_cache(model: PagedModel) -> None:
    first = spec("first", prompt=6, tokens=30)
    model.add(first)
    model.run_until_idle()
    model.add(NewSequence("second", (*first.prompt_ids, *model.answers["first"]), stopping=StoppingParams(4)))
    cached = [output.cached_tokens for _ in range(5) for output in model.step()]
    # The last token of the answer was never computed.
    assert cached[0] == (6 + 30 - 1) // LIMITS.block_size * LIMITS.block_size


def test_what_was_in_flight_of_a_preempted_sequence_is_sampled_again(model: PagedModel) -> None:
    for name in ("a", "b", "c", "d"):
        model.add(spec(name, prompt=16, tokens=40))
    lost = 0
    while model.has_work():
        before = model.in_flight
        lengths = {name: len(answer) for name, answer in model.answers.items()}
        model.step()
        sampling = [row for row in before[0].rows if row.samples] if before else []
        lost += sum(
            len(model.answers[row.sequence.sequence_id]) == lengths[row.sequence.sequence_id] for row in sampling
        )
    assert lost > 0, "the blocks were to be so few that rows in flight are preempted"
    for name in ("a", "b", "c", "d"):
        model.assert_right(name)


# ---- memory


def test_chunks_for_which_memory_is_not_enough_are_halved(model: PagedModel) -> None:
    model.add(spec("decodes", prompt=1, stopping=ENDLESS))
    model.step()
    model.step()
    model.add(spec("long", prompt=40, tokens=2))
    model.step(fits=False)
    assert model.rows_of_last == {"decodes": 1, "long": 11}
    model.step(fits=False)
    assert model.rows_of_last == {"decodes": 1, "long": 5}
    while "long" not in model.ended:
        model.step()
        assert model.rows_of_last.get("long", 0) <= 2
    model.assert_right("long")
    assert model.scheduler.stats().rows_running == 1
    # It was lifted with the end of one.
    model.add(spec("later", prompt=40, tokens=2))
    model.step()
    assert model.rows_of_last["later"] == 4
    model.run_until_idle()
    for name in ("decodes", "later"):
        model.assert_right(name)


def test_of_decodes_for_which_memory_is_not_enough_the_last_in_rank_goes(model: PagedModel) -> None:
    for name in ("a", "b", "c"):
        model.add(spec(name, prompt=3, tokens=12, priority=name == "c"))
    for _ in range(3):
        model.step()
    model.step(fits=False)
    for _ in range(5):
        model.step()
        assert set(model.rows_of_last) == {"a", "c"}, "what was preempted was to wait for a place"
    model.run_until_idle()
    for name in ("a", "b", "c"):
        model.assert_right(name)
    model.assert_idle()


def test_rows_that_have_ended_since_are_no_part_of_a_batch_that_is_revoked(model: PagedModel) -> None:
    """Memory may lack when a step samples, after the step before it was committed."""
    stopping = StoppingParams(max_tokens=20, stop_token_ids=oracle(spec("stops", tokens=1))[0], ignore_eos=True)
    model.add(spec("stops", stopping=stopping))
    model.add(spec("stays", tokens=9))
    first = scheduled(model)
    sampled = model.run(first)
    second = scheduled(model)
    assert set(names(second)) == {"stops", "stays"}
    model.spoil(second)
    model.take(model.scheduler.commit(first, sampled))
    assert list(model.ended) == ["stops"]
    # The other is alone now, and alone it does not fit.
    model.take(model.scheduler.revoke(second))
    assert model.failures["stays"].reason == "OUT_OF_MEMORY"
    model.assert_idle()


def test_one_for_which_memory_is_not_enough_alone_fails(model: PagedModel) -> None:
    for name in ("a", "b"):
        model.add(spec(name, prompt=1, tokens=12))
    model.step()
    for _ in range(2):
        model.step(fits=False)
    assert model.ended == {"a": FinishReason.FAILED}
    assert (model.failures["a"].code, model.failures["a"].reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    model.run_until_idle()
    model.assert_right("b")
    model.assert_idle()


class Eager(Prophet):
    """A Drafter that drafts for the first sequence in every step, as much as it may."""

    def __init__(self) -> None:
        super().__init__(lambda one: oracle(one.spec)[0], VOCAB, 1.0, random.Random(1))

    def propose(self, sequences: list[Sequence], rows: int, free: int) -> list[list[int]]:
        first, *others = sequences
        return [[*self._answer(first)][first.answered :][:free], *([] for _ in others)]


def test_a_step_is_not_waited_for_because_of_drafts_while_prompts_are_computed(model: PagedModel) -> None:
    """The next step has none then."""

    def waits() -> bool:
        assert model.in_flight
        return model.scheduler.needs_ids_of(model.in_flight[0])

    model.scheduler.drafter = Eager()
    model.add(spec("a", prompt=2, stopping=ENDLESS))
    model.step()
    model.step()
    assert waits()
    model.add(spec("b", prompt=30, tokens=9))
    assert not waits()
    model.step()
    assert not waits()
    while model.scheduler._running.in_rank[1].computed < 30:
        model.step()
    model.step()
    assert waits()
    model.run_until_idle()
    model.assert_right("a")
    model.assert_right("b")


def test_memory_that_lacks_for_drafts_leaves_rows_to_others(model: PagedModel) -> None:
    model.scheduler.drafter = Eager()
    model.add(spec("a", prompt=2, stopping=ENDLESS))
    while not model.scheduler.stats().drafts:
        model.step()
    model.step(fits=False)
    model.add(spec("b", prompt=2, tokens=9))
    model.run_until_idle()
    assert list(model.ended) == ["b", "a"]
    model.assert_right("a")
    model.assert_right("b")
