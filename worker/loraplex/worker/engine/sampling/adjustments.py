"""Change logits as requests ask, before a token is drawn: bias, penalties, banned ids and the only allowed ones.

See sampler.py for their order.
"""

from __future__ import annotations

from array import array
from collections import ChainMap
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.device import upload

# Bounds of a penalty: with it, a float32 logit multiplied or divided by the penalty stays finite.
_SMALLEST, _LARGEST = 1e-30, 1e30


class Adjustments:
    """A sequence's logit bias, and its distinct ids with their counts in the answer; updated token by token."""

    def __init__(self, sampling: SamplingParams, prompt_length: int) -> None:
        self.penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._penalizes = sampling.penalizes
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self.allowed_ids = np.array(sampling.allowed_token_ids, dtype=np.int64)
        self.ids = array("q")
        self.counts = array("i")
        self._places: MutableMapping[int, int] = {}
        self._prompt_length = prompt_length
        # Only the repetition penalty counts the prompt.
        self._seen = prompt_length if sampling.repetition_penalty == 1.0 else 0

    def catch_up(self, ids: Sequence[int]) -> None:
        """Count the ids, of prompt and answer so far, that are new since the last call."""
        if not self._penalizes:
            return
        prompt_length = max(self._seen, self._prompt_length)
        self._count(ids[self._seen : prompt_length], answered=False)
        self._count(ids[prompt_length:], answered=True)
        self._seen = len(ids)

    def after(self, drafted: Sequence[int]) -> Adjustments:
        """Return those of an answer that goes on with these ids."""
        if not self._penalizes or not drafted:
            return self
        following = copy(self)
        following.ids, following.counts = self.ids[:], self.counts[:]
        following._places = ChainMap({}, self._places)  # a copy would take a millisecond of a long prompt's
        following._count(drafted, answered=True)
        return following

    def _count(self, ids: Iterable[int], *, answered: bool) -> None:
        for token in ids:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += answered


def adjust_logits(scores: Tensor, rows: Sequence[Adjustments | None], banned: Sequence[Collection[int]]) -> None:
    """Change float32 scores [rows, vocab] in place, each row by its own adjustments and banned ids."""
    biased = [(row, each) for row, each in enumerate(rows) if each and len(each.bias_ids)]
    if biased:
        where = _places(scores, [(row, each.bias_ids) for row, each in biased])
        scores.index_put_(where, _tensor([each.bias for _, each in biased], scores), accumulate=True)
    penalized = [(row, each) for row, each in enumerate(rows) if each and len(each.ids)]
    if penalized:
        _penalize(scores, penalized)
    pairs = [(row, token) for row, ids in enumerate(banned) for token in ids]
    if pairs:
        index = upload(pairs, scores.device)
        # A number of Python's would be copied to the device, for which the host waits.
        scores[index[:, 0], index[:, 1]] = scores.new_full((), float("-inf"))
    restricted = [(row, each.allowed_ids) for row, each in enumerate(rows) if each and len(each.allowed_ids)]
    if restricted:
        where = _places(scores, restricted)
        allowed = scores[where]
        scores.index_fill_(0, upload([row for row, _ in restricted], scores.device), float("-inf"))
        scores[where] = allowed


def _penalize(scores: Tensor, rows: Sequence[tuple[int, Adjustments]]) -> None:
    where = _places(scores, [(row, np.asarray(each.ids)) for row, each in rows])
    counts = _tensor([np.asarray(each.counts) for _, each in rows], scores)
    penalties = np.repeat([each.penalties for _, each in rows], [len(each.ids) for _, each in rows], axis=0)
    repetition, frequency, presence = upload(penalties, scores.device).unbind(1)
    repetition = repetition.clamp(_SMALLEST, _LARGEST).float()
    values = scores[where]
    values = torch.where(values < 0, values * repetition, values / repetition)
    scores[where] = values - frequency.float() * counts - presence.float() * (counts > 0)


def _places(scores: Tensor, rows: Sequence[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Return the index of the given ids in the given rows of scores."""
    numbers = np.repeat([row for row, _ in rows], [len(ids) for _, ids in rows])
    ids = np.concatenate([ids for _, ids in rows])
    return upload(numbers, scores.device), upload(ids, scores.device)


def _tensor(parts: Sequence[np.ndarray], like: Tensor) -> Tensor:
    return upload(np.concatenate(parts), like.device).to(like.dtype)
