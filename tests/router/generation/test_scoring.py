"""Scores of continuations: what becomes of a call's texts and ids, and of its parts when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from loraplex.contracts.broker.ledger import Reservation
from loraplex.contracts.options import TokenLogprobs
from loraplex.router.dispatch.links import RelayReach
from loraplex.router.generation.admission import Admission
from loraplex.router.generation.continuations import continuation_ids
from loraplex.router.generation.unary_calls import CONTINUATIONS_AT_ONCE, UnaryCalls, total_of
from loraplex.router.quotas.quotas import CallBudget
from loraplex.router.request import Message, PromptLogprobs, Request, Summary
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import CallError, InvalidField, Unavailable
from tests.router.small_tokenizers import KINDS, SAMPLE, files_of, tokenizer_of

REVISION = "tenants/acme/adapters/a/revisions/sha256:1"


class Answers:
    """Takes the place of Generation: a token's log probability is minus its id; odd ids are not the likeliest."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.running = self.most = 0
        self.refusals: dict[str, CallError] = {}
        self.left: list[str] = []
        self.reserved_tokens: list[int] = []

    @asynccontextmanager
    async def reserved(self, tenant: str, request_id: str, prompt_tokens: int) -> AsyncGenerator[CallBudget]:
        self.reserved_tokens.append(prompt_tokens)
        yield CallBudget(Reservation("r", tenant, prompt_tokens, 0), Mock())

    async def run(self, request: Request, deadline_s: float | None, part_of: CallBudget) -> AsyncGenerator[Message]:
        assert isinstance(request.prompt, tuple)
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if request.request_id in self.refusals:
                raise self.refusals[request.request_id]
            ids = request.prompt[request.prompt_logprobs_start :]
            best = [((i, -float(i)),) if i % 2 == 0 else ((0, 0.0),) for i in ids]
            yield Message(
                PromptLogprobs(tuple(TokenLogprobs(-float(i), one) for i, one in zip(ids, best, strict=True)))
            )
            yield Message(Summary(request.request_id, REVISION, len(request.prompt), 4, 0, 0, 0, 0, 0, 0))
        except GeneratorExit:
            self.left.append(request.request_id)
            raise
        finally:
            self.running -= 1


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def scoring(answers: Any) -> UnaryCalls:
    manifest = SimpleNamespace(name="tiny", context_length=40, vocab_size=1000)
    model = SimpleNamespace(tokenizer=FileTokenizer(files_of("byte-level")), manifest=manifest)
    nothing: Any = SimpleNamespace()
    models: Any = SimpleNamespace(get=lambda name: model)

    class Unresolved(Admission):
        async def resolve(self, request: Any, side: Any = None) -> Any:
            return model, None

        async def side_of(self, request: Any) -> None:
            return None

        async def prompt_ids(self, request: Request) -> tuple[int, ...]:
            assert isinstance(request.prompt, str)
            field, tenant = request.prompt_field, request.tenant
            context = model.manifest.context_length
            return await self.prompts.tokenize(model.tokenizer, request.prompt, field, tenant, context)

    return UnaryCalls(answers, Unresolved(models, nothing, nothing, "here", RelayReach(), PromptTokenizer(1)))


def request(prompt: str = "The quick", **more: Any) -> Request:
    return Request("acme", prompt, "prompt", request_id="r", adapter="a@live", **more)


async def test_each_continuation_is_a_request_of_the_first_one_s_revision(
    scoring: UnaryCalls, answers: Answers
) -> None:
    encoded = tokenizer_of("byte-level").encode
    prompt, whole = encoded("The quick").ids, encoded("The quick brown").ids
    assert whole[: len(prompt)] == prompt
    given: list[str | tuple[int, ...]] = [
        " brown",
        (4, 5, 6),
        "k",
        *((number,) for number in range(2 * CONTINUATIONS_AT_ONCE)),
    ]
    scores, summary = await scoring.score(request(), given, None)
    assert scores[0].token_ids == tuple(whole[len(prompt) :])
    assert scores[1].token_ids == (4, 5, 6)
    assert scores[1].logprobs == (-4.0, -5.0, -6.0)
    assert scores[1].greedy == (True, False, True)
    # Where the texts would share a token, or lose one, the prompt's ids stay.
    assert scores[2].token_ids == tuple(encoded("k", add_special_tokens=False).ids)
    assert [score.token_ids for score in scores[3:]] == given[3:]
    first, *others = answers.asked
    assert first.adapter == "a@live"
    assert {one.adapter for one in others} == {"tenants/acme/adapters/a@sha256:1"}
    assert sorted(one.request_id for one in answers.asked) == sorted(f"r.{index}" for index in range(len(given)))
    assert {one.stopping.max_tokens for one in answers.asked} == {0}
    assert {one.prompt_logprobs_start for one in answers.asked} == {len(prompt)}
    # So that another call of this request id does not read these scores as its own.
    assert len({one.fingerprint for one in answers.asked}) == len({score.token_ids for score in scores})
    before = {one.fingerprint for one in answers.asked}
    await scoring.score(request(), [" brown"], None)
    assert answers.asked[-1].fingerprint in before
    assert answers.most == CONTINUATIONS_AT_ONCE
    assert answers.reserved_tokens[0] == sum(len(prompt) + len(score.token_ids) for score in scores)
    assert summary.request_id == "r"
    assert summary.cached_tokens == 4 * len(given)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_long_prompt_is_tokenized_once_for_all_continuations(
    scoring: UnaryCalls, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    admission = scoring._admission
    model: Any = (await admission.resolve(request()))[0]
    model.tokenizer, model.manifest.context_length = FileTokenizer(files_of(kind)), 10_000
    texts, tokenize = list[str](), admission.prompts.tokenize

    async def noted(tokenizer: Any, text: str, *more: Any) -> Any:
        texts.append(text)
        return await tokenize(tokenizer, text, *more)

    monkeypatch.setattr(admission.prompts, "tokenize", noted)
    endings = [" brown", " fox jumps", "ick", ",", "<|end|>", " 日本語"]
    prompt = f"{SAMPLE * 20}Answer:"
    prompt_ids, found, _, _ = await continuation_ids(admission, request(prompt), endings)
    assert sum(len(text) > 1000 for text in texts) <= 1
    encoded = tokenizer_of(kind).encode
    for ending, ids in zip(endings, found, strict=True):
        whole = tuple(encoded(prompt + ending).ids)
        assert whole[: len(prompt_ids)] == prompt_ids, "the prompt's last token would change"
        assert ids == whole[len(prompt_ids) :]


async def test_a_continuation_that_fails_ends_the_call_and_the_others(scoring: UnaryCalls, answers: Answers) -> None:
    answers.refusals["r.3"] = Unavailable("no worker", reason="NO_WORKER")
    with pytest.raises(Unavailable):
        await scoring.score(request(), [(number,) for number in range(6)], None)
    assert answers.running == 0


@pytest.mark.parametrize(
    ("prompt", "given", "names"),
    [
        ("The quick", ["x", ()], r"continuations\[1\]: has no tokens"),
        ("The quick", [(1,) * 60], r"continuations\[0\]: .* is 40 tokens; \d+ prompt tokens and its 60 do not fit"),
        ("x" * 500, ["x"], "prompt: .* do not fit"),
    ],
)
async def test_bad_input_is_named_before_anything_runs(
    scoring: UnaryCalls, answers: Answers, prompt: str, given: list[Any], names: str
) -> None:
    with pytest.raises(InvalidField, match=names):
        await scoring.score(request(prompt), given, None)
    assert not answers.asked


def test_the_tokens_that_parts_sampled_are_no_answer() -> None:
    """Decisions and scores read the distribution of a first token, which nobody gets."""
    parts = [Summary("r", REVISION, prompt, 2, 1, 0.0, 0.0, 0.0, 0.0, 0) for prompt in (3, 4)]
    total = total_of("whole", parts)
    assert (total.prompt_tokens, total.cached_tokens, total.completion_tokens) == (7, 4, 0)
