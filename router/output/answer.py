"""From a worker's token ids to what a client gets: text as it becomes whole, stop strings, the end.

        ids ──▶ text pieces ──▶ held while they may begin a stop string ──▶ deltas

A token that lies wholly in a stop string is neither delivered nor counted; one that reaches into it is delivered, its
text cut where the stop string begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.dispatch.routed_job import WorkerFinish
from router.request import Delta, Finished, FinishReason, TokenLogprobs
from router.text.tokenizer import TextStream


class _Held(msgspec.Struct, frozen=True):
    """A token that is not delivered yet; without an id it is only text."""

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None


class Answer:
    """One choice of one request. Of its tokens the client has the first `received` already, with their text."""

    def __init__(
        self, stream: TextStream, stop: Sequence[str], stream_interval: int, choice: int = 0, received: int = 0
    ) -> None:
        self._choice = choice
        self._received = received
        self._stream = stream
        self._stop = tuple(stop)
        self._interval = stream_interval
        # Tokens not yet delivered, each with its text; together `_held_text`.
        self._held: list[_Held] = []
        self._held_text = ""
        # Tokens that the client has with what has been returned so far.
        self.delivered = 0

    def push(
        self, ids: Sequence[int], finish: WorkerFinish | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> tuple[Delta | None, Finished | None]:
        """What the next ids, and perhaps the end, give the client. Nothing may be pushed after a Finished.

        `logprobs` has one entry for each id, or none.
        """
        last = len(ids) - 1
        for index, token_id in enumerate(ids):
            # End and stop tokens are ids without text.
            silent = index == last and finish in (WorkerFinish.END, WorkerFinish.STOP_TOKEN)
            text = "" if silent else self._stream.push(token_id)
            self._held.append(_Held(token_id, text, logprobs[index] if logprobs else None))
            if stopped := self._append_text(text):
                return stopped
        if finish is None:
            if len(self._held) < self._interval:
                return None, None
            return self._release(self._safe_length(), self._interval, ended=False), None
        if stopped := self._flush(self._stream.flush()):
            return stopped
        return self._release(len(self._held_text), 1, ended=True), _finished(finish, ids, self._choice)

    def _flush(self, text: str) -> tuple[Delta | None, Finished] | None:
        """Text that comes after the last token; it goes with that."""
        if not text:
            return None
        if not self._held:  # its tokens are delivered already; the text belongs to none that is left
            self._held.append(_Held(None, ""))
        last = self._held[-1]
        self._held[-1] = _Held(last.token_id, last.text + text, last.logprobs)
        return self._append_text(text)

    def _append_text(self, text: str) -> tuple[Delta | None, Finished] | None:
        """Add to the held text; the end, if a stop string is complete now."""
        before = len(self._held_text)
        self._held_text += text
        found = [
            (at, stop) for stop in self._stop if (at := self._held_text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        # Of those that one token completes: the earliest; of two at one place the longer.
        at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
        return self._cut(at), Finished(FinishReason.STOP, stop_string=stop, choice=self._choice)

    def _cut(self, at: int) -> Delta | None:
        """Deliver what begins before character `at` of the held text, and forget the rest."""
        kept, start = 0, 0
        for held in self._held:
            if start >= at:
                break
            start += len(held.text)
            kept += 1
        delta = self._delta(self._held[:kept], self._held_text[:at])
        self._held, self._held_text = [], ""
        return delta

    def _safe_length(self) -> int:
        """Characters of the held text that no stop string can begin in."""
        length = len(self._held_text)
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held_text)), 0, -1):
                if self._held_text.endswith(stop[:size]):
                    length = min(length, len(self._held_text) - size)
                    break
        return length

    def _release(self, safe: int, least: int, *, ended: bool) -> Delta | None:
        """Deliver the tokens whose text ends within `safe` characters, if there are at least so many."""
        count, end = 0, 0
        for held in self._held:
            if end + len(held.text) > safe:
                break
            end += len(held.text)
            count += 1
        # What has no text yet belongs to the next that has; a stop string that begins there cuts it, however it came.
        while self._stop and not ended and count and not self._held[count - 1].text:
            count -= 1
        if count < least:
            return None
        delta = self._delta(self._held[:count], self._held_text[:end])
        self._held, self._held_text = self._held[count:], self._held_text[end:]
        return delta

    def _delta(self, tokens: Sequence[_Held], text: str) -> Delta | None:
        count = sum(held.token_id is not None for held in tokens)
        known = min(count, max(0, self._received - self.delivered))
        text = text[sum(len(held.text) for held in tokens[:known]) :]
        ids = tuple(held.token_id for held in tokens[known:] if held.token_id is not None)
        offset = self.delivered + known
        self.delivered += count
        if not ids and not text:
            return None
        logprobs = tuple(held.logprobs for held in tokens[known:] if held.logprobs is not None)
        return Delta(offset, ids, text, self._choice, logprobs)


def _finished(finish: WorkerFinish, ids: Sequence[int], choice: int) -> Finished:
    if finish is WorkerFinish.LENGTH:
        return Finished(FinishReason.LENGTH, choice=choice)
    if finish is WorkerFinish.STOP_TOKEN:
        return Finished(FinishReason.STOP, stop_token_id=ids[-1] if ids else None, choice=choice)
    return Finished(FinishReason.END, choice=choice)
