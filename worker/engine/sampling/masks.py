"""Masks of the ids that grammars allow: filled in parallel while the model computes, then applied to the logits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from worker.engine.device import upload
from worker.engine.scheduling.grammars import GrammarState
from worker.engine.scheduling.sequence import Batch, Row
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
            (row, grammar) for row in batch.rows if (grammar := row.sequence.grammar) is not None and row.samples
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


def forbid_ids(logits: Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Set logits [rows, vocab] in place to -inf where a row's mask, a bit for each id, int32 [words], has none."""
    constrained = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not constrained:
        return
    if logits.device.type == "cpu":
        from worker.engine.kernels.masks import apply_masks  # numba is there only where the CPU computes

        rows, bits = zip(*constrained, strict=True)
        apply_masks(logits, rows, bits)
    else:
        forbid_with_torch(logits, masks)


def forbid_with_torch(logits: Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Do the same where at least one row has a mask, on any device; masks are uploaded packed: 16 KiB for 128k ids."""
    everything = np.full_like(next(mask for mask in masks if mask is not None), -1)
    words = upload(np.stack([everything if mask is None else mask for mask in masks]), logits.device)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> places) & 1
    logits.masked_fill_(allowed.view(len(masks), -1)[:, : logits.shape[-1]] == 0, float("-inf"))
