"""Fills the masks of a step's rows, in parallel and while the model computes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor

from worker.engine.grammar.state import GrammarState
from worker.engine.scheduling.batch import Batch, Row
from worker.engine_api import Failure

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Masks:
    """The ids that may come next, of rows with a grammar: a bit for each id, int32 [words]; and rows that fail."""

    allowed: Mapping[Row, np.ndarray]
    failures: Mapping[Row, Failure]


NO_MASKS = Masks({}, {})


class MaskFiller:
    """Fills masks in threads of its own, which do not hold the interpreter's lock."""

    def __init__(self) -> None:
        # Made when the first sequence with a grammar comes.
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def begin(self, batch: Batch) -> Future[Masks] | None:
        """Begin to fill the masks of a batch; None where no row needs one."""
        constrained = [
            (row, grammar)
            for row in batch.rows
            if isinstance(grammar := row.sequence.grammar, GrammarState) and row.samples
        ]
        if not constrained:
            return None
        if self._thread is None or self._executor is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._executor = LLExecutor()
        return self._thread.submit(_fill, self._executor, constrained)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _fill(executor: LLExecutor, rows: list[tuple[Row, GrammarState]]) -> Masks:
    words = rows[0][1].vocabulary.words
    masks = np.zeros((len(rows), words), dtype=np.int32)
    matchers = [(grammar.matcher, index) for index, (_, grammar) in enumerate(rows)]
    try:
        executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, words * 4, len(rows))
    except Exception:
        _log.exception("the masks of a batch could not be filled: its rows with a grammar fail")
        masks[:] = 0
    allowed: dict[Row, np.ndarray] = {}
    failures: dict[Row, Failure] = {}
    for (row, grammar), mask in zip(rows, masks, strict=True):
        grammar.trim(mask, row.sequence.banned_ids(row.answered))
        if mask.any() and not grammar.matcher.is_error():
            allowed[row] = mask
        else:
            failures[row] = grammar.problem()
    return Masks(allowed, failures)
