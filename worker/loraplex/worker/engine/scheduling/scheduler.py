"""Decides which sequences the next step computes, and takes the tokens that it samples.

One step of an engine:

    outputs = scheduler.take_arrivals()             adapters that arrived; answers that were complete on arrival
    batch = scheduler.schedule()                    decodes first, prefill chunks with what is left of step_tokens
    if batch:
        sampled = run the model on batch.rows       one id for each row with `samples`, in order
        outputs += scheduler.commit(batch, sampled)

An engine that steps ahead schedules the next batch before it commits this one, whose ids are placeholders meanwhile
(see sequence.py). Batches are committed in the order in which they were scheduled; a batch that could not be run is
revoked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Ids
from itertools import zip_longest
from typing import Any

from loraplex.contracts.options import FinishReason, TokenLogprobs
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.admission import (
    RUN_TOKENS,
    MemoryCeilings,
    RowShares,
    RunningSequences,
    WaitingSequences,
)
from loraplex.worker.engine.scheduling.batch import Batch, BatchPlan, Row
from loraplex.worker.engine.scheduling.blocks import BlockIntegrityError, BlockManager
from loraplex.worker.engine.scheduling.chunk_sizer import ChunkBudget, ChunkSizer
from loraplex.worker.engine.scheduling.drafts import Drafter
from loraplex.worker.engine.scheduling.grammars import SLOW_S, GrammarThread, Prepared
from loraplex.worker.engine.scheduling.sequence import (
    OUT_OF_MEMORY,
    Sequence,
    SequenceState,
    adapter_failure,
    check_sequence,
    joined,
    output_of,
)
from loraplex.worker.engine_api import EngineLimits, EngineStats, Failure, NewSequence, Output, SequenceRefusedError


class SequenceScheduler(ABC):
    """The sequences of an engine, from their arrival to their end, and the adapters that they wait for. One thread.

    `on_begun` is called with a sequence's id before anything is computed of it.
    """

    def __init__(
        self,
        limits: EngineLimits,
        adapters: AdapterCache[Any],
        on_begun: Callable[[str], None],
        run_tokens: int = RUN_TOKENS,
        blocks: BlockManager | None = None,
    ) -> None:
        self.limits = limits
        # The KV cache's blocks; None without a KV cache.
        self.blocks = blocks
        self._adapters = adapters
        self._on_begun = on_begun
        self._shares = RowShares(run_tokens)
        self._waiting = WaitingSequences(adapters, self._shares)
        self._running = RunningSequences(
            blocks or BlockManager(0, limits.block_size), self._waiting, adapters, self._shares
        )
        self._sequences: dict[str, Sequence] = {}
        # Counts since the start; see EngineStats.
        self._taken = self._steps = self._computed_tokens = self._prefix_queries = self._prefix_hits = 0
        self._drafts = self._drafted = self._accepted = 0
        # None: no drafts.
        self.drafter: Drafter | None = None

    @abstractmethod
    def add_sequence(self, spec: NewSequence) -> None:
        """Take a sequence, and request its adapter where it is not resident. Raises SequenceRefusedError."""

    @abstractmethod
    def has_work(self) -> bool:
        """Tell whether the next step would do anything now."""

    def check(self) -> None:
        """Raise an integrity error unless exactly the running sequences hold blocks and pins. Takes time O(blocks)."""
        self._running.check()

    def _end(self, sequence: Sequence) -> None:
        """Forget a sequence, and free all that it holds."""
        if sequence.state in (SequenceState.RUNNING, SequenceState.ARRIVED):
            if sequence.state is SequenceState.RUNNING:
                self._running.stop(sequence)
            sequence.move_to(SequenceState.ENDED)
        else:
            self._waiting.leave(sequence)
        del self._sequences[sequence.sequence_id]

    @property
    def sequences(self) -> Collection[Sequence]:
        """Return the sequences that have not ended."""
        return self._sequences.values()

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence and free all it holds; unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence:
            self._end(sequence)

    def fail(self, sequence_ids: Iterable[str], failure: Failure) -> list[Output]:
        """End these sequences with a failure; unknown ids are ignored."""
        outputs = []
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence:
                self._end(sequence)
                outputs.append(output_of(sequence, (), FinishReason.FAILED, failure))
        return outputs

    def _new_sequence(self, spec: NewSequence, end_token_ids: frozenset[int]) -> Sequence:
        """Check and count a new sequence. Raises SequenceRefusedError."""
        check_sequence(spec, self.limits)
        if spec.sequence_id in self._sequences:
            raise SequenceRefusedError("sequence_id", f"{spec.sequence_id} is running already")
        sequence = Sequence(spec, self._taken, end_token_ids)
        self._taken += 1
        return sequence

    def _take_adapters(self, *, busy: bool) -> list[Output]:
        """Let in adapters that are ready; end the sequences whose adapter could not be loaded."""
        outputs: list[Output] = []
        arrivals = self._adapters.poll(busy=busy)
        for digest in arrivals.arrived:
            self._waiting.arrived(digest)
        for digest, error in arrivals.failed:
            ids = [sequence.sequence_id for sequence in self._waiting.parked_for(digest)]
            outputs += self.fail(ids, adapter_failure(digest, error))
        return outputs

    def _begin(self, sequence: Sequence) -> None:
        """Let the sequence run that the waiting list has just returned, and count what the prefix cache has of it."""
        self._waiting.take(sequence)
        if sequence.cached_tokens is None:
            self._on_begun(sequence.sequence_id)
            sequence.cached_tokens = sequence.computed
            if self.blocks is not None:
                self._prefix_queries += len(sequence.ids)
                self._prefix_hits += sequence.computed

    def stats(self) -> EngineStats:
        """Return what is held now."""
        slots, blocks = self._adapters.slots, self.blocks
        return EngineStats(
            steps=self._steps,
            rows_running=len(self._running),
            rows_waiting=len(self._waiting),
            blocks_free=self.limits.blocks if blocks is None else blocks.free,
            blocks_cached=0 if blocks is None else blocks.cached,
            blocks_referenced=0 if blocks is None else blocks.referenced,
            slots_used=slots.used,
            slots_pinned=slots.pinned,
            adapters=slots.digests,
            sequences_taken=self._taken,
            adapter_hits=self._waiting.hits,
            adapter_misses=self._waiting.misses,
            tiers=self._adapters.tiers,
            preemptions=self._running.preemptions,
            computed_tokens=self._computed_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
        )


class Scheduler(SequenceScheduler):
    """Continuous batching with preemption by recomputing; rows are shared by tenants (admission.py). One thread.

    Of a tenant's sequences the first to come is the first to run, with priorities. A step's work is O(batch and tenants
    that wait). `step_tokens` bounds the tokens of a step, at least `limits.rows`. With a chunk sizer its chunks get of
    them what that allows. Of the decodes whose grammars are slow one is in a step, in turn.
    """

    blocks: BlockManager

    def __init__(
        self,
        limits: EngineLimits,
        end_token_ids: Iterable[int],
        step_tokens: int,
        adapters: AdapterCache[Any],
        chunk_sizer: ChunkSizer | None = None,
        on_begun: Callable[[str], None] = lambda sequence_id: None,
        run_tokens: int = RUN_TOKENS,
        grammars: GrammarThread | None = None,
    ) -> None:
        super().__init__(limits, adapters, on_begun, run_tokens, BlockManager(limits.blocks, limits.block_size))
        # A row that prefills leaves at most rows - 1 decodes: with so many tokens it always advances.
        self.step_tokens = max(step_tokens, limits.rows)
        self._end_ids = frozenset(end_token_ids)
        self._grammars = grammars
        self._chunk_sizer = chunk_sizer
        self._ceilings = MemoryCeilings(limits)
        self._complete: list[Output] = []

    def add_sequence(self, spec: NewSequence) -> None:
        """See SequenceScheduler."""
        if spec.grammar and self._grammars is None:
            raise SequenceRefusedError("format", "this engine serves no formats")
        sequence = self._new_sequence(spec, self._end_ids)
        finish = sequence.finish()
        if finish:
            sequence.move_to(SequenceState.ENDED)
            self._complete.append(output_of(sequence, (), finish))
            return
        self._sequences[spec.sequence_id] = sequence
        if spec.grammar and self._grammars is not None:
            self._grammars.request(spec)
        else:
            self._waiting.enter(sequence)

    def has_work(self) -> bool:
        """See SequenceScheduler."""
        busy = self._running or self._complete or self._waiting.ready or self._adapters.has_work()
        return bool(busy) or (self._grammars is not None and self._grammars.has_work())

    def take_arrivals(self) -> list[Output]:
        """Let in adapters and grammars that are ready; end the sequences whose adapter or grammar could not be."""
        outputs, self._complete = self._complete, []
        for sequence_id, grammar in self._grammars.poll() if self._grammars is not None else ():
            outputs += self._take_grammar(self._sequences[sequence_id], grammar)
        return outputs + self._take_adapters(busy=bool(self._running))

    def _take_grammar(self, sequence: Sequence, grammar: Prepared) -> list[Output]:
        if isinstance(grammar, Failure):
            return self.fail([sequence.sequence_id], grammar)
        sequence.grammar = grammar
        grammar.looks_for_forced = self.drafter is not None and sequence.spec.speculate
        finish = sequence.finish()
        if finish is None:
            self._waiting.enter(sequence)
            return []
        self._end(sequence)
        return [output_of(sequence, (), finish)]

    def schedule(self) -> Batch | None:
        """Return the rows of the next step, with blocks for all of them; None where no sequence can run."""
        self._make_room()
        plan = BatchPlan()
        prefilling: list[Sequence] = []
        decodes: list[int] = []
        running, index = self._running.in_rank, 0
        slow = [one for one in running if one.grammar is not None and one.grammar.seconds >= SLOW_S]
        passed = {*slow} - {slow[self._steps % len(slow)]} if slow else ()
        # From the first in rank on; preemption takes the present one, or later ones.
        while index < len(running):
            sequence = running[index]
            index += 1
            computed = sequence.computed
            if sequence.waits_for_ids:
                decodes.append(computed)
            elif sequence.length - computed > 1:
                prefilling.append(sequence)
            elif sequence in passed:
                continue
            elif computed < len(sequence.block_table) * self.limits.block_size or self._running.extend(sequence):
                plan.add_row(sequence, 1)
                decodes.append(computed)
            else:
                index -= 1
        self._add_chunks(plan, self._chunk_budget(decodes, len(plan.singles), len(prefilling)), prefilling)
        self._add_drafts(plan)
        return plan.batch()

    def needs_ids_of(self, batch: Batch) -> bool:
        """Tell whether a batch is to be committed before the next is scheduled, because of drafts."""
        if self.drafter is None:
            return False
        if any(row.place for row in batch.rows):
            return True
        # The next step has chunks of prompts, and so no drafts.
        if self._waiting.ready or any(one.length - one.computed > 1 for one in self._running.in_rank):
            return False
        followable = (row for row in batch.rows if row.live and row.takes_draft)
        return any(draft for _, draft in self._propose(followable, len(batch.rows)))

    def _propose(self, rows: Iterable[Row], singles: int) -> list[tuple[Sequence, Ids[int]]]:
        """Return the drafts that may follow these rows of a step with `singles` rows of one id."""
        free = self._ceilings.rows - singles
        if self.drafter is None or free <= 0 or not (sequences := [row.sequence for row in rows]):
            return []
        return list(zip(sequences, self.drafter.propose(sequences, singles, free), strict=True))

    def _add_drafts(self, plan: BatchPlan) -> None:
        """Let drafts have the rows and the blocks that nobody else needs now."""
        drafts = {
            sequence: draft
            for sequence, proposed in self._propose(plan.followable, len(plan.singles))
            if proposed and (draft := self._fitting(sequence, proposed))
        }
        if drafts:
            plan.add_drafts(drafts)

    def _fitting(self, sequence: Sequence, draft: Ids[int]) -> tuple[int, ...]:
        """Return the draft up to what its answer may have, with blocks for it."""
        draft = draft[: sequence.max_tokens - sequence.answered - 1]
        if sequence.grammar is not None:
            draft = sequence.grammar.valid(draft)
        space = len(sequence.block_table) * self.limits.block_size - sequence.computed
        # A block for each running sequence is left: none is preempted for a draft.
        while space < len(draft) and self.blocks.free + self.blocks.cached > len(self._running):
            self.blocks.extend(sequence)
            space += self.limits.block_size
        return tuple(draft[:space])

    def _make_room(self) -> None:
        """Let the next sequence that waits take the row and blocks that it lacks from tenants above their share."""
        sequence = self._waiting.head(self.limits.rows)
        if sequence is not None:
            self._running.yield_to(sequence, len(self._running) + 1 - self._ceilings.rows)

    def _admit(self, passed: Collection[str] = ()) -> Sequence | None:
        """Let the next sequence run that waits, but none of the tenants `passed`; None where rows or blocks lack."""
        if len(self._running) >= self._ceilings.rows:
            return None
        sequence = self._waiting.head(self.limits.rows)
        if sequence is not None and sequence.spec.tenant in passed and self.blocks.shortage(sequence) <= 0:
            sequence = self._waiting.head(self.limits.rows, passed)
        # A sequence that waits for blocks is not overtaken: a long prompt might wait for ever.
        if sequence is None or sequence.spec.tenant in passed or not self.blocks.allocate(sequence):
            return None
        self._begin(sequence)
        self._running.start(sequence)
        return sequence

    def _add_chunks(self, plan: BatchPlan, budget: ChunkBudget, prefilling: list[Sequence]) -> None:
        """Schedule chunks of prompts: one of each tenant, with equal shares of the budget, then the others in rank.

        What a tenant's prompt leaves of its share is for those of the others, the shortest first. So a long prompt
        delays the short ones of other tenants by a step or two, and gets its tenant's share itself.
        """
        firsts = {sequence.spec.tenant: sequence for sequence in reversed(prefilling)}
        while budget.room_for(len(firsts) + 1) and (newcomer := self._admit(firsts)) is not None:
            firsts[newcomer.spec.tenant] = newcomer
        shortest_first = sorted(firsts.values(), key=lambda first: first.length - first.computed)
        for parts, sequence in zip(range(len(firsts), 0, -1), shortest_first, strict=True):
            share = budget.split(parts)
            if share.room_for(1):
                _add_chunk(plan, sequence, share)
            budget.join(share)
        for sequence in prefilling:
            if budget.room_for(1) and firsts[sequence.spec.tenant] is not sequence:
                _add_chunk(plan, sequence, budget)
        while budget.room_for(1) and (newcomer := self._admit()) is not None:
            _add_chunk(plan, newcomer, budget)

    def commit(
        self,
        batch: Batch,
        sampled: Ids[int],
        logprobs: Iterable[TokenLogprobs | None] = (),
        failures: Mapping[Row, Failure] | None = None,
    ) -> list[Output]:
        """Take what a step has computed: one id for each row with `samples`, in order.

        `logprobs` are of the same rows; they may be left out where nobody asks for them. The sequences of `failures`
        end. Rows of sequences that were stopped since are skipped, and rows of a draft from the first wrong id on.
        """
        self._steps += 1
        self._computed_tokens += batch.tokens
        block_size = self.limits.block_size
        outputs: list[Output] = []
        drafting: list[Row] = []
        ids = zip_longest(sampled, logprobs)
        for row in batch.rows:
            sequence = row.sequence
            token, logprob = next(ids) if row.samples else (None, None)
            if not row.live:
                continue
            if row.place and sequence.ids[row.start :] != [row.drafted[-1]]:
                sequence.drop_draft()
                continue
            if failures and row in failures:
                outputs += self.fail([sequence.sequence_id], failures[row])
                continue
            computed = row.start + row.count
            if computed // block_size > sequence.registered:
                self.blocks.register(sequence, computed)
            if token is None:
                if told := sequence.take_prompt_logprobs():
                    outputs.append(Output(sequence.sequence_id, sequence.answered, (), prompt_logprobs=told))
                continue
            taken = sequence.take(token)
            if taken and sequence.grammar and (failure := sequence.grammar.advance(token)):
                outputs += self.fail([sequence.sequence_id], failure)
                continue
            finish = sequence.finish()
            if finish:
                self._end(sequence)
            told = (logprob,) if logprob and taken else ()
            output = output_of(sequence, taken, finish, logprobs=told, drafted=len(row.draft))
            if row.place:
                outputs[-1] = joined(outputs[-1], output)
            else:
                outputs.append(output)
                if row.draft:
                    drafting.append(row)
        self._learn(drafting, outputs)
        return outputs

    def _learn(self, drafting: list[Row], outputs: list[Output]) -> None:
        """Count, and tell the drafter, what became of the drafts behind these rows."""
        for row, output in zip(drafting, (output for output in outputs if output.drafted), strict=True):
            self._drafts += 1
            self._drafted += output.drafted
            self._accepted += output.accepted
            if self.drafter is not None:
                # Of an answer that ended nothing behind its last id was checked.
                checked = output.accepted + (not output.finish and output.accepted < output.drafted)
                self.drafter.learn(row.sequence, checked, output.accepted)

    def revoke(self, batch: Batch) -> list[Output]:
        """Undo the scheduling of the last batch, for which memory was not enough: the next batch is smaller.

        A sequence that was alone fails. Some may have ended since, with the step before.
        """
        batch = batch.live()
        if not batch.rows:
            return []
        batch.unschedule()
        alone = self._ceilings.lower(batch, self._running)
        return self.fail([alone.sequence_id], OUT_OF_MEMORY) if alone else []

    def _chunk_budget(self, decodes: list[int], singles: int, prefilling: int) -> ChunkBudget:
        tokens = min(self.step_tokens - singles, self._ceilings.chunk_tokens)
        if self._chunk_sizer is None:
            return ChunkBudget(tokens)
        admissible = min(self._waiting.ready, self._ceilings.rows - len(self._running))
        return self._chunk_sizer.budget(tokens, decodes, prefilling + max(0, admissible))

    def _end(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.end(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._ceilings.lift()
        elif sequence.state is SequenceState.ARRIVED and self._grammars is not None:
            self._grammars.withdraw(sequence.sequence_id)
        super()._end(sequence)
        if not self._sequences and self.blocks.referenced:
            raise BlockIntegrityError(f"{self.blocks.referenced} blocks are referenced by no sequence")


def _add_chunk(plan: BatchPlan, sequence: Sequence, budget: ChunkBudget) -> None:
    """Add as many of a sequence's next ids as the budget allows, if any: up to its invocation, or after it."""
    start, invoked_at = sequence.computed, sequence.spec.invoked_at
    count = budget.take(start, (invoked_at if start < invoked_at else sequence.length) - start)
    if count:
        plan.add_row(sequence, count)
