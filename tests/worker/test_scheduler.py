"""The scheduler against a paged model whose tokens tell every mix-up, in random walks and case by case."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from worker.lora import cache as cache_module
from worker.scheduling.batch import Batch
from worker.scheduling.contract import (
    AdapterSource,
    EngineLimits,
    Failure,
    FinishKind,
    NewSequence,
    Output,
    SequenceRefusedError,
    Stopping,
)
from worker.scheduling.scheduler import Scheduler

VOCAB = 50
END = VOCAB - 1
LIMITS = EngineLimits(rows=4, max_tokens=64, max_rank=8, vocab_size=VOCAB, block_size=4, blocks=24, adapter_slots=2)
STEP_TOKENS = 12


def link(previous: int, token: int) -> int:
    return zlib.crc32(bytes([token]), previous)


def next_token(state: int, banned: frozenset[int]) -> int:
    token = state % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def oracle(spec: NewSequence) -> tuple[tuple[int, ...], FinishKind]:
    """The whole answer and why it ends, without any scheduling."""
    stopping = spec.stopping
    ends = frozenset() if stopping.ignore_eos else frozenset([END])
    banned = ends | frozenset(stopping.stop_token_ids)
    state = zlib.crc32(spec.adapter.digest.encode() if spec.adapter else b"")
    for token in spec.prompt_ids:
        state = link(state, token)
    answer: list[int] = []
    while len(answer) < stopping.max_tokens:
        early = len(answer) < stopping.min_tokens
        token = next_token(state, banned if early else frozenset())
        answer.append(token)
        state = link(state, token)
        if not early and token in banned:
            return tuple(answer), FinishKind.END if token in ends else FinishKind.STOP_TOKEN
    return tuple(answer), FinishKind.LENGTH


class PagedModel:
    """Keeps in each KV place the hash of all ids up to it, and reads only what lies in a row's blocks."""

    def __init__(self, loads: Any, limits: EngineLimits = LIMITS, step_tokens: int = STEP_TOKENS) -> None:
        self.loads = loads
        self.limits = limits
        self.step_tokens = step_tokens
        self.scheduler = Scheduler(limits, [END], step_tokens, loads.cache)
        self.kv: dict[tuple[int, int], int] = {}
        self.specs: dict[str, NewSequence] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, FinishKind] = {}
        self.rows_of_last: dict[str, int] = {}

    def add(self, spec: NewSequence) -> None:
        self.scheduler.add(spec)
        self.specs[spec.sequence_id] = spec
        self.answers[spec.sequence_id] = list(spec.emitted_ids)

    def step(self) -> list[Output]:
        outputs = self.scheduler.poll()
        batch = self.scheduler.schedule()
        self.rows_of_last = {row.sequence.sequence_id: row.count for row in batch.rows} if batch else {}
        if batch:
            self.check_batch(batch)
            outputs += self.scheduler.commit(batch, self.run(batch))
        self.take(outputs)
        return outputs

    def run(self, batch: Batch) -> list[int]:
        sampled = []
        for row in batch.rows:
            sequence = row.sequence
            digest = sequence.spec.adapter.digest if sequence.spec.adapter else ""
            installed = self.loads.installed.get(sequence.adapter_slot, "")
            assert installed == digest, "the adapter of another"
            state = self.read(sequence.block_table, row.start - 1)
            if row.start == 0:
                state = zlib.crc32(digest.encode())
            for position in range(row.start, row.start + row.count):
                state = link(state, sequence.ids[position])
                size = self.limits.block_size
                self.kv[sequence.block_table[position // size], position % size] = state
            if row.samples:
                sampled.append(next_token(state, sequence.banned_ids()))
        return sampled

    def read(self, table: list[int], position: int) -> int:
        size = self.limits.block_size
        return self.kv[table[position // size], position % size] if position >= 0 else 0

    def check_batch(self, batch: Batch) -> None:
        counts = [row.count for row in batch.rows]
        assert batch.tokens == sum(counts) <= max(self.step_tokens, self.limits.rows)
        assert len(batch.rows) <= self.limits.rows
        assert len({row.sequence for row in batch.rows}) == len(batch.rows)
        assert all(count == 1 for count in counts[: batch.decodes])
        assert all(count > 1 for count in counts[batch.decodes :])
        for part in (batch.rows[: batch.decodes], batch.rows[batch.decodes :]):
            slots = [row.sequence.adapter_slot for row in part]
            assert slots == sorted(slots)
        for row in batch.rows:
            assert row.samples == (row.start + row.count == len(row.sequence.ids))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            name = output.sequence_id
            assert name not in self.ended, "an output after the end"
            answer = self.answers[name]
            assert output.offset == len(answer)
            assert (output.cached_tokens is None) == (output.adapter_ms is None)
            answer.extend(output.token_ids)
            if output.finish:
                self.ended[name] = output.finish

    def check(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert min(stats.blocks_free, stats.blocks_cached, stats.blocks_referenced, stats.rows_waiting) >= 0
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_referenced == self.limits.blocks
        assert stats.slots_pinned <= stats.slots_used <= self.limits.adapter_slots

    def run_until_idle(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if self.loads.loading():
                self.loads.finish_load()
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {steps} steps")

    def assert_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.rows_running, stats.rows_waiting, stats.blocks_referenced, stats.slots_pinned) == (0, 0, 0, 0)

    def assert_right(self, name: str) -> None:
        answer, finish = oracle(self.specs[name])
        assert (tuple(self.answers[name]), self.ended[name]) == (answer, finish)


@pytest.fixture
def model(gated_loads: Any) -> Iterator[PagedModel]:
    loads = gated_loads(LIMITS.adapter_slots, frozenset(["broken"]))
    yield PagedModel(loads)
    loads.close()


def spec(name: str, prompt: int = 5, tokens: int = 6, adapter: str = "", **fields: Any) -> NewSequence:
    """ignore_eos, so that its length is sure; the prompt is made of its name."""
    ids = tuple(random.Random(name).choices(range(VOCAB), k=prompt))
    source = AdapterSource(adapter, f"/adapters/{adapter}") if adapter else None
    fields = {"stopping": Stopping(max_tokens=tokens, ignore_eos=True)} | fields
    return NewSequence(name, ids, adapter=source, **fields)


# ---- random walks


def random_spec(chance: random.Random, name: str) -> NewSequence:
    adapter = chance.choice(["", "", "a", "b", "c", "d", "broken"])
    tokens = chance.randint(1, 30)
    made = NewSequence(
        name,
        # Few prompts, so that prefixes meet.
        tuple([chance.randrange(2)] * chance.randint(1, 20) + chance.choices(range(VOCAB), k=chance.randint(0, 14))),
        adapter=AdapterSource(adapter, f"/adapters/{adapter}") if adapter else None,
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


def walk(model: PagedModel, chance: random.Random, operations: int) -> set[str]:
    """Returns the names of those that were aborted or made to fail."""
    names = (f"s{number}" for number in itertools.count())
    dropped: set[str] = set()
    for _ in range(operations):
        choice = chance.random()
        living = [name for name in model.answers if name not in model.ended and name not in dropped]
        if choice < 0.2 and len(living) < 12:
            model.add(random_spec(chance, next(names)))
        elif choice < 0.25 and living:
            name = chance.choice(living)
            model.scheduler.abort(name)
            dropped.add(name)
        elif choice < 0.27 and living:
            name = chance.choice(living)
            model.take(model.scheduler.fail([name], Failure("INTERNAL", "NAN_LOGITS", "not a number")))
            dropped.add(name)
        elif choice < 0.35 and model.loads.loading():
            model.loads.finish_load()
        else:
            model.step()
        model.check()
    return dropped


@pytest.mark.parametrize("blocks", [16, 24, 60])
@pytest.mark.parametrize("patience", [2, 64])
def test_random_walks(gated_loads: Any, blocks: int, patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PATIENCE_POLLS", patience)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(integers(0, 1 << 32))
    def walks(seed: int) -> None:
        loads = gated_loads(LIMITS.adapter_slots, frozenset(["broken"]))
        try:
            model = PagedModel(loads, replace(LIMITS, blocks=blocks))
            dropped = walk(model, random.Random(seed), 250)
            model.run_until_idle()
            model.assert_idle()
            for name in model.answers.keys() - dropped:
                adapter = model.specs[name].adapter
                if adapter and adapter.digest == "broken" and model.ended[name] is FinishKind.FAILED:
                    continue
                model.assert_right(name)
        finally:
            loads.close()

    walks()


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


def test_higher_priority_goes_first_but_not_for_ever(model: PagedModel) -> None:
    model.add(spec("low", priority=-1))
    for number in range(3 * 64):
        model.add(spec(f"high{number}", tokens=3))
    order = []
    while "low" not in model.ended:
        order += [output.sequence_id for output in model.step() if output.finish]
    # It was overtaken by as many as one level is worth, give or take the rows of a batch.
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
        assert "d" in model.rows_of_last
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
    assert model.ended == {"plain": FinishKind.LENGTH}
    assert not model.scheduler.has_work()
    model.loads.finish_load()
    assert model.scheduler.has_work()
    first = model.step()[0]
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
        assert outputs[name].finish is FinishKind.FAILED
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


def answer_of(model: PagedModel, made: NewSequence) -> tuple[list[int], FinishKind]:
    model.add(made)
    model.run_until_idle()
    model.assert_right(made.sequence_id)
    return model.answers[made.sequence_id], model.ended[made.sequence_id]


def test_stop_tokens_end_an_answer_but_not_before_min_tokens(model: PagedModel) -> None:
    answer, finish = answer_of(model, spec("whole", tokens=20))
    assert finish is FinishKind.LENGTH
    stop = answer[3]
    assert stop not in answer[:3]
    prompt = model.specs["whole"].prompt_ids
    stopping = Stopping(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)
    stopped, finish = answer_of(model, NewSequence("stopped", prompt, stopping=stopping))
    assert (stopped, finish) == (answer[:4], FinishKind.STOP_TOKEN)
    later, _ = answer_of(model, NewSequence("later", prompt, stopping=replace(stopping, min_tokens=4)))
    assert later[:3] == answer[:3]
    assert len(later) > 4
    assert stop not in later[:4]


def test_the_models_end_token_ends_an_answer_unless_ignored(model: PagedModel) -> None:
    ends = next(
        made
        for made in (spec(f"e{number}", stopping=Stopping(max_tokens=30)) for number in range(100))
        if 2 < len(oracle(made)[0]) < 20
    )
    answer, finish = answer_of(model, ends)
    assert (answer[-1], finish) == (END, FinishKind.END)
    goes_on = replace(ends, sequence_id="on", stopping=Stopping(max_tokens=30, ignore_eos=True))
    longer, finish = answer_of(model, goes_on)
    assert (longer[: len(answer)], finish, len(longer)) == (answer, FinishKind.LENGTH, 30)


@pytest.mark.parametrize(
    ("emitted", "stopping", "finish"),
    [
        ((1, 2, 3), Stopping(max_tokens=3), FinishKind.LENGTH),
        ((1, END), Stopping(max_tokens=9), FinishKind.END),
        ((1, 2), Stopping(max_tokens=9, stop_token_ids=(2,)), FinishKind.STOP_TOKEN),
    ],
)
def test_a_complete_answer_ends_without_a_token(
    model: PagedModel, emitted: tuple[int, ...], stopping: Stopping, finish: FinishKind
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
            model.scheduler.add(refused)
    model.run_until_idle()
    model.assert_right("taken")
    model.assert_idle()


def test_the_last_token_needs_no_block(gated_loads: Any) -> None:
    loads = gated_loads(0)
    try:
        model = PagedModel(loads, replace(LIMITS, blocks=4, adapter_slots=0))
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
    assert failed.finish is FinishKind.FAILED
    assert [output.sequence_id for output in model.scheduler.commit(batch, sampled)] == ["b"]
