"""Stop strings, pending text, and the end of an answer."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from loraplex.contracts.options import FinishReason, TokenLogprobs
from loraplex.router.dispatch.links import Frame
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.answer import Answer, ChoiceAnswer
from loraplex.router.request import Delta, Finished, Request, Stopping
from loraplex.router.text.tokenizer import HashTokenizer
from tests.router.recording_link import job

REQUEST = Request("acme", "x", "prompt")


def answer(*stop: str, interval: int = 1) -> ChoiceAnswer:
    return ChoiceAnswer(HashTokenizer(), stop, interval)


def run(reader: ChoiceAnswer, chunks: list[str], finish: FinishReason) -> tuple[list[Delta], Finished | None]:
    """Push the chunks' characters as tokens; the last chunk carries the finish."""
    deltas: list[Delta] = []
    for index, chunk in enumerate(chunks):
        ids = [ord(character) for character in chunk]
        delta, finished = reader.push(ids, finish if index == len(chunks) - 1 else None)
        deltas += [delta] if delta else []
        if finished:
            return deltas, finished
    return deltas, None


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_tokens_are_delivered_as_they_come() -> None:
    deltas, finished = run(answer(), ["ab", "c"], FinishReason.LENGTH)
    assert deltas == [Delta(0, (97, 98), "ab"), Delta(2, (99,), "c")]
    assert finished == Finished(FinishReason.LENGTH)


def test_an_end_token_is_an_id_without_text() -> None:
    deltas, finished = run(answer(), ["ab!"], FinishReason.END)
    assert deltas == [Delta(0, (97, 98, 33), "ab")]
    assert finished == Finished(FinishReason.END)


def test_a_stop_token_is_an_id_without_text_and_is_named() -> None:
    deltas, finished = run(answer(), ["a", "b"], FinishReason.STOP)
    assert deltas == [Delta(0, (97,), "a"), Delta(1, (98,), "")]
    assert finished == Finished(FinishReason.STOP, stop_token_id=98)


@pytest.mark.parametrize("chunks", [["one END two"], ["one E", "ND two"], list("one END two")])
def test_a_stop_string_that_is_kept_is_delivered_with_its_tokens_and_nothing_after_it(chunks: list[str]) -> None:
    deltas, finished = run(ChoiceAnswer(HashTokenizer(), ("END",), 1, keep_stop=True), chunks, FinishReason.LENGTH)
    assert text(deltas) == "one END"
    assert [chr(token) for delta in deltas for token in delta.token_ids] == list("one END")
    assert finished == Finished(FinishReason.STOP, stop_string="END")


@pytest.mark.parametrize("chunks", [["one END two"], ["one E", "ND two"], list("one END two")])
def test_what_a_stop_string_cuts_is_neither_delivered_nor_counted(chunks: list[str]) -> None:
    reader = answer("END")
    deltas, finished = run(reader, chunks, FinishReason.LENGTH)
    assert text(deltas) == "one "
    assert reader.delivered == 4
    assert finished == Finished(FinishReason.STOP, stop_string="END")


def test_the_beginning_of_a_stop_string_is_held_until_it_is_none() -> None:
    reader = answer("END")
    assert reader.push([ord("x"), ord("E"), ord("N")], None) == (Delta(0, (120,), "x"), None)
    assert reader.push([ord("x")], None) == (Delta(1, (69, 78, 120), "ENx"), None)


def test_a_half_stop_string_at_the_end_is_delivered() -> None:
    deltas, finished = run(answer("END"), ["xEN"], FinishReason.LENGTH)
    assert text(deltas) == "xEN"
    assert finished == Finished(FinishReason.LENGTH)


def test_a_token_that_reaches_into_a_stop_string_is_delivered_with_its_text_cut() -> None:
    reader = answer("00>x")  # ids from 256 on read as <id>
    delta, finished = reader.push([65, 300, ord("x"), 66], None)
    assert delta == Delta(0, (65, 300), "A<3")
    assert finished == Finished(FinishReason.STOP, stop_string="00>x")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    deltas, finished = run(answer("bcd", "c"), ["abcd"], FinishReason.LENGTH)
    assert text(deltas) == "ab"
    assert finished == Finished(FinishReason.STOP, stop_string="c")


def test_of_two_that_one_token_completes_the_earlier_wins_then_the_longer() -> None:
    _, finished = answer("00", "<30", "<300").push([300], None)
    assert finished == Finished(FinishReason.STOP, stop_string="<300")


def test_an_interval_gathers_tokens_but_keeps_none_at_the_end() -> None:
    deltas, _ = run(answer(interval=3), list("abcdefgh"), FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["abc", "def", "gh"]
    assert [delta.offset for delta in deltas] == [0, 3, 6]


def test_chunking_never_changes_what_is_delivered() -> None:
    seed = 20261120
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        letters = "".join(rng.choices("ab", k=rng.randrange(1, 24)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(2, 5))) for _ in range(rng.randrange(3))]
        prefixes = [letters[:end] for end in range(len(letters) + 1)]
        first = next((prefix for prefix in prefixes if any(stop in prefix for stop in stops)), "")
        at = min((i for stop in stops if (i := first.find(stop)) >= 0), default=None)
        cuts = sorted(rng.sample(range(1, len(letters)), k=min(3, len(letters) - 1)))
        chunks = [letters[a:b] for a, b in zip([0, *cuts], [*cuts, len(letters)], strict=True)]
        deltas, finished = run(answer(*stops), chunks, FinishReason.LENGTH)
        assert text(deltas) == letters[:at], (letters, stops, chunks)
        assert (finished is not None and finished.reason is FinishReason.STOP) == (at is not None)
        assert [d.offset for d in deltas] == [sum(len(e.token_ids) for e in deltas[:i]) for i in range(len(deltas))]


@pytest.mark.parametrize("chunks", [["one two END x"], ["one", " tw", "o END x"], list("one two END x")])
def test_each_token_has_its_text_however_tokens_come(chunks: list[str]) -> None:
    reader, texts = answer(" END"), list[str]()
    for chunk in chunks:
        ids = [*chunk.encode()]
        delta, finished = reader.push(ids, None, [TokenLogprobs(-1.0, ())] * len(ids))
        ends = [0, *accumulate(delta.text_lengths)] if delta else []
        texts += [delta.text[begin:end] for begin, end in pairwise(ends)] if delta else []
        if finished:
            break
    assert texts == [*"one two"]


def test_a_stop_string_is_found_across_two_reads() -> None:
    stopping = replace(REQUEST, stopping=Stopping(stop=("aabb",)))
    whole = Answer(stopping, HashTokenizer(), RoutedJob(job()))
    assert text(read(whole, Frame("job", 1, 0, (97,) * 100))[0]) == "a" * 98
    assert read(whole, Frame("job", 1, 100, (98,) * 100, finish=FinishReason.LENGTH)) == (
        [],
        Finished(FinishReason.STOP, stop_string="aabb"),
    )


def read(whole: Answer, arrival: Frame) -> tuple[list[Delta], Finished | None]:
    events = whole.events_of([arrival])
    ends = [event for event in events if isinstance(event, Finished)]
    return [event for event in events if isinstance(event, Delta)], ends[0] if ends else None


def test_ids_behind_the_stop_strings_of_all_candidates_rank_them_no_second_time() -> None:
    request = replace(REQUEST, best_of=2, stopping=Stopping(max_tokens=9, stop=("!",)))
    reader = Answer(request, HashTokenizer(), RoutedJob(job(n=2)))
    events = reader.events_of([Frame("job", 1, 0, (97, 33), choice) for choice in (0, 1)])
    assert [type(event) for event in events] == [Delta, Finished]
    assert reader.events_of([Frame("job", 1, 2, (98,))]) == []
