"""The state of an answer inside its grammar: what the ids so far leave to come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from artifacts.grammars.matching import plain_error
from artifacts.grammars.vocabulary import Vocabulary
from worker.engine_api import Failure

# See artifacts.grammars.matching.
if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher


class GrammarState:
    """A matcher that has taken the ids of an answer. Two that have taken the same ids allow the same next ones.

    `hides_end`: the model's end tokens are not to come where anything else may.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, hides_end: bool = False) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.complete = False
        self._hidden_ids = vocabulary.end_ids if hides_end else frozenset[int]()
        # Without an end token nothing tells that an answer is complete but that nothing else may come.
        self._looks_ahead = hides_end or not vocabulary.end_ids
        self._look()

    def advance(self, token: int) -> Failure | None:
        """Take the next id of the answer; return why the answer fails where the grammar does not allow it."""
        if not self.complete and (not self.matcher.consume_token(token) or self.matcher.is_error()):
            return grammar_failure(f"token {token} is not allowed: {plain_error(self.matcher.get_error())}")
        self._look()
        return None

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
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.matcher.is_error():
            return np.zeros(0, dtype=np.int64)
        self.trim(mask, banned)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self.vocabulary.size])

    def trim(self, mask: np.ndarray, banned: frozenset[int]) -> None:
        """Take out of a mask [words] the ids beyond the vocabulary and, unless none would be left, the banned ones."""
        import numpy as np

        words, bits = divmod(self.vocabulary.size, 32)
        if words < len(mask):
            mask[words] &= (1 << bits) - 1
            mask[words + 1 :] = 0
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
