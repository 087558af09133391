"""Forbids the ids that the grammars of rows do not allow, in place: nothing as large as the logits is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.engine.device.transfer import upload


def forbid_ids(logits: Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Set logits [rows, vocab] in place to -inf where a row's mask, a bit for each id, int32 [words], has none."""
    constrained = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not constrained:
        return
    if logits.device.type == "cpu":
        from worker.engine.sampling.mask_kernel import apply_masks  # numba is there only where the CPU computes

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
