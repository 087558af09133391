"""The index against a plain search, and what a corpus keeps."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from loraplex.speculation.suffixes import LONGEST_MATCH, Corpus, SuffixIndex


def longest_match(ids: list[int], tail: list[int], *, own: bool) -> int:
    """The longest suffix of `tail`, of 2 to LONGEST_MATCH ids, that came before in `ids` with an id after it."""
    for length in range(min(len(tail), LONGEST_MATCH), 1, -1):
        starts = range(len(ids) - length - own + 1) if own else range(len(ids) - length)
        if any(ids[start : start + length] == tail[-length:] for start in starts if start + length < len(ids)):
            return length
    return 0


@pytest.mark.parametrize("own", [True, False])
def test_the_longest_match_is_found_where_places_are_few(own: bool) -> None:
    for seed in range(300):
        print("seed", seed)
        chance = random.Random(seed)
        ids = [chance.randrange(6) for _ in range(chance.choice((0, 1, 2, 3, 12, 30)))]
        tail = ids if own else [chance.randrange(6) for _ in range(chance.choice((1, 2, 9)))]
        index = SuffixIndex(ids)
        while not index.complete:
            assert index.index(5) > 0
        length, draft = index.continuation(tail, 4)
        assert length == longest_match(ids, tail, own=own)
        assert bool(draft) == bool(length)
        if draft and not own:
            context = [*tail[-length:], draft[0]]
            assert any(ids[at : at + length + 1] == context for at in range(len(ids)))


def test_ids_that_come_later_are_found_as_those_that_were_there_before() -> None:
    chance = random.Random(1)
    ids = [chance.randrange(4) for _ in range(10)]
    growing = SuffixIndex(ids)
    for _ in range(100):
        growing.index(3)
        whole = SuffixIndex(ids)
        whole.index(len(ids))
        assert not growing.complete or growing.continuation(ids, 5) == whole.continuation(ids, 5)
        ids += [chance.randrange(4) for _ in range(chance.randrange(4))]


def test_what_repeats_itself_goes_on_beyond_its_end() -> None:
    index = SuffixIndex([9, 1, 2, 3, 1, 2, 3])
    index.index(7)
    assert index.continuation(index.ids, 8) == (3, [1, 2, 3, 1, 2, 3, 1, 2])


def test_of_equal_matches_the_most_frequent_next_id_counts_then_the_latest() -> None:
    corpus = Corpus()
    for answer in ([1, 2, 7], [1, 2, 8], [1, 2, 8], [1, 2, 9]):
        corpus.add(answer)
    assert corpus.index(100) == 16
    assert corpus.continuation([5, 1, 2], 4) == (2, [8])
    assert corpus.continuation([5, 2, 1], 4) == (0, [])
    two = Corpus()
    for answer in ([1, 2, 7], [1, 2, 8]):
        two.add(answer)
    two.index(100)
    assert two.continuation([1, 2], 4) == (2, [8])


def test_a_draft_ends_with_its_answer() -> None:
    corpus = Corpus()
    corpus.add([1, 2, 3])
    corpus.add([4, 5, 6])
    assert corpus.continuation([1, 2], 8) == (0, [])
    assert (corpus.index(3), corpus.index(9), corpus.index(9)) == (3, 5, 0)
    assert corpus.continuation([1, 2], 8) == (2, [3])
    assert corpus.continuation([2, 3], 8) == (2, [])


def test_a_corpus_forgets_its_oldest_answers_and_keeps_within_its_bytes() -> None:
    chance = random.Random(2)
    most = 400_000
    tracemalloc.start()
    corpus = Corpus(most)
    first = [chance.randrange(1000, 50_000) for _ in range(50)]
    corpus.add(first)
    corpus.index(100)
    assert corpus.continuation(first[:9], 3) == (9, first[9:12])
    for _ in range(100):
        corpus.add([chance.randrange(1000, 50_000) for _ in range(50)])
        corpus.index(100)
        assert corpus.size <= most
        assert tracemalloc.get_traced_memory()[0] <= most
    tracemalloc.stop()
    assert corpus.continuation(first[:9], 3)[0] < 9
    assert corpus.answers <= 40
