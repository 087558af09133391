"""Generating through the SDK, blocking and async, against a real server: folding, errors, leaving early."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2

import loraplex_client as lx
from loraplex.runtime.rpc import errors
from loraplex.runtime.rpc.principal import Unauthenticated
from loraplex.runtime.rpc.status import rates_metadata

HANG = "hang"
CANCEL_S = 20.0

GenerateBy = Callable[..., lx.Generation]


def _generate(address: str, prompt: str | None = "hello", **options: Any) -> lx.Generation:
    with lx.Client(address, tenant="acme", resume_attempts=0) as client:
        generation: lx.Generation = client.generate(prompt, **options)
        return generation


def _generate_async(address: str, prompt: str | None = "hello", **options: Any) -> lx.Generation:
    async def run() -> lx.Generation:
        async with lx.AsyncClient(address, tenant="acme", resume_attempts=0) as client:
            generation: lx.Generation = await client.generate(prompt, **options)
            return generation

    return asyncio.run(run())


@pytest.fixture(params=[_generate, _generate_async], ids=["sync", "async"])
def generate(request: pytest.FixtureRequest) -> GenerateBy:
    """Generate with either client, and close it."""
    by: GenerateBy = request.param
    return by


def test_whole_answer(server: Any, answer: list[Any], generate: GenerateBy) -> None:
    server.service.script = answer
    generation = generate(server.address, adapter_id="pirate")
    assert generation.text == " Ahoy"
    assert generation.token_ids == (7, 8, 9)
    assert (generation.finish_reason, generation.stop) == (lx.FinishReason.STOP, "!")
    assert generation.usage == lx.Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3)
    assert generation.timings == lx.Timings(queue_s=0.5, adapter_s=0.25, ttft_s=1.0, decode_s=2.0)
    assert generation.adapter_revision == "tenants/acme/adapters/pirate/revisions/sha256:00"
    assert (generation.continuations, generation.request_id, generation.adapters) == (1, "r-1", ())
    assert generation.speculative_decoding == lx.SpeculativeDecoding(2, 8, 3, 2.5)
    assert server.service.tenants == ["acme"]


def test_pieces_come_before_the_answer_has_ended(server: Any, answer: list[Any]) -> None:
    server.service.script = [*answer[:3], HANG]
    with lx.Client(server.address) as client, client.generate_stream("hello") as stream:
        pieces = [next(stream) for _ in range(3)]
    assert [(piece.text, piece.token_ids, piece.offset) for piece in pieces] == [
        (" Ah", (7, 8), 0),
        ("o", (9,), 2),
        ("y", (), 3),
    ]
    assert all(piece.finished is None for piece in pieces)


async def test_last_piece_carries_the_whole(server: Any, answer: list[Any]) -> None:
    server.service.script = answer
    async with lx.AsyncClient(server.address) as client:
        pieces = [piece async for piece in client.generate_stream("hello")]
        stream = client.generate_stream("hello")
        whole = await stream.result()
    assert "".join(piece.text for piece in pieces) == " Ahoy"
    assert pieces[-1].finished == whole
    assert pieces[-1].offset == 3
    # The piece before it has the choice, as soon as that has ended.
    assert [piece.ended for piece in pieces] == [None, None, None, whole.choices[0], None]
    assert pieces[-2].offset == 3


def test_a_choice_that_ends_is_told_while_the_others_go_on(server: Any, answer: list[Any]) -> None:
    event = inference_pb2.GenerateEvent
    first = event(resume_token="token", delta=inference_pb2.Delta(choice=1, token_ids=[5], text="B"))
    end = event(finished=inference_pb2.Finished(choice=1, reason=inference_pb2.FINISH_REASON_STOP, stop_string="!"))
    server.service.script = [first, end, HANG]
    with lx.Client(server.address) as client, client.generate_stream("hello", n=2) as stream:
        next(stream)
        piece = next(stream)
    assert (piece.choice, piece.text, piece.token_ids, piece.offset) == (1, "", (), 1)
    assert piece.ended == lx.Choice("B", (5,), lx.FinishReason.STOP, "!")


def test_several_choices(server: Any, answer: list[Any], generate: GenerateBy) -> None:
    delta = inference_pb2.Delta(
        choice=1,
        token_ids=[5],
        text="B",
        logprobs=[
            inference_pb2.TokenLogprobs(logprob=-0.5, alternatives=[inference_pb2.Alternative(token_id=6, logprob=-1)])
        ],
    )
    end = inference_pb2.Finished(choice=1, reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=5)
    event = inference_pb2.GenerateEvent
    server.service.script = [answer[0], event(delta=delta), event(finished=end), *answer[1:]]
    first, second = generate(server.address, n=2, logprobs=1).choices
    assert (first.text, first.stop) == (" Ahoy", "!")
    assert (second.text, second.token_ids, second.stop) == ("B", (5,), 5)
    assert second.logprobs == (lx.TokenLogprobs(-0.5, ((6, -1.0),)),)


STATUSES = [
    (errors.InvalidField("sampling.top_p", "is 3"), lx.InvalidRequestError, {"field": "sampling.top_p"}),
    (errors.NotBuilt("format.regex"), lx.NotImplementedByServerError, {"field": "format.regex"}),
    (errors.NotFound("adapter", "support"), lx.NotFoundError, {"kind": "adapter", "name": "support"}),
    (errors.Mismatch("rank", "is 512", reason="RANK"), lx.FailedPreconditionError, {"subject": "rank"}),
    (errors.AlreadyExists("taken"), lx.AlreadyExistsError, {}),
    (errors.Aborted("taken over"), lx.AbortedError, {}),
    (
        errors.Exhausted("tenants/acme", "the queue is full", retry_after_s=1.5),
        lx.ResourceExhaustedError,
        {"subject": "tenants/acme", "retry_after_s": 1.5},
    ),
    (Unauthenticated("no tenant"), lx.UnauthenticatedError, {}),
    (errors.PermissionDenied("not yours"), lx.PermissionDeniedError, {}),
    (errors.Unavailable("no worker lives", retry_after_s=0.25), lx.UnavailableError, {"retry_after_s": 0.25}),
    (errors.DeadlinePassed("too late"), lx.DeadlineExceededError, {}),
    (errors.DataLoss("revision", "r", "not its digest"), lx.DataLossError, {"kind": "revision", "name": "r"}),
    (errors.Internal("our fault", reason="POISON"), lx.InternalError, {}),
]


@pytest.mark.parametrize(("raised", "cls", "fields"), STATUSES, ids=[cls.__name__ for _, cls, _ in STATUSES])
def test_every_status_has_its_exception(
    server: Any, answer: list[Any], generate: GenerateBy, raised: errors.CallError, cls: type, fields: dict[str, Any]
) -> None:
    server.service.script = [answer[0], raised]
    with pytest.raises(lx.LoraplexError) as caught:
        generate(server.address)
    assert type(caught.value) is cls
    assert caught.value.message == str(caught.value) == raised.message
    assert caught.value.reason == raised.reason
    assert {name: getattr(caught.value, name) for name in fields} == fields


def test_all_errors_of_the_tree_are_tried() -> None:
    # The SDK calls no method that raises PositionGone.
    tried = {type(raised) for raised, _, _ in STATUSES} | {errors.PositionGone}
    assert tried == set(errors.CallError.__subclasses__())


def test_nobody_listens(generate: GenerateBy) -> None:
    with pytest.raises(lx.UnavailableError, match=r"no answer from 127\.0\.0\.1:1: ") as caught:
        generate("127.0.0.1:1")
    assert caught.value.reason == ""
    assert caught.value.retry_after_s is None


def test_deadline(server: Any, answer: list[Any], generate: GenerateBy) -> None:
    server.service.script = [answer[0], HANG]
    with pytest.raises(lx.DeadlineExceededError) as caught:
        generate(server.address, timeout_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.message == f"{server.address} had not answered in full when timeout_s was over"
    # On a busy machine the deadline may pass before the server has the call.
    assert not server.service.requests or server.service.cancelled.wait(CANCEL_S)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([0], "without a summary"),
        ([1, 2, 3, 4], "goes on at token 2 after 0 tokens"),
        ([3, 4], None),
        ([4], "without an answer"),
        ([0, 4], "before its choices did"),
        ([0, 3, 1], "choice 0 goes on after its end"),
    ],
)
def test_broken_streams_are_errors(
    server: Any, answer: list[Any], generate: GenerateBy, kept: list[int], message: str | None
) -> None:
    server.service.script = [answer[index] for index in kept]
    if message is None:  # an answer of no tokens is whole
        assert generate(server.address).token_ids == ()
        return
    with pytest.raises(lx.InternalError, match=message):
        generate(server.address)


def test_break_cancels(server: Any, answer: list[Any]) -> None:
    server.service.script = [*answer[:2], HANG]
    with lx.Client(server.address) as client:
        for piece in client.generate_stream("hello"):
            assert piece.text == " Ah"
            break
        assert server.service.cancelled.wait(CANCEL_S)


async def test_async_break_cancels(server: Any, answer: list[Any]) -> None:
    server.service.script = [*answer[:2], HANG]
    async with lx.AsyncClient(server.address) as client:
        async for piece in client.generate_stream("hello"):
            assert piece.text == " Ah"
            break
        assert await asyncio.to_thread(server.service.cancelled.wait, CANCEL_S)


def test_an_exception_in_the_loop_cancels(server: Any, answer: list[Any]) -> None:
    def fail() -> None:
        for _ in client.generate_stream("hello"):
            raise KeyError

    server.service.script = [*answer[:2], HANG]
    with lx.Client(server.address) as client:
        with pytest.raises(KeyError):
            fail()
        assert server.service.cancelled.wait(CANCEL_S)


def test_deleting_the_stream_cancels(server: Any, answer: list[Any]) -> None:
    server.service.script = [*answer[:2], HANG]
    with lx.Client(server.address) as client:
        stream = client.generate_stream("hello")
        next(stream)
        del stream
        gc.collect()
        assert server.service.cancelled.wait(CANCEL_S)


def test_close_ends_the_iteration(server: Any, answer: list[Any]) -> None:
    server.service.script = [*answer[:2], HANG]
    with lx.Client(server.address) as client:
        stream = client.generate_stream("hello")
        next(stream)
        stream.close()
        assert server.service.cancelled.wait(CANCEL_S)
        assert all(piece.finished is None for piece in stream)
        with pytest.raises(lx.CancelledError):
            stream.result()


async def test_aclose_by_another_task_ends_the_iteration(server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], HANG]
    async with lx.AsyncClient(server.address) as client:
        stream = client.generate_stream("hello")
        await anext(stream)
        waiting = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(lx.CancelledError):
            await waiting
        assert await asyncio.to_thread(server.service.cancelled.wait, CANCEL_S)


async def test_cancelling_the_task_cancels(server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], HANG]
    async with lx.AsyncClient(server.address) as client:
        stream = client.generate_stream("hello")
        await anext(stream)
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.service.cancelled.wait, CANCEL_S)


async def test_a_server_that_stops_is_not_a_cancelled_task(server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], HANG]
    async with lx.AsyncClient(server.address, resume_attempts=0) as client:
        stream = client.generate_stream("hello")
        await anext(stream)
        stopping = asyncio.create_task(asyncio.to_thread(server.shut_down))
        with pytest.raises((lx.UnavailableError, lx.CancelledError)):
            await stream.result()
        await stopping


async def test_other_calls(server: Any) -> None:
    with lx.Client(server.address) as client:
        assert client.tokenize("hi") == (104, 105)
        assert client.tokenize(messages=[{"role": "user", "content": "ho"}]) == (104, 111)
        assert client.detokenize([104, 105]) == "hi"
        assert client.count_tokens("hi", adapter_id="a") == 7
        scores = client.score("hi", [" a", [1, 2]], adapter_id="a", request_id="r")
        assert (scores.best, scores.scores[1].sum, scores.scores[0].is_greedy) == (0, -2.0, False)
        asked = [
            lx.Question("so"),
            lx.Question("which", choices={"a": "first", "b": ""}),
            lx.Question("x", levels="12"),
        ]
        decided = client.decide("hi", asked).decisions
        assert [one.best for one in decided] == ["yes", "a", "1"]
        assert (decided[2].score, round(decided[1].confidence, 3), decided[0].label_mass) == (0.25, 0.189, 0.5)
        ranking = client.rerank(
            "q", ["a", "b"], adapter_id="a", top_n=2, instruction="i", truncate=None, request_id="r"
        )
        assert ranking.results == (lx.DocumentScore(1, 0.5, 0.0), lx.DocumentScore(0, 0.5, 0.0))
        asked = server.service.requests[-1]
        assert (asked.query, asked.documents, asked.adapter, asked.top_n) == ("q", ["a", "b"], "a", 2)
        client.rerank(["q", "r"], ["a", "b"], adapters={"a": 1.0})
        asked = server.service.requests[-1]
        assert (asked.queries, asked.adapters[0].adapter, asked.HasField("top_n")) == (["q", "r"], "a", False)
        bad: list[tuple[Any, dict[str, Any], str]] = [
            (("q", "text"), {}, "documents: give a list of texts"),
            (("q", [1]), {}, "documents: give a list; each item is a str"),
            (("q", ["a"]), {"top_n": "x"}, "top_n: give a whole number"),
        ]
        for arguments, options, message in bad:
            with pytest.raises(lx.InvalidRequestError, match=message):
                client.rerank(*arguments, **options)
        with pytest.raises(TypeError, match="temperature"):
            client.rerank("q", ["a"], temperature=1)  # type: ignore[call-arg]
        assert client.models() == (lx.ServedModel("tiny", "sha256:00", 512, max_rank=2),)
    async with lx.AsyncClient(server.address) as client:
        assert await client.tokenize("hi") == (104, 105)
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.models() == (lx.ServedModel("tiny", "sha256:00", 512, max_rank=2),)


async def test_texts_are_encoded_in_calls_of_one_revision(server: Any) -> None:
    """A call that a router refuses for a moment is made again; texts, pairs and ids go as they are given."""
    texts = ["x" * length for length in range(1, 101)]
    server.service.encode_failures = [errors.Unavailable("one moment", retry_after_s=0.0, reason="NO_WORKER")]
    with lx.Client(server.address) as client:
        found = client.embed(texts, adapter_id="pirate@live", truncate=True, normalize=False, pooling="mean")
        assert found.vectors == tuple((0.5, float(length)) for length in range(1, 101))
        assert (found.usage.prompt_tokens, found.adapter_revision[-12:]) == (100, "ns/sha256:00")
        first, again, rest = server.service.requests
        assert first == again
        assert (first.normalize, first.pooling, first.spec.truncate) == (False, inference_pb2.POOLING_MEAN, True)
        assert [len(one.spec.inputs) for one in (first, rest)] == [64, 36]
        assert (first.spec.adapter, rest.spec.adapter) == ("pirate@live", "tenants/acme/adapters/pirate@sha256:00")
        for bad, field in (("text", "texts"), (["a", 1.5], r"texts[1]"), ([("a", 2)], r"texts[0]")):
            with pytest.raises(lx.InvalidRequestError) as caught:
                client.embed(bad)  # type: ignore[arg-type]  # what is to be refused
            assert caught.value.field == field
        with pytest.raises(lx.InvalidRequestError, match="pooling"):
            client.embed(["a"], pooling="max")  # type: ignore[arg-type]  # as above
        with pytest.raises(TypeError, match="max_tokens"):
            client.classify(["a"], max_tokens=3)  # type: ignore[call-arg]  # as above
    async with lx.AsyncClient(server.address) as client:
        assert (await client.embed(["a"])).vectors == ((0.5, 1.0),)
        labels = await client.classify(["a", ("b", "c"), [1, 2]])
        assert (labels.labels, labels.classifications[2].label) == (("bad", "good"), "good")
        assert [one.WhichOneof("input") for one in server.service.requests[-1].spec.inputs] == [
            "text",
            "pair",
            "token_ids",
        ]


async def test_calls_without_a_stream_and_refusals_tell_the_limits(server: Any) -> None:
    rates = {"requests": (60, 12, 7.5), "tokens": (1_000, 0, 86_000.0)}
    server.service.limits = rates_metadata(rates)
    limits = {kind: lx.RateLimit(*rate) for kind, rate in rates.items()}
    refusal = errors.Exhausted("tenants/acme", "the quota is used", retry_after_s=None, reason="QUOTA_EXCEEDED")
    refusal.rate_limits = rates
    with lx.Client(server.address) as client:
        answers = client.embed(["a"]), client.classify(["a"]), client.score("a", ["b"])
        assert [answer.rate_limits for answer in answers] == [limits] * 3
        server.service.encode_failures = [refusal]
        with pytest.raises(lx.ResourceExhaustedError) as caught:
            client.embed(["a"])
    async with lx.AsyncClient(server.address) as client:
        awaited = await asyncio.gather(client.embed(["a"]), client.classify(["a"]), client.score("a", ["b"]))
        assert [answer.rate_limits for answer in awaited] == [limits] * 3
        server.service.limits = ()
        assert (await client.embed(["a"])).rate_limits == {}
    assert caught.value.rate_limits == limits


async def test_a_closed_client_says_so(server: Any) -> None:
    client, awaited = lx.Client(server.address), lx.AsyncClient(server.address)
    store = lx.StoreClient(server.address)
    assert client.tokenize("hi") == await awaited.tokenize("hi") == (104, 105)
    for _ in range(2):
        client.close()
        store.close()
        await awaited.close()
    blocking: list[Callable[[], Any]] = [
        lambda: client.tokenize("hi"),
        lambda: client.generate("hi"),
        lambda: client.chat("hi"),
        lambda: client.generate_stream("hi"),
        lambda: client.for_caller("globex").models(),
        store.list,
    ]
    for call in blocking:
        with pytest.raises(lx.ClientClosedError, match="the client is closed; make another one"):
            call()
    for awaitable in (awaited.tokenize("hi"), awaited.generate("hi"), awaited.chat("hi")):
        with pytest.raises(lx.ClientClosedError):
            await awaitable


async def test_calls_end_when_their_client_is_closed(server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], HANG]
    client, came = lx.AsyncClient(server.address), asyncio.Event()
    loop = asyncio.get_running_loop()
    server.service.on_call = lambda: loop.call_soon_threadsafe(came.set)
    running = asyncio.create_task(client.generate("hi"))
    async with asyncio.timeout(CANCEL_S):
        await came.wait()
    await client.close()
    with pytest.raises(lx.ClientClosedError):
        await running


def test_a_text_is_a_chat_of_one_message(server: Any, answer: list[Any]) -> None:
    server.service.script = answer
    with lx.Client(server.address) as client:
        assert client.chat("hi").text == client.generate(messages="hi").text == " Ahoy"
        client.chat([{"role": "user", "content": "hi"}])
        assert client.chat_stream("hi").result().usage.total_tokens == 7
        first, *others = (request.spec.chat for request in server.service.requests)
        assert others == [first] * 3
        assert client.tokenize(messages="hi") == (104, 105)
        with pytest.raises(lx.InvalidRequestError, match=r"messages\[0\]: give a message such as .*, not a str"):
            client.chat(["hi"])  # type: ignore[list-item]  # what is to be refused


async def test_every_call_has_a_deadline(server: Any) -> None:
    async with lx.AsyncClient(server.address, timeout_s=60) as client:
        calls = [
            client.tokenize("a", timeout_s=30),
            client.count_tokens("a", timeout_s=30),
            client.score("a", ["b"], timeout_s=30),
            client.embed(["a"], timeout_s=30),
            client.classify(["a"], timeout_s=30),
            client.models(timeout_s=30),
        ]
        await asyncio.gather(*calls)
        assert len(server.service.deadlines_s) == 5  # the scripted server does not note a list of models
        assert all(0 < given < 31 for given in server.service.deadlines_s)
        await client.tokenize("a")
        assert server.service.deadlines_s[-1] > 31
        for bad in ("5", True, float("nan")):
            with pytest.raises(lx.InvalidRequestError, match="timeout_s: give a number of seconds, not "):
                await client.tokenize("a", timeout_s=bad)  # type: ignore[arg-type]  # what is to be refused


def test_a_tenant_that_no_header_can_carry() -> None:
    for cls in (lx.Client, lx.AsyncClient):
        with pytest.raises(lx.InvalidRequestError) as caught:
            cls("127.0.0.1:1", tenant="a\n")
        assert caught.value.field == "tenant"


def test_no_store(server: Any) -> None:
    with lx.Client(server.address) as client, pytest.raises(ValueError, match="store="):
        _ = client.store


def test_help_lists_the_keywords() -> None:
    for method in (lx.Client.generate, lx.AsyncClient.generate_stream, lx.Client.chat):
        assert {"adapter_id", "max_tokens", "temperature"} <= set(inspect.signature(method).parameters)
