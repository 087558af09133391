"""Turns a worker's token ids into the events that a client gets: text as it becomes whole, stop strings, the end.

        ids ──▶ text pieces ──▶ pending while they may begin a stop string ──▶ deltas

A token that lies wholly in a stop string is neither delivered nor counted; one that reaches into it is delivered, its
text cut where the stop string begins. A request may keep stop strings: then their tokens are delivered as all others.
Reasoning is not searched for stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import msgspec

from loraplex.contracts.options import FinishReason, TokenLogprobs
from loraplex.router.dispatch.links import Frame, read_logprobs
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.chat_reader import ChatFormat, ChatReader
from loraplex.router.request import Delta, Event, Finished, PromptLogprobs, Received, Request
from loraplex.router.text.tokenizer import ModelTokenizer, TextStream
from loraplex.runtime.rpc.errors import Aborted

# Maximum characters of a delta: 1 MiB of a message's 4, since a character has at most 4 bytes.
PART_CHARACTERS = 256 * 1024


class Echo:
    """The prompt's text of one request; empty: it is not asked for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._size = len(text.encode())

    def deltas(self, choice: int, received: Received) -> list[Delta]:
        """Return the text as deltas without ids, without what the choice's client has of it."""
        received_bytes = received.text_bytes
        if received_bytes is None:  # its older client has it with the first ids
            received_bytes = self._size if received.token_ids or received.finished else 0
        text = without_bytes(self._text, received_bytes)
        parts = (text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS))
        return [Delta(0, (), part, choice) for part in parts]

    def answer_bytes(self, received: Received) -> int | None:
        """Return how many bytes of the answer itself the client has; None: it did not say."""
        return None if received.text_bytes is None else max(0, received.text_bytes - self._size)


def without_bytes(text: str, count: int) -> str:
    """Return a text without its first `count` bytes of UTF-8."""
    return text.encode()[count:].decode(errors="ignore") if count else text


class StopStrings:
    """The stop strings of a request. `keep`: the answer has the one that ends it, instead of ending before it."""

    def __init__(self, strings: Sequence[str] = (), *, keep: bool = False) -> None:
        self._strings = tuple(strings)
        self._keep = keep

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._strings)

    def find(self, text: str, before: int) -> tuple[int, str] | None:
        """Return where the answer ends in `text`, and the stop string that ends it; None while none does.

        The first `before` characters alone have none.
        """
        matches = [(at, stop) for stop in self._strings if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if not matches:
            return None
        # Of the stop strings that one token completes: the earliest; of two at the same place the longer.
        at, stop = min(matches, key=lambda match: (match[0], -len(match[1])))
        return (at + len(stop) if self._keep else at), stop

    def safe_length(self, text: str) -> int:
        """Return how many characters of the text no stop string can begin in, whatever follows."""
        length = len(text)
        for stop in self._strings:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    length = min(length, len(text) - size)
                    break
        return length


class BestOf:
    """The candidates of one request. `received` is what a resuming client has of the ranked answers."""

    def __init__(self, request: Request, received: Mapping[int, Received], echo: Echo) -> None:
        self._echo = echo
        self._request = request
        self._received = received
        self._candidates = [_Candidate() for _ in range(request.best_of)]

    def collect(self, events: Sequence[Event]) -> list[Event]:
        """Keep the candidates' tokens and ends; return the other events."""
        others: list[Event] = []
        for event in events:
            match event:
                case Delta():
                    self._candidates[event.choice].add(event)
                case Finished():
                    self._candidates[event.choice].finished = event
                case _:
                    others.append(event)
        return others

    def ranked(self) -> list[Event]:
        """Return the best answers, each whole, best first. Raises Aborted where they differ from the lost stream's."""
        events: list[Event] = []
        ranked = sorted(self._candidates, key=_Candidate.mean_logprob, reverse=True)
        for choice, candidate in enumerate(ranked[: self._request.n]):
            logprobs = candidate.delta.logprobs if self._request.logprobs is not None else ()
            received = self._received.get(choice, Received())
            events += self._echo.deltas(choice, received)
            if not received.token_ids and not received.finished:
                lengths = candidate.delta.text_lengths if logprobs else ()
                events.append(replace(candidate.delta, choice=choice, logprobs=logprobs, text_lengths=lengths))
            elif received.token_ids != candidate.delta.token_ids:  # close to a tie, and computed in another batch
                raise Aborted("the candidates rank otherwise than they did for the lost stream", reason="RANKS_DIFFER")
            if candidate.finished is not None and not received.finished:
                events.append(replace(candidate.finished, choice=choice))
        return events


_EMPTY = Delta(0, (), "")


@dataclass(slots=True)
class _Candidate:
    delta: Delta = _EMPTY
    finished: Finished | None = None

    def add(self, delta: Delta) -> None:
        before = self.delta
        self.delta = Delta(
            offset=0,
            token_ids=before.token_ids + delta.token_ids,
            text=before.text + delta.text,
            logprobs=before.logprobs + delta.logprobs,
            reasoning=before.reasoning + delta.reasoning,
            tool_calls=before.tool_calls + delta.tool_calls,
            text_lengths=before.text_lengths + delta.text_lengths,
        )

    def mean_logprob(self) -> float:
        values = [token.logprob for token in self.delta.logprobs]
        return sum(values) / len(values) if values else float("-inf")


class ResumeFilter:
    """Tells a client what deltas add. The client has `text_bytes` of the text; None: that of the tokens it has."""

    def __init__(self, text_bytes: int | None = None, reader: ChatReader | None = None) -> None:
        self._bytes_had = text_bytes
        self._reader = reader

    @property
    def has_calls(self) -> bool:
        """Return whether the answer has a complete call."""
        return self._reader is not None and self._reader.has_calls

    def tell(self, delta: Delta, before: str, *, ended: bool, had_all: bool) -> Delta:
        """Return a delta without what the client has. `before` is the text of the tokens in front of it, which it has.

        `ended`: nothing follows. `had_all`: the client has all of the answer's tokens, and with them the end of what
        they tell.
        """
        if self._reader is None:
            text = self._without_had(before, delta.text)
            return delta if text == delta.text else replace(delta, text=text)
        old, new = self._reader.feed(before), self._reader.feed(delta.text)
        text, reasoning = new.text, new.reasoning
        if ended:
            rest = self._reader.finish()
            if self._bytes_had is not None or not had_all:
                text += rest.text
            if not had_all:
                reasoning += rest.reasoning
        calls = tuple(new.tool_calls)
        return replace(delta, text=self._without_had(old.text, text), reasoning=reasoning, tool_calls=calls)

    def _without_had(self, before: str, text: str) -> str:
        if self._bytes_had is None:
            return text
        if not self._bytes_had:
            return before + text
        whole, received_bytes = before + text, self._bytes_had
        self._bytes_had = max(0, received_bytes - len(whole.encode()))
        return without_bytes(whole, received_bytes)


class Answer:
    """The answer to one request: turns a job's tokens into events, or into those that come after `received`."""

    def __init__(
        self,
        request: Request,
        tokenizer: ModelTokenizer,
        routed: RoutedJob,
        received: Mapping[int, Received] | None = None,
        chat_format: ChatFormat | None = None,
    ) -> None:
        self._routed = routed
        # A job may have log probabilities that its client has not asked for.
        self._shows_logprobs = request.logprobs is not None or request.best_of > request.n
        received_choices = received or {}
        skip = request.skip_special_tokens
        prompt_ids = routed.job.prompt_ids
        echo = Echo(tokenizer.decode(prompt_ids, skip_special_tokens=skip, whole=False) if request.echo else "")
        self._ranking = BestOf(request, received_choices, echo) if request.best_of > request.n else None
        if self._ranking is not None:
            # A client has ranked answers, and nothing of the candidates themselves.
            received_choices = {}
        received_before = [received_choices.get(choice, Received()) for choice in range(routed.job.n)]
        self._open = {choice for choice, before in enumerate(received_before) if not before.finished}
        self._counted = frozenset(self._open)
        # Choices that have ended since the last `close_ended`.
        self._ended: list[int] = []
        self._received_tokens = sum(len(choice.token_ids) for choice in received_choices.values() if choice.finished)
        # A client that resumes has got a first message, and these are in the first.
        self._prompt_logprobs_due = request.prompt_logprobs is not None and received is None
        # The deltas of the prompt's text, by choice, until they are sent; a ranking sends its own.
        self._echoes = (
            {c: echo.deltas(c, received_before[c]) for c in self._open} if request.echo and not self._ranking else {}
        )
        marks = chat_format.marks if chat_format else ()
        self._choices = [
            ChoiceAnswer(
                tokenizer.stream(prompt_ids, skip_special_tokens=skip, echo=request.echo, marks=marks),
                request.stopping.stop,
                request.stream_interval,
                choice,
                len(received_before[choice].token_ids),
                ResumeFilter(
                    echo.answer_bytes(received_before[choice]),
                    None if chat_format is None else ChatReader(chat_format, choice),
                ),
                request.keep_stop,
                ChatReader(chat_format) if request.stopping.stop and chat_format and chat_format.reasoning else None,
            )
            for choice in range(routed.job.n)
        ]

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens of all candidates, without those that a stop string cut."""
        return self._received_tokens + sum(self._choices[choice].delivered for choice in self._counted)

    def events_of(self, arrivals: Sequence[Frame]) -> list[Event]:
        """Return the events that new tokens make; of many it may run in a thread."""
        events: list[Event] = []
        was_open = bool(self._open)
        if self._prompt_logprobs_due:
            self._prompt_logprobs_due = False
            events.append(PromptLogprobs(tuple(map(read_logprobs, self._routed.prompt_logprobs))))
        for arrival in arrivals:
            if arrival.choice not in self._open:
                continue
            events += self._echoes.pop(arrival.choice, ())
            choice = self._choices[arrival.choice]
            logprobs = arrival.logprobs if self._shows_logprobs else ()
            delta, finished = choice.push(arrival.token_ids, arrival.finish, logprobs)
            if delta is not None:
                events.append(delta)
            if finished is not None:
                self._open.discard(arrival.choice)
                self._ended.append(arrival.choice)
                events.append(finished)
        if self._ranking is None:
            return events
        events = self._ranking.collect(events)
        # Rank once: tokens after the stop string of the last candidate make no events.
        return events + self._ranking.ranked() if was_open and not self._open else events

    def refuse(self, choice: int) -> None:
        """End a choice whose text is refused: its further tokens make no events."""
        if choice in self._open:
            self._open.discard(choice)
            self._ended.append(choice)

    def close_ended(self) -> None:
        """Close the choices that have ended, some by a stop string, which their worker does not know."""
        while self._ended:
            self._routed.close_choice(self._ended.pop())


class _PendingToken(msgspec.Struct, frozen=True):
    """A token that is not delivered yet; without an id it is only text."""

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None


class ChoiceAnswer:
    """A choice of an answer. The client has the first `received` of its tokens already.

    `reasoning` finds the reasoning, which is not searched for stop strings.
    """

    def __init__(
        self,
        stream: TextStream,
        stop: Sequence[str],
        stream_interval: int,
        choice: int = 0,
        received: int = 0,
        resume_filter: ResumeFilter | None = None,
        keep_stop: bool = False,
        reasoning: ChatReader | None = None,
    ) -> None:
        self._choice = choice
        self._received = received
        self._stream = stream
        self._stop = StopStrings(stop, keep=keep_stop)
        self._interval = stream_interval
        self._filter = resume_filter or ResumeFilter()
        # Tokens that are not delivered yet, each with its text; `_pending_text` is all of that text.
        self._pending: list[_PendingToken] = []
        self._pending_text = ""
        # The pending text as it was searched for stop strings, as far as it was.
        self._searched = ""
        self._reasoning = reasoning
        # Number of tokens that the client has, with those returned so far.
        self.delivered = 0

    def push(
        self, ids: Sequence[int], finish: FinishReason | None, logprobs: Sequence[TokenLogprobs] = ()
    ) -> tuple[Delta | None, Finished | None]:
        """Return what the next ids, and perhaps the end, add for the client. Nothing may be pushed after a Finished.

        `logprobs` has one entry for each id, or none.
        """
        # End and stop tokens are ids without text.
        silent = ids[-1:] if finish in (FinishReason.END, FinishReason.STOP) else ()
        texts = [*map(self._stream.push, ids[: len(ids) - len(silent)]), *("" for _ in silent)]
        if stopped := self._append(ids, texts, logprobs):
            return stopped
        if finish is None:
            if len(self._pending) < self._interval:
                return None, None
            return self._release(self._stop.safe_length(self._searched), self._interval, ended=False), None
        if stopped := self._flush(self._stream.flush()):
            return stopped
        delta = self._release(len(self._pending_text), 0, ended=True)
        return delta, _finished(finish, ids, self._choice, calls=self._filter.has_calls)

    def _append(
        self, ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[TokenLogprobs]
    ) -> tuple[Delta | None, Finished] | None:
        """Add tokens to the pending ones; return the end if a stop string is complete now."""
        tokens = list(map(_PendingToken, ids, texts, logprobs or repeat(None)))
        before, length = len(self._searched), len(self._pending_text)
        if self._search("".join(texts)) is None:
            self._pending += tokens
            return None
        for token in tokens:  # the first one that completes a stop string ends the answer
            self._pending.append(token)
            length += len(token.text)
            if match := self._stop.find(self._searched[:length], before):
                self._pending_text = self._pending_text[:length]
                return self._stopped(*match)
        return None

    def _flush(self, text: str) -> tuple[Delta | None, Finished] | None:
        """Add text that comes after the last token to that token."""
        if text:
            if not self._pending:  # its tokens are delivered already; the text belongs to none that is left
                self._pending.append(_PendingToken(None, ""))
            last = self._pending[-1]
            self._pending[-1] = _PendingToken(last.token_id, last.text + text, last.logprobs)
        match = self._search(text, ended=True)
        return self._stopped(*match) if match else None

    def _search(self, more: str, *, ended: bool = False) -> tuple[int, str] | None:
        """Add to the pending text; return the first stop string in it, and where the answer ends then."""
        before = len(self._searched)
        self._pending_text += more
        self._searched += more if self._reasoning is None else self._reasoning.hide_reasoning(more, ended=ended)
        return self._stop.find(self._searched, before)

    def _stopped(self, at: int, stop: str) -> tuple[Delta | None, Finished]:
        return self._cut(at), Finished(FinishReason.STOP, stop_string=stop, choice=self._choice)

    def _cut(self, at: int) -> Delta | None:
        """Deliver the tokens that begin before character `at` of the pending text, and forget the rest."""
        whole_tokens, start = 0, 0
        for token in self._pending:
            if start >= at:
                break
            start += len(token.text)
            whole_tokens += 1
        delta = self._delta(self._pending[:whole_tokens], self._pending_text[:at], ended=True)
        self._pending, self._pending_text, self._searched = [], "", ""
        return delta

    def _release(self, safe: int, least: int, *, ended: bool) -> Delta | None:
        """Deliver the tokens whose text ends within `safe` characters, if there are at least so many."""
        count, end = 0, 0
        for token in self._pending:
            if end + len(token.text) > safe:
                break
            end += len(token.text)
            count += 1
        # A token without text yet belongs to the next token with text: a stop string that begins there cuts both.
        while self._stop and not ended and count and not self._pending[count - 1].text:
            count -= 1
        if count < least:
            return None
        delta = self._delta(self._pending[:count], self._pending_text[:end], ended=ended)
        self._pending, self._pending_text = self._pending[count:], self._pending_text[end:]
        self._searched = self._searched[end:]
        return delta

    def _delta(self, tokens: Sequence[_PendingToken], text: str, *, ended: bool) -> Delta | None:
        count = sum(token.token_id is not None for token in tokens)
        skipped = min(count, max(0, self._received - self.delivered))
        skipped_characters = sum(len(token.text) for token in tokens[:skipped])
        ids = tuple(token.token_id for token in tokens[skipped:] if token.token_id is not None)
        offset = self.delivered + skipped
        self.delivered += count
        logprobs = tuple(token.logprobs for token in tokens[skipped:] if token.logprobs is not None)
        own = text[skipped_characters:]
        delta = Delta(offset, ids, own, self._choice, logprobs)
        delta = self._filter.tell(
            delta, text[:skipped_characters], ended=ended, had_all=self._received >= self.delivered
        )
        if logprobs and delta.text == own:
            delta = replace(delta, text_lengths=_lengths(tokens[skipped:], len(own)))
        return delta if ids or delta.text or delta.reasoning or delta.tool_calls else None


def _lengths(tokens: Sequence[_PendingToken], whole: int) -> tuple[int, ...]:
    """Return how many of `whole` characters each token with an id adds; a stop string may cut the last ones."""
    lengths: list[int] = []
    for token in tokens:
        if token.token_id is not None:
            lengths.append(min(len(token.text), whole))
            whole -= lengths[-1]
    return tuple(lengths)


def _finished(finish: FinishReason, ids: Sequence[int], choice: int, *, calls: bool) -> Finished:
    if finish is FinishReason.LENGTH:
        return Finished(FinishReason.LENGTH, choice=choice)
    if finish is FinishReason.STOP:
        return Finished(FinishReason.STOP, stop_token_id=ids[-1] if ids else None, choice=choice)
    return Finished(FinishReason.TOOL_CALLS if calls else FinishReason.END, choice=choice)
