"""Forbids the ids that the grammars of a batch's rows do not allow, by one operation over all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.engine.device.transfer import upload


def forbid_ids(scores: Tensor, masks: Sequence[np.ndarray | None]) -> None:
    """Set scores [rows, vocab] in place to -inf where a row's mask, a bit for each id, int32 [words], has none."""
    some = next((mask for mask in masks if mask is not None), None)
    if some is None:
        return
    everything = np.full_like(some, -1)
    bits = np.stack([everything if mask is None else mask for mask in masks])
    vocab = scores.shape[-1]
    if scores.device.type == "cpu":
        forbidden = torch.from_numpy(np.unpackbits(~bits.view(np.uint8), axis=1, count=vocab, bitorder="little"))
        scores.masked_fill_(forbidden.view(torch.bool), float("-inf"))
        return
    words = upload(bits, scores.device)
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = (words[:, :, None] >> places) & 1
    scores.masked_fill_(allowed.view(len(masks), -1)[:, :vocab] == 0, float("-inf"))
