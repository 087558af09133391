"""What followed the last ids of a sequence when they came before: in itself, or in answers that have ended.

A table has the last place of each two ids, and each place the one before it with the same two, as LZ77 compresses:

    ids       7  3  9  4  7  3  9  ...       the last two, 3 9, came at place 2, behind 7 as now: a match of three ids
    place     0  1  2  3  4  5  6            draft: 4 7 3 9
"""

from __future__ import annotations

from collections import Counter

# Maximum number of places that are compared, the latest first, and of ids that a match is told to have.
_PLACES = 8
LONGEST_MATCH = 32
# Between two answers of a corpus: no id.
_BETWEEN = -1
# Bytes that an id takes in a corpus, at most, with its entries in the table: measured.
_BYTES_PER_ID = 220
# Maximum bytes of a corpus, and ids of one answer that it takes.
CORPUS_BYTES = 8 << 20
_ANSWER_IDS = 4096


class SuffixIndex:
    """The places of each two ids in a list, which may grow at its end."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self._last: dict[int, int] = {}
        # For each place indexed the one before it with the same two ids; -1: none.
        self._before: list[int] = []

    def index(self, most: int) -> int:
        """Index at most so many of the ids that are new; return the number."""
        ids, last, before, first = self.ids, self._last, self._before, len(self._before)
        stop = min(len(ids), first + most)
        previous = ids[first - 1] if first else _BETWEEN
        for place in range(first, stop):
            token = ids[place]
            pair = previous << 20 | token
            before.append(last.get(pair, -1))
            last[pair] = place
            previous = token
        return stop - first

    @property
    def complete(self) -> bool:
        """Tell whether all ids are indexed."""
        return len(self._before) == len(self.ids)

    def continuation(self, tail: list[int], most: int) -> tuple[int, list[int]]:
        """Return what followed the longest match with the end of `tail`, `most` ids at most, and the match's length.

        `tail` may be the list itself. Of equal matches the most frequent next id counts, then the latest.
        """
        ids, end = self.ids, len(tail)
        place = self._last.get(tail[-2] << 20 | tail[-1], -1) if end > 1 else -1
        if place == len(ids) - 1:  # the end itself, or nothing came after it yet
            place = self._before[place] if place >= 0 else -1
        best, places = 0, list[int]()
        for _ in range(_PLACES):
            if place < 0:
                break
            length, longest = 2, min(place + 1, end, LONGEST_MATCH)
            while length < longest and ids[place - length] == tail[end - 1 - length]:
                length += 1
            if length > best:
                best, places = length, [place]
            elif length == best:
                places.append(place)
            place = self._before[place]
        if not places:
            return 0, []
        if len(places) > 2:
            following = Counter(ids[place + 1] for place in places)
            place = max(places, key=lambda place: following[ids[place + 1]])
        else:
            place = places[0]
        draft = ids[place + 1 : place + 1 + most]
        if _BETWEEN in draft:
            return best, draft[: draft.index(_BETWEEN)]
        # What repeats itself goes on as it does.
        while tail is ids and len(draft) < most:
            draft.append(draft[len(draft) - (len(ids) - 1 - place)])
        return best, draft


class Corpus:
    """The latest answers of a tenant with an adapter, the oldest half of which goes at once."""

    def __init__(self, most_bytes: int = CORPUS_BYTES) -> None:
        self._most_ids = most_bytes // _BYTES_PER_ID // 2
        self._halves = [SuffixIndex([]), SuffixIndex([])]
        self.answers = 0
        self._older_answers = 0

    @property
    def size(self) -> int:
        """Return the bytes that it takes, at most."""
        return _BYTES_PER_ID * sum(len(half.ids) for half in self._halves)

    def add(self, answer: list[int]) -> None:
        """Take an answer that has ended."""
        latest = self._halves[0]
        answer = answer[1 - min(_ANSWER_IDS, self._most_ids) :]
        if len(latest.ids) + len(answer) >= self._most_ids:
            latest = SuffixIndex([])
            self._halves = [latest, self._halves[0]]
            self.answers, self._older_answers = self.answers - self._older_answers, self.answers - self._older_answers
        latest.ids += [*answer, _BETWEEN]
        self.answers += 1

    def index(self, most: int) -> int:
        """Index at most so many of the answers' ids that are new, and not found before; return the number."""
        latest, older = self._halves
        indexed = older.index(most)
        return indexed + latest.index(most - indexed)

    def continuation(self, tail: list[int], most: int) -> tuple[int, list[int]]:
        """See SuffixIndex; the later answers go first."""
        return max((half.continuation(tail, most) for half in self._halves), key=lambda found: found[0])
