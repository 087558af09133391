"""Compiles the grammars of sequences in a thread beside the steps, and keeps them by digest.

A grammar is proven first, in a child process with limits that may be killed (artifacts.grammars.prover): a killer
grammar kills that child, and fails its own requests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError
from artifacts.grammars.build import choices_grammar, grammar_digest
from artifacts.grammars.errors import GrammarError
from artifacts.grammars.matching import compile_grammar
from artifacts.grammars.prover import Prover, ProverBusyError
from artifacts.grammars.vocabulary import Vocabulary
from worker.engine.adapter_cache.loading import Loads
from worker.engine.grammar.state import GrammarState, grammar_failure
from worker.engine.scheduling.grammar_demand import GrammarReady
from worker.engine_api import Failure, NewSequence
from worker.engine_api.stats import Removal

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

# Maximum bytes of compiled grammars that are kept for the next request with the same.
CACHE_BYTES = 64 << 20
# Bytes that a compiled grammar takes, at most: so many, and so many for each character of it. Measured: 82,000 for 420
# characters, and 7.9 million for a schema of 42,500 with 1,500 properties.
_BASE_BYTES = 100_000
_BYTES_PER_CHARACTER = 200

# A grammar that is compiled once, so that what all of them need is there.
_WARM_UP = choices_grammar(["a"])

_Prepared = GrammarState | Failure
# Failure of a request whose grammar met an error of ours.
_FAILED = Failure("INTERNAL", "GRAMMAR_FAILED", "the format could not be compiled", "format")


class CompiledGrammars:
    """Grammars at the beginning of an answer, by digest; the ones used last are kept. From one thread."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._matchers: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._matchers)

    def get(self, digest: str) -> LLMatcher | None:
        """Return a grammar that is kept."""
        if digest not in self._matchers:
            return None
        self._matchers.move_to_end(digest)
        return self._matchers[digest][0]

    def put(self, digest: str, matcher: LLMatcher, characters: int) -> None:
        """Keep a grammar; forget those that were used longest ago where they are too many bytes together."""
        size = _BASE_BYTES + _BYTES_PER_CHARACTER * characters
        self._matchers[digest] = matcher, size
        self._bytes += size
        while self._bytes > self._most_bytes and len(self._matchers) > 1:
            self._bytes -= self._matchers.popitem(last=False)[1][1]


class GrammarThread:
    """The grammars of an engine: see worker.engine.scheduling.grammar_demand. One thread compiles, one after the other.

    `vocabulary` is called in that thread, once; it raises GrammarError for a model that serves no formats.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], prover: Callable[[], Prover], loads: Loads[_Prepared | None]
    ) -> None:
        self._read_vocabulary = vocabulary
        self._make_prover = prover
        self._loads = loads
        self._vocabulary: Vocabulary | None = None
        self._prover: Prover | None = None
        self._compiled = CompiledGrammars()
        self._wanted: set[str] = set()

    def warm(self) -> None:
        """Read the vocabulary and start the prover in the thread, so that the first grammar does not wait for them."""
        self._loads.start("", self._warm)

    def request(self, spec: NewSequence) -> None:
        """See Grammars."""
        self._wanted.add(spec.sequence_id)
        self._loads.start(spec.sequence_id, lambda: self._prepare(spec))

    def withdraw(self, sequence_id: str) -> None:
        """See Grammars."""
        self._wanted.discard(sequence_id)

    def poll(self) -> list[GrammarReady]:
        """See Grammars."""
        if not self._loads.has_ended():
            return []
        ready = []
        for sequence_id, result in self._loads.ended():
            if result is not None and sequence_id in self._wanted:
                self._wanted.discard(sequence_id)
                if isinstance(result, Exception):
                    log.error("a grammar could not be prepared", exc_info=result)
                ready.append(GrammarReady(sequence_id, _FAILED if isinstance(result, Exception) else result))
        return ready

    def has_work(self) -> bool:
        """See Grammars."""
        return self._loads.has_ended()

    def forget(self) -> Removal:
        """Forget the compiled grammars and their proofs, of all tenants; those of running sequences go with them."""
        forgotten, self._compiled = self._compiled, CompiledGrammars()
        if self._prover is not None:
            self._prover.forget()
        return Removal(len(forgotten), of_all_tenants=True)

    def close(self) -> None:
        """End the thread and the child."""
        self._wanted.clear()  # what waits is not begun
        if self._prover is not None:  # what is under way ends at once
            self._prover.close()
        self._loads.close()
        if self._prover is not None:  # the thread may just have made it
            self._prover.close()

    def _warm(self) -> None:
        with suppress(GrammarError, ArtifactError, ProverBusyError):  # the first grammar meets it again
            self._matcher(_WARM_UP)

    def _prepare(self, spec: NewSequence) -> _Prepared | None:
        if spec.sequence_id not in self._wanted:  # withdrawn while it waited for the thread
            return None
        try:
            matcher, vocabulary = self._matcher(spec.grammar)
        except (GrammarError, ArtifactError) as error:
            return grammar_failure(error.message)
        except ProverBusyError:
            return Failure("UNAVAILABLE", "GRAMMAR_NOT_READY", "the worker is too busy to compile the format")
        state = GrammarState(matcher.deep_copy(), vocabulary, hides_end=spec.stopping.ignore_eos)
        return state.replay(spec.emitted_ids) or state

    def _matcher(self, grammar: str) -> tuple[LLMatcher, Vocabulary]:
        if self._vocabulary is None or self._prover is None:
            self._vocabulary, self._prover = self._read_vocabulary(), self._make_prover()
        digest = grammar_digest(grammar)
        matcher = self._compiled.get(digest)
        if matcher is None:
            self._prover.prove(grammar)
            matcher = compile_grammar(self._vocabulary.tokens, grammar)
            self._compiled.put(digest, matcher, len(grammar))
        return matcher, self._vocabulary
