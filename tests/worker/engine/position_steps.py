"""Steps of drawn positions of known texts, past the scheduler: several of one text are chunks, or rows of one id.

    text      │ computed before │ 1 to 16 positions of this step │ not yet
    as rows   │                 │ p │ p + 1 │ p + 2 │ wrong id   │  as drafts are: from a wrong id on nothing counts
    as chunk  │                 │ p ............ p + 3           │  as prompts are

A position's numbers are its logits, the log probability of the text's next id, and the id that is sampled with a seed
under a mask, as a grammar has it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling.sampler import Draw
from loraplex.worker.engine.sampling.step import sample, token_logprobs
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence as EngineSequence
from loraplex.worker.engine_api import NewSequence

MOST_POSITIONS = 16


@dataclass
class Text:
    """Ids, the adapter's slot, and what was computed of them: the numbers of position after position."""

    name: str
    ids: tuple[int, ...]
    slot: int
    computed: int = 0
    table: list[int] = field(default_factory=list)

    def sequence(self, ids: Sequence[int], *, whole: bool = False) -> EngineSequence:
        """Return these ids over the text's blocks; of a `whole` row the logits of all positions are computed."""
        spec = NewSequence(self.name, (*ids, 0), prompt_logprobs=0 if whole else None)
        sequence = EngineSequence(spec, 0, frozenset())
        sequence.block_table, sequence.adapter_slot = self.table, self.slot
        return sequence


# The bytes of a position's logits; if `sampled`, the log probability of the id that follows and the id that is sampled.
Numbers = tuple[bytes, float, int] | tuple[bytes]


class PositionSteps:
    """Computes positions of texts by an engine's own runner, over blocks of its cache; the engine has no work."""

    def __init__(self, runner: Any, vocab: int, *, sampled: bool) -> None:
        self._runner, self._vocab, self._sampled = runner, vocab, sampled
        self._block_size: int = runner._cache.block_size

    def one_by_one(self, text: Text) -> list[Numbers]:
        """Return the numbers of every position, each in a step of its own."""
        text.table, text.computed = [*range(self._blocks_of(text))], 0
        found: list[Numbers] = []
        for at in range(len(text.ids) - 1):
            row = Row(text.sequence(text.ids), at, 1, samples=True)
            found += self._run([row], [(text, at)])
        return found

    def together(self, texts: Sequence[Text], chance: random.Random) -> Iterator[tuple[Text, int, Numbers]]:
        """Compute all positions in steps of drawn ones; yield each with its text and its place."""
        free = [*range(sum(map(self._blocks_of, texts)))]
        assert len(free) <= self._runner._cache.blocks
        chance.shuffle(free)
        for text in texts:
            text.table, text.computed = [free.pop() for _ in range(self._blocks_of(text))], 0
        while unfinished := [text for text in texts if text.computed < len(text.ids) - 1]:
            rows: list[Row] = []
            places: dict[Row, list[tuple[Text, int]]] = {}
            for text in chance.sample(unfinished, chance.randint(1, min(3, len(unfinished)))):
                first = text.computed
                count = min(chance.randint(1, MOST_POSITIONS), len(text.ids) - 1 - first)
                text.computed += count
                if chance.random() < 0.4 and count > 1:
                    row = Row(text.sequence(text.ids, whole=True), first, count, samples=False)
                    rows.append(row)
                    places[row] = [(text, at) for at in range(first, first + count)]
                    continue
                # Keep the positions of right ids; a later step computes the others again.
                right = chance.randint(1, count)
                text.computed = first + right
                wrong = [chance.randrange(self._vocab) for _ in range(len(text.ids))]
                sequence = text.sequence((*text.ids[: first + right], *wrong)[: len(text.ids)])
                for at in range(first, first + count):
                    rows.append(row := Row(sequence, at, 1, samples=True))
                    places[row] = [(text, at)] if at < first + right else [(text, -1)]
            rows.sort(key=lambda row: (row.count > 1, row.sequence.adapter_slot))
            wanted = [place for row in rows for place in places[row]]
            for (text, at), numbers in zip(wanted, self._run(rows, wanted), strict=True):
                if at >= 0:
                    yield text, at, numbers

    def _blocks_of(self, text: Text) -> int:
        return -(-(len(text.ids) + MOST_POSITIONS) // self._block_size)

    def _run(self, rows: Sequence[Row], wanted: Sequence[tuple[Text, int]]) -> list[Numbers]:
        batch = Batch(tuple(rows), sum(row.count == 1 for row in rows), sum(row.count for row in rows))
        layout = self._runner.layout(batch)
        if self._runner._send is not None:
            self._runner._send(layout)
        logits: Tensor = self._runner.execute(layout)
        assert len(logits) == len(wanted)
        raw = [row.view(torch.uint8).numpy().tobytes() for row in logits]
        if not self._sampled:
            return [(one,) for one in raw]
        following = torch.tensor([text.ids[at + 1] for text, at in wanted])
        logprobs = [each.logprob for each in token_logprobs(logits, following, [2] * len(wanted))()]
        sampled = sample(logits, [self._draw(text, at) for text, at in wanted]).tolist()
        return list(zip(raw, logprobs, sampled, strict=True))

    def _draw(self, text: Text, at: int) -> Draw:
        """A position's draw is the text's and its own, as a request's is."""
        chance = random.Random(f"{text.name} {at}")
        sampling = SamplingParams(
            temperature=chance.choice((0.0, 0.8, 1.5)), top_k=chance.choice((0, 20)), top_p=chance.choice((1.0, 0.9)),
            seed=chance.randrange(1 << 63),
        )  # fmt: skip
        allowed = None
        if chance.random() < 0.5:
            words = np.random.default_rng(chance.randrange(1 << 32)).integers(0, 1 << 32, -(-self._vocab // 32))
            allowed = (words | 1).astype(np.uint32).view(np.int32)
        return Draw(sampling, 0, at + 1, allowed=allowed)
