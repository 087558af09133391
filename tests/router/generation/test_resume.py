"""Resume tokens, and answers that go on from any of their messages as if nothing had happened."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from loraplex.contracts.broker.messages import AdapterRef, Job, WeightedRef
from loraplex.contracts.options import FinishReason, StoppingParams, TokenLogprobs
from loraplex.relay.v1 import relay_pb2
from loraplex.router.dispatch.links import Frame
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation import resume
from loraplex.router.generation.answer import Answer
from loraplex.router.generation.resume import Began, ResumeKeys, ResumePayload, ResumeTokens
from loraplex.router.request import Delta, Event, Finished, PromptLogprobs, Received, Request, Stopping
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import HashTokenizer, ModelTokenizer
from loraplex.runtime.rpc.errors import Aborted, InvalidField
from tests.router.recording_link import RecordingLink
from tests.router.small_tokenizers import KINDS, files_of, tokenizer_of

KEY = "a key of sixteen characters"
PART = AdapterRef("tenants/acme/adapters/a/revisions/sha256:1", "sha256:1", 8, 1000)
SET = AdapterRef("sha256:2", "sha256:2", 16, 2000, (WeightedRef(PART, 0.1), WeightedRef(PART, -1.5)))
PAYLOAD = ResumePayload(
    request_id="r",
    fingerprint="f" * 64,
    model="tiny",
    base_digest="sha256:0",
    adapter=PART,
    seed=2**64 - 1,
    max_tokens=7,
    began=Began(3, 0.1, 0.2, 0.3, 1e9),
    resumes=2,
)


def tokens_of(key: str = "", *accepted: str) -> ResumeTokens:
    return ResumeTokens(ResumeKeys(key, accepted))


def same(found: ResumePayload, payload: ResumePayload) -> bool:
    """Tell whether a token held this payload, apart from the fields that signing sets."""
    return msgspec.structs.replace(found, signed_by="", expires_at_s=0.0) == payload


@pytest.mark.parametrize("adapter", [None, PART, SET])
async def test_a_token_holds_its_ticket(adapter: AdapterRef | None) -> None:
    payload = msgspec.structs.replace(PAYLOAD, adapter=adapter)
    assert same(await tokens_of(KEY).verify(tokens_of(KEY).sign(payload, "acme"), "acme"), payload)


async def test_a_token_of_a_former_key_is_accepted_and_the_new_one_signs() -> None:
    before, rotated = tokens_of(KEY), tokens_of("another of sixteen", KEY)
    assert same(await rotated.verify(before.sign(PAYLOAD, "acme"), "acme"), PAYLOAD)
    with pytest.raises(InvalidField):
        await before.verify(rotated.sign(PAYLOAD, "acme"), "acme")


async def test_a_token_of_another_key_tenant_or_hand_is_none() -> None:
    token = tokens_of(KEY).sign(PAYLOAD, "acme")
    signed = base64.urlsafe_b64decode(token)
    another = base64.urlsafe_b64encode(signed.replace(b"tiny", b"huge")).decode()
    assert another != token
    forged = [another, token[:-4], token + "AAAA", "", "é", "\0", "a" * 100_000, token[:20]]
    for tokens, tenant, given in (
        (tokens_of(KEY + "!"), "acme", token),
        (tokens_of(), "acme", token),
        (tokens_of(KEY), "globex", token),
        *((tokens_of(KEY), "acme", one) for one in forged),
    ):
        with pytest.raises(InvalidField) as refused:
            await tokens.verify(given, tenant)
        assert refused.value.field == "resume_token"


async def test_every_bit_of_a_token_counts() -> None:
    tokens = tokens_of(KEY)
    signed = bytearray(base64.urlsafe_b64decode(tokens.sign(PAYLOAD, "acme")))
    for index in range(len(signed)):
        signed[index] ^= 1 << index % 8
        with pytest.raises(InvalidField):
            await tokens.verify(base64.urlsafe_b64encode(signed).decode(), "acme")
        signed[index] ^= 1 << index % 8
    await tokens.verify(base64.urlsafe_b64encode(signed).decode(), "acme")


async def test_a_token_of_another_version_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "VERSION", resume.VERSION - 1)
    token = tokens_of(KEY).sign(PAYLOAD, "acme")
    monkeypatch.undo()
    with pytest.raises(InvalidField) as refused:
        await tokens_of(KEY).verify(token, "acme")
    assert refused.value.reason == "RESUME_TOKEN_VERSION"


async def test_a_router_that_would_leave_the_models_values_out_refuses_their_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled = msgspec.structs.replace(PAYLOAD, filled={"temperature": 0.6, "top_k": 20})
    token = tokens_of(KEY).sign(filled, "acme")
    found = await tokens_of(KEY).verify(token, "acme")
    assert same(found, filled)
    assert type(found.filled["top_k"]) is int
    monkeypatch.setattr(resume, "FILLED_VERSION", resume.VERSION)  # as of a router of an earlier version
    await tokens_of(KEY).verify(tokens_of(KEY).sign(PAYLOAD, "acme"), "acme")
    with pytest.raises(InvalidField) as refused:
        await tokens_of(KEY).verify(token, "acme")
    assert refused.value.reason == "RESUME_TOKEN_VERSION"


class Client:
    """The tokens, texts and ends that a client has after some events."""

    def __init__(self, n: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.text = [""] * n
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(n)]
        self.ends: list[Finished | None] = [None] * n
        self.prompt_logprobs = 0

    def take(self, events: Sequence[Event]) -> Client:
        for event in events:
            match event:
                case Delta():
                    assert event.offset == len(self.ids[event.choice])
                    self.ids[event.choice] += event.token_ids
                    self.text[event.choice] += event.text
                    self.logprobs[event.choice] += event.logprobs
                case Finished():
                    assert self.ends[event.choice] is None
                    self.ends[event.choice] = event
                case PromptLogprobs():
                    self.prompt_logprobs += 1
        return self

    def received(self) -> dict[int, Received]:
        """Return the progress that it tells a router; of a choice of which it has nothing, nothing."""
        return {
            choice: Received(tuple(ids), self.ends[choice] is not None, len(self.text[choice].encode()))
            for choice, ids in enumerate(self.ids)
            if ids or self.text[choice] or self.ends[choice]
        }

    def all(self) -> tuple[object, ...]:
        return self.ids, self.text, self.logprobs, self.ends, self.prompt_logprobs


Made = tuple[tuple[int, ...], FinishReason]


def bound(routed: RoutedJob) -> RoutedJob:
    """Let a worker have the job."""
    routed.bind(RecordingLink("w"), 1)
    return routed


def logprobs_of(ids: Sequence[int], start: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(token_id) - (start + index) / 1000) for index, token_id in enumerate(ids))


async def play(
    request: Request,
    text: ModelTokenizer,
    job: Job,
    answers: Sequence[Made],
    rng: random.Random,
    had: Client | None = None,
) -> list[Event]:
    """Return the events that a client gets of these answers, which come in frames of random length.

    For a client that resumes, the worker makes the tokens after those that the client had.
    """
    received = had.received() if had else None
    known = received or {}
    job = replace(
        job,
        emitted={i: one.token_ids for i, one in known.items() if one.token_ids and not one.finished},
        done=tuple(i for i, one in known.items() if one.finished),
    )
    routed = bound(RoutedJob(job))
    made = {i: len(job.emitted.get(i, ())) for i in range(job.n) if i not in job.done}

    async def work() -> None:
        while made:
            choice = rng.choice(sorted(made))
            ids, finish = answers[choice]
            start = made[choice]
            end = min(len(ids), start + rng.randrange(1, 4))
            part, last = ids[start:end], end == len(ids)
            routed.accept(Frame("j", 1, start, part, choice, logprobs_of(part, start), finish if last else None))
            made[choice] = end
            if last or routed.choices[choice].ended:
                del made[choice]
            if rng.random() < 0.7:
                await asyncio.sleep(0)

    working = asyncio.create_task(work())
    got = await events_of(Answer(request, text, routed, received), routed)
    await working
    return got


async def events_of(answer: Answer, routed: RoutedJob) -> list[Event]:
    """Read a job to its end."""
    events: list[Event] = []
    while arrivals := await routed.arrivals(routed.reader):
        events += answer.events_of(arrivals)
        answer.close_ended()
    return events


@pytest.mark.parametrize("kind", ["hash", *KINDS])
async def test_an_answer_goes_on_from_any_of_its_messages(kind: str) -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    text: ModelTokenizer = HashTokenizer() if kind == "hash" else FileTokenizer(files_of(kind))
    vocab = range(97, 100) if kind == "hash" else range(tokenizer_of(kind).get_vocab_size())
    stopped = cuts = 0
    for _ in range(250):
        n = rng.choice((1, 1, 3))
        finishes = [rng.choice(list(FinishReason)) for _ in range(n)]
        answers = [(tuple(rng.choices(vocab, k=rng.randrange(1, 25))), finish) for finish in finishes]
        whole = text.decode(answers[0][0], skip_special_tokens=True)
        at = rng.randrange(len(whole)) if whole else 0
        stop = tuple(filter(None, {whole[at : at + rng.randrange(1, 5)], rng.choice(("ca", "bbb", ""))}))
        request = Request(
            "acme",
            "x",
            "prompt",
            n=n,
            best_of=n,
            stopping=Stopping(stop=stop),
            stream_interval=rng.choice((1, 1, 4)),
            prompt_logprobs=rng.choice((None, 0)),
            echo=rng.choice((True, False)),
            skip_special_tokens=rng.choice((True, False)),
        )
        prompt = tuple(rng.choices(vocab, k=3))
        job = Job("j", "acme", "tiny", "sha256:0", "here", prompt, StoppingParams(100), n=n, logprobs=0)
        events = await play(request, text, job, answers, rng)
        truth = Client(n).take(events)
        stopped += sum(end is not None and end.stop_string is not None for end in truth.ends)
        assert truth.prompt_logprobs == (request.prompt_logprobs is not None)
        for cut in {1, rng.randrange(1, len(events) + 1), len(events)}:
            client = Client(n).take(events[:cut])
            if all(client.ends):  # only the summary is missing
                continue
            cuts += 1
            # A router can be lost again at once.
            resumed = await play(request, text, job, answers, rng, client)
            again = rng.randrange(len(resumed) + 1)
            client.take(resumed[:again])
            if not all(client.ends):
                client.take(await play(request, text, job, answers, rng, client))
            assert client.all() == truth.all(), (answers, stop, cut, again)
    assert stopped > 30
    assert cuts > 60


async def test_a_reader_that_is_turned_away_leaves_everything_to_the_next() -> None:
    job = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100))
    routed = RoutedJob(job)
    request = Request("acme", "x", "prompt", prompt_logprobs=0)

    older, reader = Answer(request, HashTokenizer(), routed), routed.reader
    bound(routed).accept(Frame("j", 1, 0, (97, 98), prompt_logprobs=(relay_pb2.TokenLogprobs(logprob=-1.0),)))
    first = [PromptLogprobs((TokenLogprobs(-1.0),)), Delta(0, (97, 98), "ab")]
    assert older.events_of(await routed.arrivals(reader)) == first
    waiting = asyncio.ensure_future(routed.arrivals(reader))
    await asyncio.sleep(0)
    routed.replace_reader(Aborted("taken over", reason="TAKEN_OVER"))
    newer = Answer(request, HashTokenizer(), routed)
    assert newer.events_of(await routed.arrivals(routed.reader)) == first
    with pytest.raises(Aborted):
        await waiting
    routed.accept(Frame("j", 1, 2, (99,), finish=FinishReason.LENGTH))
    assert [type(event) for event in await events_of(newer, routed)] == [Delta, Finished]


@pytest.mark.parametrize("echo", [True, False])
async def test_the_best_of_more_are_computed_again_and_told_once(echo: bool) -> None:
    request = Request("acme", "x", "prompt", n=2, best_of=3, echo=echo)
    job = Job("j", "acme", "tiny", "sha256:0", "here", (65, 66), StoppingParams(100), n=3, logprobs=0)
    answers = [((letter,) * 3, FinishReason.LENGTH) for letter in (99, 97, 98)]

    async def best(received: dict[int, Received] | None) -> list[Event]:
        routed = bound(RoutedJob(job))
        for choice, (ids, finish) in enumerate(answers):
            routed.accept(Frame("j", 1, 0, ids, choice, logprobs_of(ids, 0), finish))
        return await events_of(Answer(request, HashTokenizer(), routed, received), routed)

    whole = await best(None)
    shown = ["AB", "aaa", "AB", "bbb"] if echo else ["aaa", "bbb"]
    assert [event.text for event in whole if isinstance(event, Delta)] == shown
    for cut in range(len(whole) + 1):
        client = Client(2).take(whole[:cut])
        assert client.take(await best(client.received())).all() == Client(2).take(whole).all()
    with pytest.raises(Aborted, match="rank otherwise"):
        await best({0: Received((1, 2, 3))})


async def test_ranked_answers_without_tokens_end_once() -> None:
    """A client that lacks the summary alone gets nothing after the ends: the answers have no ids to tell it by."""
    request = Request("acme", "x", "prompt", n=2, best_of=3, echo=True, stopping=Stopping(max_tokens=0))
    job = Job("j", "acme", "tiny", "sha256:0", "here", (65, 66), StoppingParams(0), n=3)

    async def best(received: dict[int, Received] | None) -> list[Event]:
        routed = bound(RoutedJob(job))
        for choice in range(3):
            routed.accept(Frame("j", 1, 0, (), choice, finish=FinishReason.LENGTH))
        return await events_of(Answer(request, HashTokenizer(), routed, received), routed)

    client = Client(2).take(await best(None))
    assert all(client.ends)
    assert await best(client.received()) == []
