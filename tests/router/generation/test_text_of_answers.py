"""The text of an answer: what all its deltas add up to, for random ids, stop strings, frames and tokenizers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import FinishReason, StoppingParams
from loraplex.router.dispatch.links import Frame
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.answer import PART_CHARACTERS, Answer, Echo
from loraplex.router.request import Delta, Finished, Received, Request, Stopping
from loraplex.router.text.file_tokenizer import FileTokenizer
from tests.router.small_tokenizers import KINDS, files_of, text_of_ids, tokenizer_of

_SILENT = (FinishReason.END, FinishReason.STOP)


def after(kind: str, prompt: Sequence[int], ids: Sequence[int], *, skip: bool) -> str:
    """The text that ids add to a prompt's: the whole of a character that the prompt begins belongs to it."""
    before, whole = (text_of_ids(kind, [*prompt, *part], skip_special_tokens=skip) for part in ((), ids))
    return whole[len(before) if whole.startswith(before) else len(before) - 1 :]


def cut(kind: str, prompt: Sequence[int], ids: Sequence[int], stops: Sequence[str], *, skip: bool) -> tuple[str, bool]:
    """The text before the first stop string, which ends the answer with the first token after which it is complete."""
    for count in range(1, len(ids) + 1):
        text = after(kind, prompt, ids[:count], skip=skip)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
    return after(kind, prompt, ids, skip=skip), False


@pytest.mark.parametrize("kind", KINDS)
def test_the_deltas_add_up_to_the_text_before_the_first_stop_string(kind: str) -> None:
    text, vocab = FileTokenizer(files_of(kind)), range(tokenizer_of(kind).get_vocab_size())
    seed = 20261122
    print(f"seed {seed}")
    rng = random.Random(seed)
    stopped = 0
    for _ in range(200):
        prompt, ids = (rng.choices(vocab, k=rng.randrange(1, most)) for most in (6, 30))
        finish, skip, echo = rng.choice(list(FinishReason)), rng.random() < 0.5, rng.random() < 0.5
        shown = ids[:-1] if finish in _SILENT else ids
        whole = after(kind, prompt, shown, skip=skip)
        # Over the borders of tokens; a cut character is shown as U+FFFD only once it can't be completed any more.
        places = [rng.randrange(len(whole) + 1) for _ in range(rng.randrange(3))]
        stops = [stop for at in places if (stop := whole[at : at + rng.randrange(1, 6)]) and "\ufffd" not in stop]
        expected, ended = cut(kind, prompt, shown, stops, skip=skip)
        stopped += ended

        request = Request(
            "acme", "x", "prompt", stopping=Stopping(stop=tuple(stops)), skip_special_tokens=skip, echo=echo,
            stream_interval=rng.choice((1, 1, 3)),
        )  # fmt: skip
        job = Job("j", "acme", "tiny", "sha256:0", "here", tuple(prompt), StoppingParams(100))
        answer = Answer(request, text, RoutedJob(job))
        deltas, ends = _read(answer, ids, finish, rng)
        got = "".join(delta.text for delta in deltas)
        if echo:  # nothing of what is before the stop string gets lost at the border of prompt and answer
            before = text_of_ids(kind, prompt, skip_special_tokens=skip)
            expected = before[: len(got) - len(expected)] + expected
        assert got == expected, (prompt, ids, stops)
        if echo and not ended:
            assert got == text_of_ids(kind, [*prompt, *shown], skip_special_tokens=skip)
        assert ended == (ends[0].stop_string is not None)
        had: list[int] = []
        for delta in deltas:
            assert delta.offset == len(had)
            had += delta.token_ids
        assert had == (ids[: len(had)] if ended else ids)
    assert stopped > 40


def _read(
    answer: Answer, ids: Sequence[int], finish: FinishReason, rng: random.Random
) -> tuple[list[Delta], list[Finished]]:
    """Read ids that come in frames of random lengths."""
    deltas: list[Delta] = []
    at = 0
    while True:
        end = min(len(ids), at + rng.randrange(1, 5))
        events = answer.events_of([Frame("job", 1, at, tuple(ids[at:end]), finish=finish if end == len(ids) else None)])
        deltas += [event for event in events if isinstance(event, Delta)]
        if ends := [event for event in events if isinstance(event, Finished)]:
            return deltas, ends
        at = end


def test_a_long_prompt_is_echoed_in_parts_that_fit_a_message() -> None:
    text = "ä" * (2 * PART_CHARACTERS + 5)
    echo = Echo(text)
    parts = echo.deltas(3, Received())
    assert [len(part.text) for part in parts] == [PART_CHARACTERS, PART_CHARACTERS, 5]
    assert {(part.choice, part.offset, part.token_ids) for part in parts} == {(3, 0, ())}
    assert "".join(part.text for part in echo.deltas(0, Received(text_bytes=10))) == text[5:]
    assert echo.deltas(0, Received((1,))) == []
    assert echo.answer_bytes(Received((1,), text_bytes=len(text.encode()) + 7)) == 7
