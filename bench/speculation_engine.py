"""The engines of bench.speculation: without drafts, with drafts as the product has them, or from one corpus for all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loraplex.worker.engine.torch_engine import TorchEngine, build_engine
from loraplex.worker.engine_api import EngineConfig, NewSequence, Speculation

# Blocks of the KV cache: 32 chats of some hundred tokens, and what earlier ones leave.
_KV_BLOCKS = 2_000
# Time in seconds between looks at an engine that waits for a grammar.
_LOOK_S = 0.001
# The corpora that drafts come from: none, the answers of one tenant and adapter, and those of all.
NO_DRAFTS, OWN, ONE_FOR_ALL = "no drafts", "own", "one for all"


@dataclass(frozen=True)
class Asked:
    """Sequences, of which so many are in the engine at once."""

    sequences: Sequence[NewSequence]
    at_once: int


@dataclass(frozen=True)
class Drafts:
    """The drafts of some answers: their number, their ids, and those that were right."""

    number: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.number + other.number, self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def acceptance(self) -> float:
        """Return the share of drafted ids that were right."""
        return self.accepted / max(1, self.drafted)

    @property
    def mean_length(self) -> float:
        """Return the mean tokens of a step that had a draft."""
        return 1 + self.accepted / max(1, self.number)


@dataclass(frozen=True)
class Answered:
    """The ids and the seconds of each sequence, by its name, and what became of its drafts."""

    ids: Mapping[str, tuple[int, ...]]
    seconds_of: Mapping[str, float]
    seconds: float
    drafts: Mapping[str, Drafts]

    @property
    def tokens(self) -> int:
        """Return how many tokens were answered."""
        return sum(map(len, self.ids.values()))


class SpeculatingEngine:
    """An engine that answers sequences, and counts what became of drafts."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine

    def run(self, asked: Asked) -> Answered:
        """Answer the sequences in their order, and time them. Raises RuntimeError if one fails."""
        waiting = list(reversed(asked.sequences))
        ids: dict[str, list[int]] = {}
        began: dict[str, float] = {}
        took: dict[str, float] = {}
        drafts: dict[str, Counter[str]] = {}
        start = time.perf_counter()
        while len(took) < len(asked.sequences):
            while waiting and len(ids) - len(took) < asked.at_once:
                sequence = waiting.pop()
                name = sequence.sequence_id
                ids[name], drafts[name], began[name] = [], Counter(), time.perf_counter()
                self._engine.add_sequence(sequence)
            if not self._engine.has_work():
                time.sleep(_LOOK_S)
            for output in self._engine.step():
                name = output.sequence_id
                if output.failure:
                    raise RuntimeError(f"the engine failed: {output.failure.message}")
                ids[name] += output.token_ids
                counts = {"number": int(output.drafted > 0), "drafted": output.drafted, "accepted": output.accepted}
                drafts[name].update(counts)
                if output.finish is not None:
                    took[name] = time.perf_counter() - began[name]
        return Answered(
            {name: tuple(of) for name, of in ids.items()},
            took,
            time.perf_counter() - start,
            {name: Drafts(**of) for name, of in drafts.items()},
        )


@contextmanager
def speculating(model: Path, rows: int, corpus: str) -> Iterator[SpeculatingEngine]:
    """Run an engine whose drafts come from a `corpus`: NO_DRAFTS, OWN, or ONE_FOR_ALL, as no product should have."""
    speculation = None if corpus == NO_DRAFTS else Speculation()
    engine = build_engine(EngineConfig(str(model), rows=rows, kv_blocks=_KV_BLOCKS, speculation=speculation))
    if corpus == ONE_FOR_ALL:
        engine._scheduler.drafter = _OneForAll(engine._scheduler.drafter)
    try:
        yield SpeculatingEngine(engine)
    finally:
        engine.close()


class _OneForAll:
    """A drafter that takes all sequences for those of one tenant and adapter."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._taken: dict[Any, _Taken] = {}

    def propose(self, sequences: Sequence[Any], rows: int, free: int) -> Any:
        """See Drafter."""
        return self._drafter.propose([self._take(sequence) for sequence in sequences], rows, free)

    def learn(self, sequence: Any, checked: int, accepted: int) -> None:
        """See Drafter."""
        self._drafter.learn(self._take(sequence), checked, accepted)

    def end(self, sequence: Any) -> None:
        """See Drafter."""
        self._drafter.end(self._take(sequence))
        self._taken.pop(sequence, None)

    def _take(self, sequence: Any) -> _Taken:
        return self._taken.setdefault(sequence, _Taken(sequence))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


class _Taken:
    """A sequence without its tenant and adapter."""

    def __init__(self, sequence: Any) -> None:
        self._sequence = sequence
        self.spec = replace(sequence.spec, tenant="", adapter=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)
