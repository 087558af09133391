"""The states of answers inside their grammars, and the thread that compiles grammars beside the steps.

A grammar is proven first, in a child process with limits that may be killed (grammars.prover): a killer
grammar kills that child, and fails its own requests.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from contextlib import suppress
from copy import copy
from itertools import takewhile
from typing import TYPE_CHECKING

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import choices_grammar, grammar_digest, space_bound
from loraplex.contracts.grammars.matching import Vocabulary, compile_grammar, plain_error
from loraplex.contracts.grammars.prover import Prover, ProverBusyError
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine_api import MAX_DRAFT, Failure, NewSequence, Removal

# Imported by the first grammar: see grammars.matching.
if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

# Maximum bytes of compiled grammars that are kept for the next request with the same.
CACHE_BYTES = 64 << 20
# Bytes that a compiled grammar takes, at most: so many, and so many for each character of it. Measured: 82,000 for 420
# characters, and 7.9 million for a schema of 42,500 with 1,500 properties.
_BASE_BYTES = 100_000
_BYTES_PER_CHARACTER = 200

# Maximum number of a mask's words with ids, 32 a word, where one text may be all that is left: a token of more bytes is
# rare.
_FEW_WORDS = 16

# Minimum processor time in seconds for one id of a slow grammar: a hundred times the usual.
SLOW_S = 0.002

# A grammar that is compiled once, so that what all of them need is there.
_WARM_UP = choices_grammar(["a"])

# Failure of a request whose grammar met an error of ours.
_FAILED = Failure("INTERNAL", "GRAMMAR_FAILED", "the format could not be compiled", "format")


class GrammarState:
    """A matcher that has taken the ids of an answer. Two that have taken the same ids allow the same next ones.

    With `ignore_eos` end tokens are not to come where anything else may; else an adapter's own end the answer as the
    model's do. `bound` allows fewer ids, and the answer keeps to both.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: Vocabulary, stopping: StoppingParams, bound: LLMatcher | None = None
    ) -> None:
        self.matcher = matcher
        self._bound = bound
        self._own_ends = frozenset(() if stopping.ignore_eos else stopping.end_ids) - vocabulary.end_ids
        self.vocabulary = vocabulary
        self.complete = False
        # Processor time in seconds of the last id: when a sequence is scheduled may depend on it, no id does.
        self.seconds = 0.0
        # The next ids, where the last masks left but one text: a draft, as the model may split it otherwise. Looked for
        # where there are drafts.
        self.forced: tuple[int, ...] = ()
        self.looks_for_forced = False
        self._hidden_ids = vocabulary.end_ids if stopping.ignore_eos else frozenset[int]()
        # Without an end token nothing tells that an answer is complete but that nothing else may come.
        self._looks_ahead = stopping.ignore_eos or not vocabulary.end_ids
        self._look()

    def advance(self, token: int) -> Failure | None:
        """Take the next id of the answer; return why the answer fails where the grammar does not allow it."""
        self.forced = self.forced[1:] if self.forced[:1] == (token,) else ()
        began = time.thread_time()
        if not self.complete and not self._take(token):
            error = self.matcher.get_error()
            if error.startswith("Parser Error: Current row has"):
                return self.problem()
            return grammar_failure(f"token {token} is not allowed: {plain_error(error)}")
        self._look()
        self.seconds = time.thread_time() - began
        return None

    def _take(self, token: int) -> bool:
        if token in self._own_ends and self.matcher.is_accepting():
            token = self.vocabulary.tokens.eos_token
        taken = self.matcher.consume_token(token) and not self.matcher.is_error()
        return taken and (self._bound is None or self._bound.consume_token(token))

    def valid(self, draft: Ids[int]) -> Ids[int]:
        """Return a draft up to the first id that may not come, or that ends the answer."""
        ends = self.vocabulary.end_ids | self._own_ends
        draft = list(takewhile(lambda token: token not in ends, draft))
        matchers = [self.matcher] if self._bound is None else [self.matcher, self._bound]
        return draft[: min(matcher.validate_tokens(draft) for matcher in matchers)]

    def forced_ids(self, mask: np.ndarray, until: float = math.inf) -> list[int]:
        """Return the ids that must follow, where the mask [words] of the next ones leaves but one text.

        Only those that are found while this thread's processor time is before `until`.
        """
        import numpy as np

        state, forced = self, list[int]()
        while len(forced) < MAX_DRAFT and time.thread_time() < until and (token := state._only_text(mask)) is not None:
            forced.append(token)
            state = self.copy() if state is self else state
            if state.advance(token) or state.complete:
                break
            mask = np.zeros_like(mask)
            state.fill(mask)
            state.trim(mask, frozenset())
        return forced

    def _only_text(self, mask: np.ndarray) -> int | None:
        """Return the id with the longest text, if that begins with the texts of all others that the mask leaves."""
        import numpy as np

        words = np.flatnonzero(mask)
        if len(words) > _FEW_WORDS:  # the usual case, and cheap
            return None
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(len(words), 32)
        ids = [32 * int(words[word]) + int(bit) for word, bit in np.argwhere(bits)]
        texts = {token: self.vocabulary.tokens.decode_bytes([token]) for token in ids}
        longest = max(ids, key=lambda token: len(texts[token]), default=None)
        if longest is None or not self.vocabulary.end_ids.isdisjoint(ids):
            return None
        return longest if all(texts[longest].startswith(text) for text in texts.values()) else None

    def copy(self) -> GrammarState:
        """Return one that takes ids of its own."""
        copied = copy(self)
        copied.matcher = self.matcher.deep_copy()
        copied._bound = self._bound and self._bound.deep_copy()
        return copied

    def replay(self, ids: Iterable[int]) -> Failure | None:
        """Take the ids of earlier attempts."""
        for token in ids:
            failure = self.advance(token)
            if failure:
                return failure
        return None

    def allowed_ids(self, banned: frozenset[int]) -> np.ndarray:
        """Return the ids that may come next, in order; `banned` ones only where there are no others.

        There are none where the answer cannot go on; `problem` then says why.
        """
        import numpy as np

        mask = np.zeros(self.vocabulary.words, dtype=np.int32)
        self.fill(mask)
        if self.matcher.is_error():
            return np.zeros(0, dtype=np.int64)
        self.trim(mask, banned)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self.vocabulary.size])

    def fill(self, mask: np.ndarray) -> None:
        """Fill a mask [words] with the ids that the grammar allows next, before `trim`."""
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def trim(self, mask: np.ndarray, banned: frozenset[int]) -> None:
        """Take out of a mask [words] ids beyond the vocabulary or the bound; banned ones, unless none would be left.

        Where the answer may end, put in an adapter's own end ids.
        """
        import numpy as np

        if self._bound is not None:
            within = np.zeros_like(mask)
            self._bound.unsafe_compute_mask_ptr(within.ctypes.data, within.nbytes)
            mask &= within
        words, bits = divmod(self.vocabulary.size, 32)
        if words < len(mask):
            mask[words] &= (1 << bits) - 1
            mask[words + 1 :] = 0
        if self._own_ends and self.matcher.is_accepting():
            for token in self._own_ends:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        if banned := banned | self._hidden_ids:
            trimmed = mask.copy()
            for token in banned:
                trimmed.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
            if trimmed.any():
                mask[:] = trimmed

    def problem(self) -> Failure:
        """Return why nothing may come next, where that is so."""
        error = self.matcher.get_error()
        if "NoExtension" in error or not error:
            return grammar_failure("the format allows nothing after this answer, which is not complete")
        return grammar_failure(f"the format became too complex: {plain_error(error)}")

    def _look(self) -> None:
        if self.complete or not self.matcher.is_accepting():
            return
        self.complete = self.matcher.is_stopped()
        if not self.complete and self._looks_ahead:
            self.complete = self.vocabulary.end_ids.issuperset(self.allowed_ids(self.vocabulary.end_ids).tolist())


def grammar_failure(message: str) -> Failure:
    """Return the failure of an answer for its format."""
    return Failure("INVALID_ARGUMENT", "GRAMMAR_FAILED", message, "format")


# The grammar of a sequence, which has taken its emitted ids; or why it has none.
Prepared = GrammarState | Failure
# A sequence's id with its grammar; None: nobody waits for it any more.
_Ended = tuple[str, Prepared] | None


class CompiledGrammars:
    """Grammars at the beginning of an answer, by tenant and text; the ones used last are kept. From one thread."""

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
    """The grammars of an engine. One thread compiles, one after the other; all calls come from the step thread.

    `vocabulary` is called in that thread, once; it raises GrammarError for a model that serves no formats.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], prover: Callable[[], Prover], loads: LoaderThreads[_Ended]
    ) -> None:
        self._read_vocabulary = vocabulary
        self._make_prover = prover
        self._loads = loads
        self._vocabulary: Vocabulary | None = None
        self._prover: Prover | None = None
        self._compiled = CompiledGrammars()
        self._awaited: set[str] = set()
        # Sequences that wait for the thread, by tenant; the tenant whose turn is next comes first.
        self._waiting: dict[str, deque[NewSequence]] = {}
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Read the vocabulary and start the prover in the thread, so that the first grammar does not wait for them."""
        self._loads.start("", self._warm)

    def request(self, spec: NewSequence) -> None:
        """Prepare the grammar of a new sequence; poll reports it, unless it is withdrawn before."""
        self._awaited.add(spec.sequence_id)
        with self._lock:
            self._waiting.setdefault(spec.tenant, deque()).append(spec)
        self._loads.start(spec.sequence_id, self._prepare_next)  # one for each that waits, whichever is next

    def withdraw(self, sequence_id: str) -> None:
        """Forget a sequence that needs no grammar any more."""
        self._awaited.discard(sequence_id)

    def poll(self) -> list[tuple[str, Prepared]]:
        """Return what has been prepared since the last call, by sequence id."""
        if not self._loads.has_ended():
            return []
        ready = []
        for _, result in self._loads.ended():
            if isinstance(result, tuple) and result[0] in self._awaited:
                self._awaited.discard(result[0])
                ready.append(result)
        return ready

    def has_work(self) -> bool:
        """Tell whether poll would return anything now."""
        return self._loads.has_ended()

    def forget(self) -> Removal:
        """Forget the compiled grammars and their proofs, of all tenants; those of running sequences go with them."""
        forgotten, self._compiled = self._compiled, CompiledGrammars()
        if self._prover is not None:
            self._prover.forget()
        return Removal(len(forgotten), of_all_tenants=True)

    def close(self) -> None:
        """End the thread and the child."""
        self._awaited.clear()  # what waits is not begun
        if self._prover is not None:  # what is under way ends at once
            self._prover.close()
        self._loads.close()
        if self._prover is not None:  # the thread may just have made it
            self._prover.close()

    def _warm(self) -> None:
        with suppress(GrammarError, ArtifactError, ProverBusyError):  # the first grammar meets it again
            self._matcher(_WARM_UP, "")

    def _prepare_next(self) -> _Ended:
        with self._lock:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            spec = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
        if spec.sequence_id not in self._awaited:  # withdrawn while it waited for the thread
            return None
        try:
            return spec.sequence_id, self._prepare(spec)
        except Exception:
            log.exception("a grammar could not be prepared")
            return spec.sequence_id, _FAILED

    def _prepare(self, spec: NewSequence) -> Prepared:
        try:
            matcher, vocabulary = self._matcher(spec.grammar, spec.tenant)
            text = space_bound(spec.grammar)
            bound = self._matcher(text, spec.tenant)[0].deep_copy() if text else None
        except (GrammarError, ArtifactError) as error:
            return grammar_failure(error.message)
        except ProverBusyError:
            return Failure("UNAVAILABLE", "GRAMMAR_NOT_READY", "the worker is too busy to compile the format")
        state = GrammarState(matcher.deep_copy(), vocabulary, spec.stopping, bound)
        return state.replay(spec.emitted_ids) or state

    def _matcher(self, grammar: str, tenant: str) -> tuple[LLMatcher, Vocabulary]:
        if self._vocabulary is None or self._prover is None:
            self._vocabulary, self._prover = self._read_vocabulary(), self._make_prover()
        digest = grammar_digest(grammar, tenant)
        matcher = self._compiled.get(digest)
        if matcher is None:
            self._prover.prove(grammar, tenant=tenant)
            matcher = compile_grammar(self._vocabulary.tokens, grammar)
            self._compiled.put(digest, matcher, len(grammar))
        return matcher, self._vocabulary
