"""The grammars of sequences as the scheduler sees them; worker.engine.grammar.grammars compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from worker.engine_api import Failure, NewSequence


class AnswerGrammar(Protocol):
    """The state of an answer inside its grammar."""

    # Whether nothing may follow.
    complete: bool

    def advance(self, token: int) -> Failure | None:
        """Take the next id of the answer; return why the answer fails where the grammar does not allow it."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a sequence, which has taken its emitted ids; or why it has none."""

    sequence_id: str
    grammar: AnswerGrammar | Failure


class Grammars(Protocol):
    """Compiles grammars beside the steps. All calls come from the step thread."""

    def request(self, spec: NewSequence) -> None:
        """Prepare the grammar of a new sequence; poll reports it, unless it is withdrawn before."""

    def withdraw(self, sequence_id: str) -> None:
        """Forget a sequence that needs no grammar any more."""

    def poll(self) -> list[GrammarReady]:
        """Return what has been prepared since the last call."""

    def has_work(self) -> bool:
        """Tell whether poll would return anything now."""


class NoGrammars:
    """An engine without grammars: every request for one fails."""

    def __init__(self) -> None:
        self._ready: list[GrammarReady] = []

    def request(self, spec: NewSequence) -> None:
        """See Grammars."""
        failure = Failure("INVALID_ARGUMENT", "GRAMMAR_FAILED", "this engine serves no formats", "format")
        self._ready.append(GrammarReady(spec.sequence_id, failure))

    def withdraw(self, sequence_id: str) -> None:
        """See Grammars."""
        self._ready = [ready for ready in self._ready if ready.sequence_id != sequence_id]

    def poll(self) -> list[GrammarReady]:
        """See Grammars."""
        ready, self._ready = self._ready, []
        return ready

    def has_work(self) -> bool:
        """See Grammars."""
        return bool(self._ready)
