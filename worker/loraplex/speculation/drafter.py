"""The drafter: where drafts come from, and what becomes of answers that have ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

from loraplex.speculation.gain import Acceptance, Gain
from loraplex.speculation.suffixes import LONGEST_MATCH, Corpus, SuffixIndex
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.grammars import SLOW_S
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import Removal, Speculation

# Maximum bytes of all owners; those that were used longest ago are forgotten first. Bytes of one without answers.
_ALL_BYTES, _OWNER_BYTES = 64 << 20, 3 << 10
# Maximum number of ids, of prompts and of answers that have ended, that are indexed in one step: a millisecond's work.
_INDEXED_IDS = 4096
# Maximum number of sequences that are looked at in one step, in turn, and minimum of the rows that are free, as a share
# of those that are taken: for fewer the work is more than the gain.
_SEQUENCES, _LEAST_FREE = 32, 1 / 4
# First guesses of acceptance by the length of a match, each up to so many ids.
_FIRST_RATES = {2: 0.15, 3: 0.25, 5: 0.4, 8: 0.6, 16: 0.8, LONGEST_MATCH: 0.9}
_KIND_OF = [
    next(kind for kind, most in enumerate(_FIRST_RATES) if length <= most) for length in range(LONGEST_MATCH + 1)
]
# The kind of ids that a format forces, and the first guess of its acceptance.
_FORCED, _FORCED_RATE = len(_FIRST_RATES), 0.9


class _Owner:
    """What is known of a tenant's answers with an adapter."""

    def __init__(self) -> None:
        self.corpus = Corpus()
        self.acceptance = [Acceptance(rate) for rate in (*_FIRST_RATES.values(), _FORCED_RATE)]

    @property
    def size(self) -> int:
        """Return the bytes that it takes, at most."""
        return _OWNER_BYTES + self.corpus.size


class _Running:
    """A sequence's index, and its last draft, perhaps not run: its kind, its ids, and the length of `ids` then."""

    def __init__(self, sequence: Sequence) -> None:
        self.index = SuffixIndex(sequence.ids)
        self.kept = sequence.spec.speculate
        self.kind = 0
        self.draft: list[int] = []
        self.at = 0
        self.ran = False


class SuffixDrafter:
    """Implements Drafter for the method `suffix`; `clock` tells the seconds of steps."""

    def __init__(self, speculation: Speculation, clock: Callable[[], float]) -> None:
        self._most = speculation.num_speculative_tokens
        # By tenant and adapter, and their bytes together: a sum over all of them would take long at every end.
        self._owners: OrderedDict[tuple[str, str], _Owner] = OrderedDict()
        self._bytes = 0
        self._running: dict[Sequence, _Running] = {}
        self._gain = Gain()
        self._clock, self._step_ended_at = clock, clock()
        self._left = _INDEXED_IDS
        self._turn = 0

    def propose(self, sequences: list[Sequence], rows: int, free: int) -> list[list[int]]:
        """See Drafter."""
        drafts: list[list[int]] = [[] for _ in sequences]
        if free < _LEAST_FREE * rows:
            return drafts
        turn = self._turn % len(sequences)
        places = [*range(turn, len(sequences)), *range(turn)][:_SEQUENCES]
        guesses = [(place, guess) for place in places if (guess := self._guess(sequences[place])) is not None]
        if not guesses:
            return drafts
        lengths = self._gain.lengths(rows, free, [(len(running.draft), rate) for _, (running, rate) in guesses])
        for (place, (running, _)), length in zip(guesses, lengths, strict=True):
            drafts[place] = running.draft[:length]
        return drafts

    def _guess(self, sequence: Sequence) -> tuple[_Running, float] | None:
        """Return a sequence with its new draft, and the probability of each of the ids; None without a draft."""
        running = self._running.get(sequence)
        if running is None:
            running = self._running[sequence] = _Running(sequence)
        owner = self._owner(sequence)
        self._compare(running, owner, sequence.ids)
        if not running.index.complete:
            self._left -= running.index.index(self._left)
            if not running.index.complete:
                return None
        most = min(self._most, sequence.max_tokens - sequence.answered - 1)
        if most < 1:
            return None
        length, draft = running.index.continuation(sequence.ids, most)
        if length < LONGEST_MATCH:
            self._left -= owner.corpus.index(self._left)
            longer, other = owner.corpus.continuation(sequence.ids, most)
            if longer > length:
                length, draft = longer, other
        kind = _KIND_OF[length]
        forced = [*sequence.grammar.forced[:most]] if sequence.grammar is not None else []
        if draft[: len(forced)] != forced:
            draft, kind = forced, _FORCED
        ends = sequence.end_ids | sequence.stop_ids
        if not ends.isdisjoint(draft):
            draft = draft[: next(place for place, token in enumerate(draft) if token in ends)]
        if (grammar := sequence.grammar) is not None:
            # An id takes as long to check as the last one took, so that all of the draft are checked soon.
            quick = grammar.seconds * len(draft) < SLOW_S
            draft = draft if quick and grammar.valid(draft[:1]) else []
        running.draft, running.kind, running.at, running.ran = draft, kind, len(sequence.ids), False
        return (running, owner.acceptance[kind].rate) if draft else None

    def _compare(self, running: _Running, owner: _Owner, ids: list[int]) -> None:
        """Learn from a draft that was not run: what came instead is known by now."""
        if running.ran or not running.draft or len(ids) == running.at:
            return
        came = ids[running.at : running.at + len(running.draft)]
        pairs = enumerate(zip(came, running.draft, strict=False))
        right = next((place for place, (one, guess) in pairs if one != guess), len(came))
        owner.acceptance[running.kind].learn(right + (right < len(came)), right)

    def _owner(self, sequence: Sequence) -> _Owner:
        spec = sequence.spec
        key = spec.tenant, spec.adapter.digest if spec.adapter else ""
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = _Owner()
            self._grow(owner.size)
        else:
            self._owners.move_to_end(key)
        return owner

    def _grow(self, size: int) -> None:
        """Count bytes of the owner that was used last; forget others where they are too many."""
        self._bytes += size
        while self._bytes > _ALL_BYTES:
            self._bytes -= self._owners.popitem(last=False)[1].size

    def observe(self, batch: Batch) -> None:
        """See Drafter."""
        before, self._step_ended_at = self._step_ended_at, self._clock()
        self._left = _INDEXED_IDS
        self._turn += _SEQUENCES
        if batch.decodes == len(batch.rows):
            drafted = sum(row.place > 0 for row in batch.rows)
            self._gain.observe(batch.decodes - drafted, drafted, self._step_ended_at - before)

    def learn(self, sequence: Sequence, checked: int, accepted: int) -> None:
        """See Drafter."""
        if checked and (running := self._running.get(sequence)) is not None:
            running.ran = True
            self._owner(sequence).acceptance[running.kind].learn(checked, accepted)

    def end(self, sequence: Sequence) -> None:
        """See Drafter: its answer goes to those of its tenant and adapter."""
        running = self._running.pop(sequence, None)
        kept = sequence.spec.speculate if running is None else running.kept
        if not kept or sequence.answered < 3:
            return
        owner = self._owner(sequence)
        before = owner.size
        owner.corpus.add(sequence.ids[sequence.prompt_length :])
        self._grow(owner.size - before)

    def forget_tenant(self, tenant: str, kept_adapters: Container[str], running: Iterable[Sequence]) -> Removal:
        """See Drafter."""

        def goes(owner: str, adapter: str) -> bool:
            return owner == tenant or (adapter != "" and adapter not in kept_adapters)

        gone = [self._owners.pop(key) for key in [*self._owners] if goes(*key)]
        removed = sum(owner.corpus.answers for owner in gone)
        self._bytes -= sum(owner.size for owner in gone)
        left = 0
        for sequence in running:
            spec = sequence.spec
            if goes(spec.tenant, spec.adapter.digest if spec.adapter else ""):
                self._running.setdefault(sequence, _Running(sequence)).kept = False
                left += 1
        return Removal(removed, left)
