"""Whose answers drafts come from, and how long drafts are by measured times and acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.grammars.matching import compile_grammar, hash_vocabulary
from loraplex.contracts.options import StoppingParams
from loraplex.speculation.drafter import SuffixDrafter
from loraplex.speculation.gain import Acceptance, Gain
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.grammars import GrammarState
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, NewSequence, Removal, Speculation

ANSWER = (50, 51, 52, 53, 54, 55, 56, 57)


def sequence(prompt: tuple[int, ...], tenant: str = "acme", adapter: str = "", **fields: Any) -> Sequence:
    source = AdapterSource(adapter, "") if adapter else None
    fields.setdefault("stopping", StoppingParams(1000, ignore_eos=True))
    return Sequence(NewSequence("a", prompt, adapter=source, tenant=tenant, **fields), 0, frozenset([2]))


def answered(drafter: SuffixDrafter, tenant: str, adapter: str = "", **fields: Any) -> None:
    """Let a sequence end with the answer."""
    one = sequence((9, 8, 7), tenant, adapter, emitted_ids=ANSWER, **fields)
    drafter.end(one)


class Clocked(SuffixDrafter):
    """A drafter whose clock is set."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(Speculation(num_speculative_tokens=5), lambda: self.now)


def step(drafter: Clocked, rows: int, seconds: float, drafted: int = 0) -> None:
    some = [Row(sequence((1, 2)), 1, 1, samples=True) for _ in range(rows - drafted)]
    drafts = [Row(sequence((1, 2)), 2, 1, samples=True, draft=(3,), place=1) for _ in range(drafted)]
    drafter.now += seconds
    drafter.observe(Batch((*some, *drafts), rows, rows))


@pytest.fixture
def drafter() -> Clocked:
    """One that has measured steps of a row: more rows take as long."""
    drafter = Clocked()
    for _ in range(3):
        step(drafter, 1, 0.01)
    return drafter


def draft(drafter: Clocked, one: Sequence, free: int = 30) -> list[int]:
    return drafter.propose([one], 1, free)[0]


def test_drafts_come_from_the_prompt_and_from_answers_of_the_same_tenant_and_adapter(drafter: Clocked) -> None:
    assert draft(drafter, sequence((5, 6, 20, 21, 22, 7, 5, 6, 20))) == [21, 22, 7, 5, 6]
    asks = (1, 50, 51, 52)
    assert draft(drafter, sequence(asks)) == []
    answered(drafter, "acme", "sha256:one")
    for tenant, adapter in (("acme", ""), ("acme", "sha256:two"), ("globex", "sha256:one"), ("globex", "")):
        assert draft(drafter, sequence(asks, tenant, adapter)) == [], (tenant, adapter)
    assert draft(drafter, sequence(asks, "acme", "sha256:one")) == [53, 54, 55, 56, 57]


def test_an_answer_that_takes_no_drafts_gives_none(drafter: Clocked) -> None:
    answered(drafter, "acme", speculate=False)
    assert draft(drafter, sequence((1, 50, 51, 52))) == []


def test_a_purge_forgets_answers_those_of_sequences_that_run_as_they_end(drafter: Clocked) -> None:
    for tenant, adapter in (("acme", ""), ("acme", "gone"), ("acme", "kept"), ("globex", "gone"), ("globex", "kept")):
        answered(drafter, tenant, adapter)
    running = sequence((9, 8), "acme", emitted_ids=ANSWER)
    other = sequence((9, 8), "globex", "kept", emitted_ids=ANSWER)
    assert drafter.forget_tenant("acme", ("kept",), [running, other]) == Removal(4, 1)
    drafter.end(running)
    for tenant, adapter, kept in (("acme", "", False), ("acme", "kept", False), ("globex", "gone", False)):
        assert bool(draft(drafter, sequence((1, 50, 51, 52), tenant, adapter))) == kept, (tenant, adapter)
    assert draft(drafter, sequence((1, 50, 51, 52), "globex", "kept"))


def test_a_draft_has_no_end_token_and_no_more_than_the_answer_may_have(drafter: Clocked) -> None:
    prompt = (5, 6, 20, 2, 22, 7, 5, 6)
    assert draft(drafter, sequence(prompt, stopping=StoppingParams(100))) == [20]
    assert draft(drafter, sequence(prompt, stopping=StoppingParams(100, ignore_eos=True))) == [20, 2, 22, 7, 5]
    assert draft(drafter, sequence(prompt, stopping=StoppingParams(3, ignore_eos=True))) == [20, 2]
    assert draft(drafter, sequence(prompt, stopping=StoppingParams(1, ignore_eos=True))) == []


def test_a_long_prompt_is_indexed_in_parts(drafter: Clocked) -> None:
    prompt = (*range(3, 6000), 10, 11)
    one = sequence(prompt)
    assert draft(drafter, one) == []
    step(drafter, 1, 0.01)
    assert draft(drafter, one) == [12, 13, 14, 15, 16]


def test_answers_that_have_ended_are_indexed_in_parts(drafter: Clocked) -> None:
    for _ in range(2):  # they end in one step
        drafter.end(sequence((9, 8, 7), emitted_ids=(*range(100, 4100), *ANSWER)))
    asks = (1, 50, 51, 52)
    assert draft(drafter, sequence(asks)) == [53, 54, 55, 56, 57]
    drafter.end(sequence((9, 8, 7), emitted_ids=(60, 61, 62, 63)))
    assert draft(drafter, sequence((1, 60, 61))) == []
    step(drafter, 1, 0.01)
    assert draft(drafter, sequence((1, 60, 61))) == [62, 63]


def test_adapters_without_number_take_no_memory_without_end(drafter: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted sets have a digest for each weight; most of these have no answer that is kept."""
    monkeypatch.setattr("loraplex.speculation.drafter._ALL_BYTES", 1 << 20)
    for number in range(1000):
        draft(drafter, sequence((1, 50, 51), "acme", f"sha256:{number}"))
    assert len(drafter._owners) < 400
    answered(drafter, "acme", "sha256:999")
    assert draft(drafter, sequence((1, 50, 51, 52), "acme", "sha256:999"))
    drafter.forget_tenant("acme", (), [])
    assert drafter._bytes == 0


def test_wrong_drafts_end_drafts_and_right_ones_that_were_not_run_begin_them_again(drafter: Clocked) -> None:
    for rows in (2, 3, 4, 5, 6):  # each row costs something
        for _ in range(3):
            step(drafter, rows, 0.01 + 0.0001 * rows, drafted=1)
    text = (5, 6, 20, 21, 22, 23, 24, 25, 26, 27)
    one = sequence((*text, *text[:2]))
    assert draft(drafter, one)
    for _ in range(50):
        drafter.learn(one, 1, 0)
    assert draft(drafter, one) == []
    for number in range(40):
        again = sequence((*text, *text[:2]), stopping=StoppingParams(100, ignore_eos=True))
        begun = draft(drafter, again)
        again.ids += text[2:4]
        draft(drafter, again)
        print(number, begun)
    assert begun


def test_drafts_that_are_never_run_end_too(drafter: Clocked) -> None:
    """A format may allow none of them, and a step that waits for them would wait each time."""
    for rows in (2, 3, 4, 5, 6):
        for _ in range(3):
            step(drafter, rows, 0.01 + 0.0001 * rows, drafted=1)
    one = sequence((5, 6, 20, 21, 5, 6))
    assert draft(drafter, one)
    for number in range(30):
        one.ids += [1000 + number, 5, 6]
        drafts = draft(drafter, one)
    assert drafts == []


def test_none_that_a_format_does_not_allow_or_takes_long_to_check(
    drafter: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the processor time of the last id, which is measured once, as the grammar takes it."""
    vocabulary, letter, calls = hash_vocabulary(parse_hash_model("hash:?vocab=600&end_after=9")), ord("a"), count()
    for text, id_s, expected in (("b", 0.0, []), ("a", 0.0003, [letter] * 5), ("a", 0.0005, [])):
        clock = SimpleNamespace(thread_time=lambda id_s=id_s: id_s * next(calls))
        monkeypatch.setattr("loraplex.worker.engine.scheduling.grammars.time", clock)
        monkeypatch.setattr("loraplex.speculation.drafter.time", clock, raising=False)
        one = sequence((letter,) * 20)
        assert draft(drafter, one) == [letter] * 5
        grammar = compile_grammar(vocabulary.tokens, f'start: "a" "{text}"*\n')
        one.grammar = GrammarState(grammar, vocabulary, StoppingParams())
        assert one.grammar.advance(letter) is None
        taken = next(calls)
        assert draft(drafter, one) == expected
        assert next(calls) == taken + 1, "the drafter does not measure"


def test_none_where_few_rows_are_free(drafter: Clocked) -> None:
    assert drafter.propose([sequence((5, 6, 20, 21, 5, 6))] * 30, 30, 2) == [[]] * 30


def measured(plain: dict[int, float], drafting: dict[int, float]) -> Gain:
    """Return gains by the seconds of steps without drafts, by their rows, and of steps of a row with drafts."""
    gain = Gain()
    for _ in range(3):
        for rows, seconds in plain.items():
            gain.observe(rows, 0, seconds)
        for rows, seconds in drafting.items():
            gain.observe(1, rows - 1, seconds)
    return gain


def test_lengths_give_most_tokens_a_second() -> None:
    # Nothing is known: no drafts, so that a plain step is measured.
    assert Gain().lengths(1, 8, [(8, 0.9)]) == [0]
    # All rows take as long: everything is worth it that is likely at all.
    assert measured({1: 1.0}, {}).lengths(1, 31, [(8, 0.9)]) == [8]
    assert measured({1: 1.0}, {}).lengths(1, 3, [(8, 0.9)]) == [3]
    # From 5 rows on a step takes twice as long.
    cliff = measured({1: 1.0}, {rows: 1.0 if rows <= 4 else 2.0 for rows in range(2, 10)})
    assert cliff.lengths(1, 31, [(8, 0.6)]) == [3]
    assert cliff.lengths(1, 31, [(8, 0.99)]) == [8]
    # A row costs a third of the first: only likely ids.
    dear = measured({1: 1.0, 2: 2.0}, {rows: 1.0 + rows / 3 for rows in range(2, 10)})
    assert dear.lengths(1, 31, [(8, 0.3)]) == [0]
    # Rows go to the likelier drafts.
    two = measured({2: 1.0}, {})
    assert two.lengths(2, 4, [(8, 0.5), (8, 0.95)]) == [0, 4]


def test_steps_with_drafts_that_wait_for_the_host_must_be_worth_that_too() -> None:
    ahead = measured({4: 1.0}, dict.fromkeys(range(5, 13), 1.5))
    assert ahead.lengths(4, 28, [(1, 0.9)]) == [0]
    assert sum(ahead.lengths(4, 28, [(8, 0.9)] * 4)) > 8


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    gain = measured({1: 1.0}, {2: 1.0})
    gain.observe(1, 0, 1.0)
    for _ in range(32):
        assert gain.lengths(1, 31, [(1, 0.9)]) == [1]
        gain.observe(1, 1, 1.0)
    assert gain.lengths(1, 31, [(1, 0.9)]) == [0]
    gain.observe(1, 0, 1.0)
    assert gain.lengths(1, 31, [(1, 0.9)]) == [1]


def test_more_rows_than_were_ever_measured_are_tried_by_steps() -> None:
    gain = measured({4: 1.0}, {})
    assert sum(gain.lengths(4, 28, [(8, 0.95)] * 4)) == 8
    for _ in range(2):
        gain.observe(4, 8, 3.0)
    assert sum(gain.lengths(4, 28, [(8, 0.95)] * 4)) == 0
    for _ in range(256):
        gain.observe(4, 0, 1.0)
    assert sum(gain.lengths(4, 28, [(8, 0.95)] * 4)) == 4, "some are tried again"


def delays(progress: float, chance: random.Random) -> float:
    """Other work takes the processor half of the time, and delays three steps in ten severalfold."""
    return 1 + (progress % 300 > 150 and chance.random() < 0.3) * chance.uniform(0.5, 6)


def slower(progress: float, chance: random.Random) -> float:
    """The processor is slower half of the time."""
    return (1 + (progress % 300 > 150)) * chance.uniform(0.9, 1.2)


@pytest.mark.parametrize("others", [delays, slower])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_answers_are_no_slower_with_drafts_where_other_work_delays_steps(
    others: Callable[[float, random.Random], float], rate: float
) -> None:
    """Rows cost a tenth or a quarter of a step each, and drafts are seldom right."""
    for seed, rows, row_s in product(range(3), (4, 8), (0.1, 0.25)):
        chance, gain, acceptance = random.Random(seed), Gain(), Acceptance(0.6)
        tokens, seconds, steps = 0, 0.0, 1000
        for _ in range(steps):
            drafts = [(chance.randrange(1, 9), acceptance.rate) for _ in range(rows) if chance.random() < 0.6]
            lengths = gain.lengths(rows, 32 - rows, drafts)
            took = 1 + row_s * (rows + sum(lengths))
            gain.observe(rows, sum(lengths), took * others(seconds, chance))
            seconds += took
            tokens += rows
            for length in filter(None, lengths):
                right = next((place for place in range(length) if chance.random() >= rate), length)
                acceptance.learn(right + (right < length), right)
                tokens += right
        speed = tokens / (rows * steps) / (seconds / (steps * (1 + row_s * rows)))
        assert speed >= 0.98, (seed, rows, row_s)
