"""A paged model in a few lines: every token is a hash of all ids before it, so that any mix-up shows."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Container, Iterable
from typing import Any

from loraplex.contracts.options import FinishReason, StoppingParams
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.scheduler import Scheduler
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import AdapterSource, EngineLimits, Failure, NewSequence, Output, Removal

VOCAB = 50
END = VOCAB - 1
LIMITS = EngineLimits(rows=4, max_tokens=64, max_rank=8, vocab_size=VOCAB, block_size=4, blocks=24, adapter_slots=2)
STEP_TOKENS = 12


def link(previous: int, token: int) -> int:
    return zlib.crc32(bytes([token]), previous)


def begun(spec: NewSequence, position: int, state: int) -> int:
    """Return the state before a position, from which on the adapter counts if it begins there."""
    return zlib.crc32(spec.adapter.digest.encode(), state) if spec.adapter and position == spec.invoked_at else state


def next_token(state: int, banned: frozenset[int]) -> int:
    token = state % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def oracle(spec: NewSequence) -> tuple[tuple[int, ...], FinishReason]:
    """The whole answer and why it ends, without any scheduling."""
    stopping = spec.stopping
    ends = frozenset() if stopping.ignore_eos else frozenset([END])
    banned = ends | frozenset(stopping.stop_token_ids)
    state = 0
    for position, token in enumerate(spec.prompt_ids):
        state = link(begun(spec, position, state), token)
    answer: list[int] = []
    while len(answer) < stopping.max_tokens:
        early = len(answer) < stopping.min_tokens
        token = next_token(state, banned if early else frozenset())
        answer.append(token)
        state = link(state, token)
        if not early and token in banned:
            return tuple(answer), FinishReason.END if token in ends else FinishReason.STOP
    return tuple(answer), FinishReason.LENGTH


class PagedModel:
    """Keeps in each KV place the hash of all ids up to it, and reads only what lies in a row's blocks.

    `ahead`: each batch is scheduled and run before the one before it is committed, as TorchEngine does it.
    """

    def __init__(
        self,
        loads: Any,
        limits: EngineLimits = LIMITS,
        step_tokens: int = STEP_TOKENS,
        *,
        ahead: bool = False,
        run_tokens: int = 2,
    ) -> None:
        self.loads = loads
        self.ahead = ahead
        self.in_flight: tuple[Batch, list[int]] | None = None
        # Ids that the last batch sampled: on a device the next one's placeholders are filled from them.
        self.sampled: dict[Sequence, int] = {}
        self.limits = limits
        self.step_tokens = step_tokens
        self.scheduler = Scheduler(limits, [END], step_tokens, loads.cache, run_tokens=run_tokens)
        self.kv: dict[tuple[int, int], int] = {}
        self.specs: dict[str, NewSequence] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.failures: dict[str, Failure] = {}
        self.rows_of_last: dict[str, int] = {}

    def add(self, spec: NewSequence) -> None:
        self.scheduler.add_sequence(spec)
        self.specs[spec.sequence_id] = spec
        self.answers[spec.sequence_id] = list(spec.emitted_ids)

    def has_work(self) -> bool:
        return self.in_flight is not None or self.scheduler.has_work()

    def step(self, *, fits: bool = True) -> list[Output]:
        """Run a step; unless it `fits`, memory is not enough to run its batch."""
        outputs = self.scheduler.take_arrivals()
        if self.in_flight is not None and self.scheduler.needs_ids_of(self.in_flight[0]):
            outputs += self.scheduler.commit(*self.in_flight)
            self.in_flight = None
        batch = self.scheduler.schedule()
        self.rows_of_last = {row.sequence.sequence_id: row.count for row in batch.rows} if batch else {}
        launched = None
        if batch:
            assert self.in_flight is None or not any(row.place for row in self.in_flight[0].rows)
            self.check_batch(batch)
            if fits:
                launched = (batch, self.run(batch))
            else:
                self.spoil(batch)
                outputs += self.scheduler.revoke(batch)
        if self.ahead:
            launched, self.in_flight = self.in_flight, launched
        if launched:
            outputs += self.scheduler.commit(*launched)
        self.take(outputs)
        return outputs

    def run(self, batch: Batch) -> list[int]:
        """Return an id for each row that samples."""
        last, self.sampled = self.sampled, {}
        sampled = []
        for row in batch.rows:
            sequence = row.sequence
            spec, end = sequence.spec, row.start + row.count
            digest = spec.adapter.digest if spec.adapter and row.start >= spec.invoked_at else ""
            assert row.start >= spec.invoked_at or end <= spec.invoked_at, "a row of the base and the adapter"
            assert self.loads.installed.get(row.adapter_slot, "") == digest, "the adapter of another"
            state = self.read(sequence.block_table, row.start - 1)
            ids = row.known_ids
            if row.last_is_placeholder:
                ids.append(last[sequence])
            for position, token in enumerate(ids, row.start):
                state = link(begun(spec, position, state), token)
                size = self.limits.block_size
                self.kv[sequence.block_table[position // size], position % size] = state
            if row.samples:
                sampled.append(next_token(state, row.banned_ids))
                self.sampled[sequence] = sampled[-1]
        return sampled

    def spoil(self, batch: Batch) -> None:
        """Leave nonsense where the batch would have written."""
        for row in batch.rows:
            for position in range(row.start, row.start + row.count):
                size = self.limits.block_size
                self.kv[row.sequence.block_table[position // size], position % size] = -1

    def read(self, table: list[int], position: int) -> int:
        size = self.limits.block_size
        return self.kv[table[position // size], position % size] if position >= 0 else 0

    def check_batch(self, batch: Batch) -> None:
        counts = [row.count for row in batch.rows]
        assert batch.tokens == sum(counts) <= max(self.step_tokens, self.limits.rows)
        assert len(batch.rows) <= self.limits.rows
        assert len({row.sequence for row in batch.rows}) == sum(not row.place for row in batch.rows)
        assert all(count == 1 for count in counts[: batch.decodes])
        assert all(count > 1 for count in counts[batch.decodes :])
        for part in (batch.rows[: batch.decodes], batch.rows[batch.decodes :]):
            slots = [row.adapter_slot for row in part]
            assert slots == sorted(slots)
        first = self.scheduler._running.in_rank[0]
        assert first.waits_for_ids or first in [row.sequence for row in batch.rows], "the first in rank was passed over"
        for row in batch.rows:
            sequence = row.sequence
            assert row.live
            if row.draft:
                assert (row.samples, row.count, row.start) == (True, 1, len(sequence.ids) - 1 + row.place)
                assert sequence.placeholders == len(row.draft) + 1
            else:
                assert row.samples == (row.start + row.count == sequence.length - row.samples)
            assert not row.last_is_placeholder or self.ahead
            assert sequence.answered + sequence.placeholders <= sequence.max_tokens, "more than it may have"

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
            if output.failure:
                self.failures[name] = output.failure

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
            if not self.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {steps} steps")

    def assert_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.rows_running, stats.rows_waiting, stats.blocks_referenced, stats.slots_pinned) == (0, 0, 0, 0)

    def assert_right(self, name: str) -> None:
        answer, finish = oracle(self.specs[name])
        assert (tuple(self.answers[name]), self.ended[name]) == (answer, finish)


class Prophet:
    """A Drafter that knows the answers, and says each of their ids with some probability, else any other."""

    def __init__(
        self, answer: Callable[[Sequence], Iterable[int]], vocab: int, probability: float, chance: random.Random
    ) -> None:
        self._answer, self._vocab, self._probability, self._chance = answer, vocab, probability, chance
        self.steps = 0
        self.ended: list[Sequence] = []

    def propose(self, sequences: list[Sequence], rows: int, free: int) -> list[list[int]]:
        drafts = []
        for sequence in sequences:
            # Beyond the answer's end as well.
            rest = [*self._answer(sequence), self._other(), self._other()][sequence.answered :]
            rest = rest[: min(free, self._chance.choice((0, 1, 2, 4, 8, 16)))]
            free -= len(rest)
            drafts.append([one if self._chance.random() < self._probability else self._other() for one in rest])
        return drafts

    def _other(self) -> int:
        return self._chance.randrange(self._vocab)

    def observe(self, batch: Batch) -> None:
        self.steps += any(row.place for row in batch.rows)

    def learn(self, sequence: Sequence, checked: int, accepted: int) -> None:
        assert 0 <= accepted <= checked

    def end(self, sequence: Sequence) -> None:
        assert sequence not in self.ended
        self.ended.append(sequence)

    def forget_tenant(self, tenant: str, kept_adapters: Container[str], running: Iterable[Sequence]) -> Removal:
        return Removal()


def spec(name: str, prompt: int = 5, tokens: int = 6, adapter: str = "", **fields: Any) -> NewSequence:
    """ignore_eos, so that its length is sure; the prompt is made of its name."""
    ids = tuple(random.Random(name).choices(range(VOCAB), k=prompt))
    source = AdapterSource(adapter, f"/adapters/{adapter}") if adapter else None
    fields = {"stopping": StoppingParams(max_tokens=tokens, ignore_eos=True)} | fields
    return NewSequence(name, ids, adapter=source, **fields)
