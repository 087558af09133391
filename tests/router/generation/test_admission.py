"""Admission: what a request becomes as a job, what is refused, and what a resumed request keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.contracts.artifacts.added_tokens import as_field
from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig
from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.contracts.grammars.build import regex_grammar
from loraplex.contracts.options import SamplingParams, TokenLogprobs
from loraplex.router.api.convert import read_request, write_message
from loraplex.router.catalog.adapters import AdapterConfigs
from loraplex.router.catalog.models import ServedModel
from loraplex.router.catalog.store_client import Manifest, ResolvedAdapter, RolledOut
from loraplex.router.dispatch.links import RelayReach
from loraplex.router.dispatch.routed_job import READ_TOKENS
from loraplex.router.generation.admission import Admission, GrammarProofs, check_answer_size
from loraplex.router.generation.resume import Began, ResumePayload, Resumption
from loraplex.router.request import (
    DEFAULT_MAX_TOKENS,
    Chat,
    ChatMessage,
    Delta,
    Message,
    PromptLogprobs,
    PromptOptions,
    Received,
    Request,
    Stopping,
    Tool,
    WeightedAdapter,
)
from loraplex.router.text.file_tokenizer import FileTokenizer
from loraplex.router.text.tokenizer import HashTokenizer, PromptTokenizer
from loraplex.runtime.rpc.errors import CallError, InvalidField, Mismatch, NotFound, Unavailable
from loraplex.runtime.rpc.server import MESSAGE_BYTES
from tests.router.small_tokenizers import files_of
from tests.router.text.test_added_tokens import added

MANIFEST = Manifest("tiny", "sha256:0", "hash", context_length=300, vocab_size=512, files={})
ADAPTER = AdapterRef("tenants/acme/adapters/a/revisions/sha256:1", "sha256:1", 8, 1000)
REQUEST = Request("acme", "hello", "prompt", request_id="r")
BEGAN = Began(0, 0.0, 0.0, 0.0, 0.0)
PAYLOAD = ResumePayload("r", "f", "tiny", "sha256:0", ADAPTER, seed=7, max_tokens=9, began=BEGAN)


class Cluster:
    """The models and workers that an admission sees."""

    def __init__(self) -> None:
        none: Any = None  # no test asks the queue or for the workers' liveness
        self.served = {"tiny": ServedModel(MANIFEST, HashTokenizer(), none)}
        self.workers = [SimpleNamespace(max_rank=16, max_tokens=200)]
        self.unservable: CallError | None = None
        self.expects = False

    def with_digest(self, name: str, digest: str) -> Any:
        if digest != MANIFEST.digest:
            raise Mismatch("model", f"{name} has been replaced since", reason="BASE_REPLACED")
        if name not in self.served:
            raise Unavailable(f"{name} is not served here yet", reason="NO_MODEL")
        return self.get(name)

    def refusal(self, name: str, adapter: Any) -> None:
        """No plan refuses a model."""

    def why_unservable(self, job: Job) -> CallError | None:
        return self.unservable

    def get(self, name: str) -> Any:
        if name not in {"", *self.served}:
            raise NotFound("model", name)
        return self.served["tiny"]

    def revisions(self, name: str) -> list[Any]:
        return [self.get(name)]

    def serving(self, name: str, digest: str = "") -> Any:
        return self.workers

    def expects_worker(self, name: str, digest: str = "") -> bool:
        return self.expects


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def admission(cluster: Any) -> Iterator[Admission]:
    store: Any = SimpleNamespace(config_of=AsyncMock(return_value=b"{}"))
    proofs = GrammarProofs()
    yield Admission(cluster, store, AdapterConfigs(store), "router:1", RelayReach(), PromptTokenizer(1), proofs)
    proofs.close()


async def refusal(admission: Admission, request: Request) -> CallError:
    with pytest.raises(CallError) as refused:
        await admission.admit(request, None)
    return refused.value


async def test_a_request_becomes_a_job(admission: Admission) -> None:
    job = (await admission.admit(REQUEST, 1.5)).job
    assert job.prompt_ids == tuple(b"hello")
    assert (job.tenant, job.model, job.base_digest, job.reply_to) == ("acme", "tiny", "sha256:0", "router:1")
    assert (job.attempt, job.stopping.max_tokens, job.deadline_ms) == (1, DEFAULT_MAX_TOKENS, 1500)
    assert (await admission.admit(REQUEST, None)).job.job_id != job.job_id


async def test_requests_of_an_adapter_have_its_added_tokens_and_ends(cluster: Cluster) -> None:
    """New ones, and those that are resumed."""
    trained, tokens = added("byte-level")
    base = replace(cluster.served["tiny"], tokenizer=FileTokenizer(files_of("byte-level")))
    cluster.served["tiny"] = base
    config = {"peft_type": "LORA", "r": 8, "loraplex_tokens": [as_field(token) for token in tokens],
              "loraplex_end_tokens": ["</call>", 5, MANIFEST.vocab_size],
              "loraplex_chat": {"template": "{{ messages[0].content }}{{ eos_token }}"}}  # fmt: skip
    resolved = SimpleNamespace(ref=ADAPTER, base_digest=MANIFEST.adapted_digest, breaches={})
    store: Any = SimpleNamespace(
        config_of=AsyncMock(return_value=json.dumps(config).encode()), resolve=AsyncMock(return_value=resolved)
    )
    models: Any = cluster
    admission = Admission(models, store, AdapterConfigs(store), "router:1", RelayReach(), PromptTokenizer(1))
    text = "the<call>fox"
    request = Request("acme", text, "prompt", request_id="r", seed=7, stopping=Stopping(max_tokens=9))
    expected = tuple(trained.encode(text).ids)
    admitted = await admission.admit(replace(request, adapter="a"), None)
    assert admitted.job.prompt_ids == expected
    assert admitted.tokenizer.decode(expected, skip_special_tokens=False).endswith(text)
    resumed = (await admission.readmit(request, Resumption(PAYLOAD), None)).job
    assert resumed.prompt_ids == expected
    ends = (tokens[1].id, 5)
    assert admitted.job.stopping.end_ids == resumed.stopping.end_ids == ends
    plain = (await admission.admit(request, None)).job
    assert plain.prompt_ids == tuple(base.tokenizer.tokenize(text, special_tokens=True))
    assert plain.stopping.end_ids == ()
    chat = replace(request, adapter="a", prompt=Chat((ChatMessage("user", "x"),)), prompt_field="chat")
    assert (await admission.admit(chat, None)).job.prompt_ids[-1] == tokens[1].id


async def test_bad_words_become_ids_of_the_job(admission: Admission) -> None:
    request = Request("acme", (5, 6), "token_ids", seed=3, bad_words=("ab", "c"))
    assert (await admission.admit(request, None)).job.sampling == SamplingParams(
        seed=3, bad_word_ids=((97, 98), (32, 97, 98), (99,), (32, 99))
    )
    error = await refusal(admission, replace(request, grammar='start: "a"', format_field="grammar"))
    assert isinstance(error, InvalidField)
    assert str(error) == "sampling.bad_words: cannot be used with grammar"


async def test_what_no_grammar_holds_of_a_tool_stays_out_where_the_request_is_resumed(admission: Admission) -> None:
    bad = '{"properties": {"a": {"type": "string", "pattern": "("}, "b": {"type": "integer"}}}'
    chat = Chat((ChatMessage("user", "x"),), (Tool("f", "", bad),))
    request = Request("acme", chat, "chat", request_id="r", seed=7, stopping=Stopping(max_tokens=9))
    admitted = await admission.admit(request, None)
    left_out = ("chat.tools[0].parameters.properties.a",)
    assert (admitted.calls.not_enforced, tuple(admitted.calls.free)) == (left_out, left_out)
    payload = msgspec.structs.replace(PAYLOAD, adapter=None, free_parts=left_out)
    resumed = await admission.readmit(request, Resumption(payload), None)
    assert resumed.job.grammar == admitted.job.grammar
    strict = replace(request, prompt=replace(chat, tools=(Tool("f", "", bad, strict=True),)))
    error = await refusal(admission, strict)
    assert isinstance(error, InvalidField)
    assert error.field == left_out[0]


async def test_candidates_are_computed_with_log_probabilities(admission: Admission) -> None:
    job = (await admission.admit(replace(REQUEST, n=1, best_of=3), None)).job
    assert (job.n, job.logprobs) == (3, 0)


async def test_the_largest_worker_bounds_the_context(admission: Admission, cluster: Cluster) -> None:
    def asking(max_tokens: int) -> Request:
        return replace(REQUEST, stopping=Stopping(max_tokens=max_tokens))

    assert (await admission.admit(asking(195), None)).job.stopping.max_tokens == 195
    error = await refusal(admission, asking(196))
    assert isinstance(error, InvalidField)
    assert (error.field, error.reason) == ("stopping.max_tokens", "CONTEXT_EXCEEDED")
    cluster.workers[0].max_tokens = 100_000
    assert (await admission.admit(asking(295), None)).job.stopping.max_tokens == 295  # the model's own limit
    assert isinstance(await refusal(admission, asking(296)), InvalidField)


async def test_ids_beyond_the_vocabulary_are_refused_by_their_field(admission: Admission) -> None:
    for field, request in (
        ("token_ids", replace(REQUEST, prompt=(1, 512), prompt_field="token_ids")),
        ("stopping.stop_token_ids", replace(REQUEST, stopping=Stopping(stop_token_ids=(512,)))),
    ):
        error = await refusal(admission, request)
        assert isinstance(error, InvalidField)
        assert error.field == field


async def test_without_a_live_worker_nothing_is_admitted(admission: Admission, cluster: Cluster) -> None:
    cluster.workers.clear()
    error = await refusal(admission, REQUEST)
    assert isinstance(error, Unavailable)
    assert error.reason == "NO_WORKER"
    cluster.expects = True
    job = (await admission.admit(REQUEST, None)).job
    assert job.stopping.max_tokens + len(job.prompt_ids) <= MANIFEST.context_length


async def resumed(admission: Admission, request: Request = REQUEST, **received: Received) -> Job:
    """Resume a request whose client has something of choices `c0`, `c1`, ..."""
    parts = {int(name[1:]): part for name, part in received.items()}
    return (await admission.readmit(request, Resumption(PAYLOAD, parts), None)).job


async def test_a_resumed_job_goes_on_after_what_was_received(admission: Admission) -> None:
    request = replace(REQUEST, n=3, best_of=3, prompt_logprobs=1)
    job = await resumed(admission, request, c0=Received((5, 6)), c1=Received((7,), finished=True))
    assert (job.emitted, job.done, job.prompt_logprobs) == ({0: (5, 6)}, (1,), None)
    assert job.resumed
    assert job.adapter == ADAPTER
    ranked = replace(REQUEST, n=1, best_of=3)
    assert (await resumed(admission, ranked, c0=Received((5, 6)))).emitted == {}


async def test_what_can_not_be_resumed_is_refused(admission: Admission, cluster: Cluster) -> None:
    with pytest.raises(InvalidField, match="beyond the vocabulary"):
        await resumed(admission, c0=Received((512,)))
    unknown = Resumption(msgspec.structs.replace(PAYLOAD, model="other"))
    with pytest.raises(Unavailable, match="not served here yet"):
        await admission.readmit(REQUEST, unknown, None)
    replaced = Resumption(msgspec.structs.replace(PAYLOAD, base_digest="sha256:2"))
    with pytest.raises(Mismatch, match="replaced since"):
        await admission.readmit(REQUEST, replaced, None)
    cluster.unservable = Unavailable("the only worker that is large enough restarts", reason="NO_WORKER_FITS")
    with pytest.raises(Unavailable, match="restarts"):
        await resumed(admission)


CONFIG = GenerationConfig(
    do_sample=True, temperature=0.5, top_k=20, top_p=0.25, repetition_penalty=1.5, max_new_tokens=30
)


def read(**sampling: Any) -> Request:
    """Return the request with these fields of sampling set."""
    spec = pb.GenerateSpec(request_id="r", prompt="hello", sampling=pb.Sampling(**sampling))
    return read_request(spec, "acme")


@pytest.mark.parametrize(
    ("sampling", "becomes"),
    [
        ({}, {"temperature": 0.5, "top_k": 20, "top_p": 0.25, "repetition_penalty": 1.5}),
        # Over HTTP; the model's temperature wins.
        ({"default_temperature": 1.0}, {"temperature": 0.5, "top_k": 20, "top_p": 0.25, "repetition_penalty": 1.5}),
        (
            {"temperature": 2.0, "top_k": 0, "seed": 7},
            {"temperature": 2.0, "top_p": 0.25, "repetition_penalty": 1.5, "seed": 7},
        ),
        # A greedy request gets penalties alone.
        ({"temperature": 0.0}, {"repetition_penalty": 1.5}),
        ({"temperature": 0.0, "repetition_penalty": 1.0}, {}),
    ],
)
async def test_unset_fields_are_the_models(
    admission: Admission, cluster: Cluster, sampling: dict[str, Any], becomes: dict[str, Any]
) -> None:
    neutral = (await admission.admit(read(**sampling), None)).job
    expected = {name: value for name, value in sampling.items() if name not in ("default_temperature", "seed")}
    if "default_temperature" in sampling:
        expected["temperature"] = sampling["default_temperature"]
    assert replace(neutral.sampling, seed=0) == SamplingParams(**expected)
    assert neutral.stopping.max_tokens == DEFAULT_MAX_TOKENS
    cluster.served["tiny"] = replace(cluster.served["tiny"], generation_config=CONFIG)
    job = (await admission.admit(read(**sampling), None)).job
    assert replace(job.sampling, seed=becomes.get("seed", 0)) == SamplingParams(**becomes)
    assert job.stopping.max_tokens == 30
    assert (await admission.admit(replace(REQUEST, stopping=Stopping(max_tokens=7)), None)).job.stopping.max_tokens == 7


async def test_a_request_for_no_tokens_gets_no_sampling(admission: Admission, cluster: Cluster) -> None:
    """Score asks for log probabilities of the prompt alone."""
    cluster.served["tiny"] = replace(cluster.served["tiny"], generation_config=CONFIG)
    job = (await admission.admit(replace(REQUEST, stopping=Stopping(max_tokens=0), seed=0), None)).job
    assert job.sampling == SamplingParams()


@pytest.mark.parametrize("most", [None, 20, 100_000])
async def test_a_prompt_is_cut_alike_where_its_request_is_resumed(
    admission: Admission, cluster: Cluster, most: int | None
) -> None:
    """The length that a model proposes may be its whole context, which leaves the prompt its room all the same."""
    config = GenerationConfig(max_new_tokens=most)
    cluster.served["tiny"] = replace(cluster.served["tiny"], generation_config=config)
    cluster.workers[0].max_tokens = 300
    for size in (100, 250, 1000):
        request = replace(REQUEST, prompt="x" * size, prompt_options=PromptOptions(truncate_to=0))
        job = (await admission.admit(request, None)).job
        assert len(job.prompt_ids) == min(size, 300 - min(most or 128, 128))
        assert job.stopping.max_tokens == min(most or 128, 300 - len(job.prompt_ids))
        resumed = replace(request, stopping=Stopping(max_tokens=job.stopping.max_tokens))
        payload = msgspec.structs.replace(PAYLOAD, max_tokens=job.stopping.max_tokens)
        again = (await admission.readmit(resumed, Resumption(payload), None)).job
        assert (again.prompt_ids, again.stopping) == (job.prompt_ids, job.stopping)


async def test_a_resumed_request_keeps_the_values_that_it_was_admitted_with(
    admission: Admission, cluster: Cluster
) -> None:
    """The model may say something else by now, and this router may not use that."""
    filled: dict[str, Any] = {"temperature": 0.5, "top_k": 20}
    for config, kept in ((UNSAID, filled), (CONFIG, {}), (GenerationConfig(do_sample=True), filled)):
        cluster.served["tiny"] = replace(cluster.served["tiny"], generation_config=config)
        resumption = Resumption(msgspec.structs.replace(PAYLOAD, filled=kept))
        admitted = await admission.readmit(replace(read(top_p=0.75), seed=7), resumption, None)
        assert admitted.job.sampling == SamplingParams(top_p=0.75, seed=7, **kept)
        assert admitted.filled == kept, "the next token has them too"


async def test_a_format_is_proven_before_its_job_is_made(admission: Admission) -> None:
    request = replace(REQUEST, format_field="regex", grammar=regex_grammar("[0-9]+"))
    assert (await admission.admit(request, None)).job.grammar == request.grammar
    prover = admission.proofs._provers[MANIFEST.digest]
    assert prover.known(request.grammar, "acme")
    assert not prover.known(request.grammar, "globex"), "its time would tell what acme has asked"
    error = await refusal(admission, replace(request, grammar=regex_grammar("(a")))
    assert (type(error), error.reason) == (InvalidField, "INVALID_FORMAT")
    assert "regex: unclosed group" in str(error)


SIZED = Request("acme", "x", "prompt")
# The largest id of a real vocabulary, in a varint of five bytes; a token that 128 bytes of text belong to.
ID, TEXT = (1 << 32) - 1, "x" * 128
# Maximum length of a resume token in characters.
RESUME_TOKEN = "t" * 16_384


def logprobs(tokens: int, alternatives: int) -> tuple[TokenLogprobs, ...]:
    return (TokenLogprobs(-1.5, ((ID, -1.5),) * alternatives),) * tokens


def delta(tokens: int, alternatives: int | None = None) -> Delta:
    return Delta(0, (ID,) * tokens, TEXT * tokens, 0, () if alternatives is None else logprobs(tokens, alternatives))


def fits(event_of: Callable[[int], Delta | PromptLogprobs], tokens: int) -> bool:
    """Tell whether a message of so many tokens fits, from the sizes of two smaller ones: every token takes the same."""
    small, larger = pb.GenerateEvent(), pb.GenerateEvent()
    write_message(Message(event_of(200), RESUME_TOKEN), small)
    write_message(Message(event_of(300), RESUME_TOKEN), larger)
    # Lengths of lengths differ by some bytes.
    each = (larger.ByteSize() - small.ByteSize()) / 100
    return small.ByteSize() + each * (tokens - 200) + 64 <= MESSAGE_BYTES


def most(request: Request, *, prompt: int = 1, max_tokens: int = 1) -> int | None:
    """Return the number in the refusal: how many would fit."""
    with pytest.raises(InvalidField) as refused:
        check_answer_size(request, prompt, max_tokens)
    assert refused.value.reason == "ANSWER_TOO_LARGE"
    words = refused.value.message.split()
    return int(words[words.index("most") + 1]) if "most" in words else None


def test_the_log_probabilities_of_a_prompt_fit_or_are_refused() -> None:
    asked = replace(SIZED, prompt_logprobs=20)
    allowed = most(asked, prompt=20_000)
    assert allowed is not None
    assert 10 < allowed < 20
    check_answer_size(replace(SIZED, prompt_logprobs=allowed), 20_000, 1)
    assert fits(lambda tokens: PromptLogprobs(logprobs(tokens, allowed)), 20_000)
    assert not fits(lambda tokens: PromptLogprobs(logprobs(tokens, 20)), 20_000)
    assert most(asked, prompt=1_000_000) is None


def test_the_best_of_several_candidates_fits_or_is_refused() -> None:
    ranked = replace(SIZED, best_of=2)
    longest = most(ranked, max_tokens=10**6)
    assert longest is not None
    check_answer_size(ranked, 1, longest)
    assert fits(delta, longest)
    allowed = most(replace(ranked, logprobs=20), max_tokens=12_000)
    assert allowed is not None
    assert fits(lambda tokens: delta(tokens, allowed), 12_000)


def test_an_answer_in_several_messages_is_not_bounded() -> None:
    check_answer_size(replace(SIZED, logprobs=20, n=2, best_of=2), 1, 10**6)
    held_back = 1_000 + 64  # a stream interval, and tokens that may begin a stop string
    assert fits(lambda tokens: delta(tokens, 20), READ_TOKENS + held_back)


async def test_an_answer_whose_beginning_the_request_says_is_no_refusal(admission: Admission) -> None:
    resolved = ResolvedAdapter(ADAPTER, "sha256:0")
    candidate = RolledOut(resolved, "tenants/acme/adapters/a/releases/1", 0, 1000, 0, ("I cannot",))
    store: Any = SimpleNamespace(resolve=AsyncMock(return_value=replace(resolved, candidate=candidate)))
    admission.store = store
    request = replace(REQUEST, adapter="a", session_id="one")
    requests = request, replace(request, grammar="x"), replace(request, echo=True)
    sides = [await admission.side_of(one) for one in requests]
    assert [one.refusal_phrases for one in sides if one is not None] == [("I cannot",), (), ()]


INVOCATION = b"<check>"


@pytest.fixture
def activated(admission: Admission) -> Admission:
    """An admission at whose store adapter `a` is an activated one."""
    config = json.dumps({"alora_invocation_tokens": list(INVOCATION)}).encode()
    resolved = ResolvedAdapter(ADAPTER, MANIFEST.digest)
    store: Any = SimpleNamespace(config_of=AsyncMock(return_value=config), resolve=AsyncMock(return_value=resolved))
    admission.store, admission.configs = store, AdapterConfigs(store)
    return admission


async def test_the_last_invocation_of_a_prompt_is_the_jobs_and_a_resumed_ones(activated: Admission) -> None:
    request = replace(REQUEST, prompt="is <check> it <check> right", adapter="a")
    run = await activated.admit(request, None)
    assert (run.job.adapter, run.job.invoked_at, run.inactive) == (ADAPTER, 14, None)
    received = {0: Received(tuple(INVOCATION))}  # what was generated does not count
    resumed = await activated.readmit(request, Resumption(PAYLOAD, received), None)
    assert (resumed.job.adapter, resumed.job.invoked_at) == (ADAPTER, 14)
    scored = await activated.admit(replace(request, scored_from=20), None)
    assert scored.job.invoked_at == 3
    assert (await activated.admit(replace(request, adapter=""), None)).job.invoked_at is None


async def test_a_prompt_that_does_not_invoke_the_adapter_is_the_bases_if_the_request_allows_it(
    activated: Admission,
) -> None:
    request = replace(REQUEST, adapter="a")
    error = await refusal(activated, request)
    what = f"the adapter's invocation '<check>', tokens {list(INVOCATION)}"
    assert error.reason == "NOT_INVOKED"
    assert str(error) == f"prompt: does not have {what}; add it, or allow_inactive has the base model answer"
    unknown = await refusal(activated, replace(request, prompt=(1, 1 << 31)))
    assert "is beyond the vocabulary" in str(unknown), "before a text is made of the ids"
    request = replace(request, allow_inactive=True)
    run = await activated.admit(request, None)
    assert (run.job.adapter, run.job.invoked_at, run.inactive) == (None, None, ADAPTER)
    resumed = await activated.readmit(request, Resumption(PAYLOAD), None)
    assert (resumed.job.adapter, resumed.inactive) == (None, ADAPTER)


async def test_an_invocation_that_has_other_tokens_in_the_prompt_is_told_from_none(activated: Admission) -> None:
    config = json.dumps({"alora_invocation_tokens": [300]}).encode()
    activated.configs = AdapterConfigs(cast(Any, SimpleNamespace(config_of=AsyncMock(return_value=config))))
    error = await refusal(activated, replace(REQUEST, prompt="is it <300>", adapter="a"))
    assert str(error) == (
        "prompt: does not have the adapter's invocation '<300>', tokens [300], but its text in other ones; separate it "
        "from its neighbours, send token_ids, or allow_inactive has the base model answer"
    )


async def test_an_activated_adapter_is_no_part_of_a_weighted_set(activated: Admission) -> None:
    error = await refusal(activated, replace(REQUEST, adapters=(WeightedAdapter("a", 0.5),)))
    why = "is an activated adapter, which no weighted set can have; name it alone"
    assert str(error) == f"adapters: {ADAPTER.revision} {why}"
