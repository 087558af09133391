"""The whole path with the shipped model and its adapters in float32: exact answers, the experiments of examples/.

The worker drafts tokens, which changes none: what it decodes is compared with transformers' and its own without drafts.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio

from examples import raw_stub, structured
from loraplex_client import (
    AsyncClient,
    AsyncStoreClient,
    Client,
    Decision,
    Generation,
    InvalidRequestError,
    Question,
    SpeculativeDecoding,
)
from tests.e2e.conftest import TENANT, Cluster, running_cluster
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.model
EXAMPLES = Path(structured.__file__).parent
ADAPTERS = {path.name: path for path in sorted((EXAMPLES / "adapters").glob("*/*"))}
FLAGS = ("--dtype", "float32", "--threads", "1", "--rows", "8", "--kv-blocks", "256")
# Maximum number of tokens of a draft.
MOST = 6
DRAFTING = ("--speculative-config", f'{{"method": "suffix", "num_speculative_tokens": {MOST}}}')
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A worker with the shipped model in float32 and its adapters, all of tenant acme, and a gateway."""
    directory, flags = tmp_path_factory.mktemp("shipped") / "cluster", (*FLAGS, *DRAFTING)
    async with running_cluster(directory, str(EXAMPLES / "model"), ADAPTERS, worker_flags=flags, http=True) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(one_thread: None) -> TinyModel:
    """Answers of transformers and peft with the model and its adapters, in float64."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    peft: Any = None
    for name, path in ADAPTERS.items():
        if peft is None:
            model = auto.from_pretrained(EXAMPLES / "model", dtype=torch.float32)
            peft = PeftModel.from_pretrained(model, path, adapter_name=name)
        else:
            peft.load_adapter(path, adapter_name=name)
    return TinyModel(EXAMPLES / "model", ADAPTERS, peft.eval().double())


def prompt(number: int) -> tuple[int, ...]:
    """Uneven lengths, from 3 to 90 tokens."""
    return tuple(3 + (number * 31 + at * 7) % 300 for at in range(3 + number * 29 % 88))


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_with_three_adapters_are_exact(
    cluster: Cluster, eventually: Eventually, oracle: TinyModel
) -> None:
    """Token ids equal transformers' generate with peft's adapter, each request alone."""
    names = (*ADAPTERS, None)
    begun = asyncio.Semaphore(1)

    async def ask(number: int) -> tuple[int, ...]:
        await begun.acquire()  # each comes while the one before is decoding
        stream = cluster.client.generate_stream(
            token_ids=prompt(number), adapter_id=names[number % 4], max_tokens=10 + number * 3
        )
        ids = list((await anext(stream)).token_ids)
        begun.release()
        return (*ids, *[token async for piece in stream for token in piece.token_ids])

    answers = await asyncio.gather(*(ask(number) for number in range(8)))
    for number, answer in enumerate(answers):
        assert answer == oracle.answer(prompt(number), 10 + number * 3, names[number % 4]), number
    assert len({answer[:6] for answer in answers}) >= 7, "the answers are not diverse"
    assert len({oracle.answer(prompt(4), 22, name) for name in names}) == 4, "the adapters do not matter"
    await eventually(cluster.idle)


@pytest.mark.asyncio(loop_scope="module")
async def test_rollouts_of_pushed_revisions_are_scored_by_peft(
    cluster: Cluster, eventually: Eventually, oracle: TinyModel, tmp_path: Path
) -> None:
    """`make trainers` in small: log probabilities are those of what was sampled from, each at its own revision."""
    import torch
    from safetensors.torch import load, save, save_file
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    shout = ADAPTERS["shout"]
    config = json.loads((shout / "adapter_config.json").read_text())
    weights = load((shout / "adapter_model.safetensors").read_bytes())
    options: Any = {"temperature": 0.7, "top_k": 12, "max_tokens": 24, "logprobs": 3}
    rollouts, cached = {}, []
    async with AsyncStoreClient(cluster.local.store, TENANT) as store:
        for version, factor in (("v0", 1.0), ("v1", 0.8)):
            step = {name: tensor * factor for name, tensor in weights.items()}
            pushed = await store.push_adapter(config, save(step), "policy", ttl_s=600)
            (tmp_path / version).mkdir()
            shutil.copy(shout / "adapter_config.json", tmp_path / version)
            save_file(step, tmp_path / version / "adapter_model.safetensors")
            name = f"policy@{pushed.revision.digest}"
            rollouts[version] = cluster.client.generate_stream(
                token_ids=prompt(9), adapter_id=name, seed=5, logprobs_mode="processed_logprobs", **options
            )
            await anext(rollouts[version])  # which runs while the next revision is pushed
        with pytest.raises(InvalidRequestError, match=r"adapter_model\.safetensors"):
            await store.push_adapter(config, save(step)[:-100], "policy", ttl_s=600)
    with torch.inference_mode():
        for version, stream in rollouts.items():
            answer = await stream.result()
            cached.append(answer.usage.cached_tokens)
            oracle.peft.load_adapter(tmp_path / version, adapter_name=version)
            oracle.peft.set_adapter(version)
            ids, told = list(answer.choices[0].token_ids), answer.choices[0].logprobs
            given = torch.tensor([[*prompt(9), *ids[:-1]]])
            scores: Any = oracle.peft.double()(input_ids=given).logits[0, len(prompt(9)) - 1 :]
            for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12)):
                scores = warper(given, scores)
            truth = scores.log_softmax(-1)
            for place, (one, token) in enumerate(zip(told, ids, strict=True)):
                assert one.logprob == pytest.approx(float(truth[place, token]), abs=1e-4), (version, place)
                assert all(float(truth[place, other]) > -torch.inf for other, _ in one.alternatives)
    assert cached == [0, 0], "blocks of one revision serve another"
    await eventually(cluster.idle)


@pytest.mark.asyncio(loop_scope="module")
async def test_persons_and_entities_have_their_shape(cluster: Cluster, eventually: Eventually) -> None:
    def run() -> dict[str, list[object]]:
        with Client(cluster.local.router, TENANT) as client:
            return structured.run(client, "json")

    answers = await asyncio.to_thread(run)
    raw = await asyncio.to_thread(lambda: "".join(raw_stub.generate(cluster.local.router, "The for statement", 8)))
    with pytest.raises(grpc.RpcError) as refused:
        await asyncio.to_thread(lambda: list(raw_stub.generate(cluster.local.router, "", 8)))
    await eventually(cluster.idle)
    assert raw
    assert raw_stub.explain(refused.value).startswith("INVALID_ARGUMENT: prompt: ")
    assert raw_stub.explain(refused.value).endswith("reason INVALID_FIELD")
    for answer in answers["person"][:2]:
        assert isinstance(answer, dict)
        assert len(answer["name"]) <= 10
        assert isinstance(answer["age"], int)
    for answer in answers["entities"][:2]:
        assert isinstance(answer, dict)
        assert list(answer) == ["people", "organizations", "places", "dates"]


def test_every_weight_in_a_byte(one_thread: None) -> None:
    from examples import quantized

    found = quantized.run()
    whole, small = found["bytes"]
    assert 0.25 <= small / whole < 0.251
    # Half a step is the most that rounding takes: a step is 1/255 of a tensor's range.
    assert 0 < found["mean_error"] < max(found["errors"].values()) < 0.003
    before, after = found["texts"]
    assert before.startswith(quantized.PROMPT)
    assert after[:60] == before[:60]


QUESTIONS = (
    Question("The customer wants money back.", yes="a refund is asked for"),
    Question("Which team?", choices={"A": "", "B": "billing", "parcel shipping": "parcels", "money returned": ""}),
    Question("How angry?", levels=["1", "2", "3"]),
)
ASKED = (
    "The customer wants money back.\nIs that so? Answer with one of:\n- yes: a refund is asked for\n- no",
    "Which team?\nAnswer with one of:\n- A\n- B: billing\n- parcel shipping: parcels\n- money returned",
    "How angry?\nAnswer with one of these levels, from lowest to highest:\n- 1\n- 2\n- 3",
)


@pytest.mark.asyncio(loop_scope="module")
async def test_decisions_are_the_models_own_and_the_same_alone_and_among_others(
    cluster: Cluster, eventually: Eventually, oracle: TinyModel
) -> None:
    import torch
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(EXAMPLES / "model")
    text = "I was charged twice for my order and nobody answers. " * 3
    names = (*ADAPTERS, None)

    def truth(name: str | None, asked: str, labels: tuple[str, ...]) -> list[float]:
        """The log probability of each label behind the prompt."""
        found = []
        for label in labels:
            prompt_ids = tokenizer(f"{text}\n\n{asked}\nAnswer:").input_ids
            ids = tokenizer(f"{text}\n\n{asked}\nAnswer: {label}").input_ids
            assert ids[: len(prompt_ids)] == prompt_ids
            if name is not None:
                oracle.peft.set_adapter(name)
            with oracle.peft.disable_adapter() if name is None else nullcontext(), torch.inference_mode():
                logprobs = oracle.peft(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(prompt_ids), len(ids))
            found.append(sum(float(logprobs[place - 1, ids[place]]) for place in places))
        return found

    async def ask(name: str | None, questions: tuple[Question, ...]) -> tuple[Decision, ...]:
        return (await cluster.client.decide(text, questions, adapter_id=name)).decisions

    together = await asyncio.gather(
        *(ask(name, QUESTIONS) for name in names), *(ask(name, QUESTIONS) for name in names)
    )
    alone = [[(await ask(name, (question,)))[0] for question in QUESTIONS] for name in names]
    scored = set[int]()
    for name, decisions, again, each in zip(names, together[:4], together[4:], alone, strict=True):
        assert list(decisions) == list(again) == each
        for question, asked, decision in zip(QUESTIONS, ASKED, decisions, strict=True):
            logprobs = torch.tensor(truth(name, asked, question.labels), dtype=torch.float64)
            shares = torch.tensor(list(decision.probabilities.values()), dtype=torch.float64)
            torch.testing.assert_close(shares, logprobs.softmax(-1), rtol=0, atol=1e-5)
            assert abs(decision.label_mass - float(logprobs.exp().sum())) <= 1e-5
            scored.add(decision.scored_labels)
    assert len({one[0].probabilities["yes"] for one in alone}) == 4, "the adapters do not matter"
    assert {0, 2} <= scored, "labels of one token and of several"
    await eventually(cluster.idle)


OPTIONS: dict[str, Any] = {
    **{"token_ids": [3 + at * 7 % 50 for at in range(40)], "max_tokens": 400, "ignore_eos": True},
    **{"temperature": 0.3, "seed": 5, "n": 2, "logprobs": 1},
}


@pytest.mark.asyncio(loop_scope="module")
async def test_drafts_are_counted_everywhere_and_change_nothing(cluster: Cluster) -> None:
    async with AsyncClient(cluster.local.router, TENANT, resume_attempts=100) as client:
        plain = await client.generate(**OPTIONS, speculation="off")
        assert plain.speculative_decoding is None
        for answer in (await client.generate(**OPTIONS), await disturbed(cluster, client)):
            assert answer.choices == plain.choices
            check(answer.speculative_decoding)
    await check_http(cluster)


def check(counts: SpeculativeDecoding | None) -> None:
    assert counts is not None
    assert 0 < counts.steps <= counts.draft_tokens <= MOST * counts.steps
    assert 0 < counts.accepted_tokens <= counts.draft_tokens
    assert counts.mean_acceptance_length == 1 + counts.accepted_tokens / counts.steps


async def disturbed(cluster: Cluster, client: AsyncClient) -> Generation:
    """Return an answer whose worker is killed, and later its router."""
    stream = client.generate_stream(**OPTIONS)
    async for piece in stream:
        if piece.offset > 50:
            break
    cluster.local.kill("worker-1", signal.SIGKILL)
    await cluster.local.start_worker()
    async for piece in stream:
        if piece.offset > 200:
            break
    cluster.local.kill("router-1", signal.SIGKILL)
    await cluster.local.restart("router-1")
    answer = await stream.result()
    assert answer.continuations
    return answer


async def check_http(cluster: Cluster) -> None:
    """A stream tells the counts with its usage, prompts of one request their sum; a request may refuse drafts."""
    body = {"model": "shout", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    headers = {"x-loraplex-tenant": TENANT}
    async with httpx2.AsyncClient(base_url=f"http://{cluster.local.http}/v1", headers=headers, timeout=60.0) as http:
        whole = (await http.post("/completions", json={**body, "prompt": ["one", "two"]})).json()
        counts = whole["metrics"]["speculative_decoding"]
        steps, drafted = counts["num_spec_steps"], counts["num_draft_tokens"]
        accepted = counts["num_accepted_draft_tokens"]
        assert 0 < accepted <= drafted <= MOST * steps
        assert counts["mean_acceptance_length"] == 1 + accepted / steps
        assert counts["draft_acceptance_rate"] == accepted / drafted
        messages = {"messages": [{"role": "user", "content": "Hi"}]}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        events = (await http.post("/chat/completions", json={**body, **messages, **streamed})).text
        *_, first, last, _ = events.split("\n\n")[:-1]
        assert '"speculative_decoding"' in last
        assert '"speculative_decoding"' not in first
        off = (await http.post("/chat/completions", json={**body, **messages, "speculation": "off"})).json()
        assert "metrics" not in off
        bad = await http.post("/chat/completions", json={**body, **messages, "speculation": "never"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "speculation")
