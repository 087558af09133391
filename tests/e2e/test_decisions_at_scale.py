"""1, 8 and 400 questions by OpenAI's client over a text of 900 tokens, and 32 rows of 8 adapters in one batch.

The short form is in test_shipped_model.py: three questions, alone and beside those of other adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.e2e.conftest import TENANT, Cluster, running_cluster
from tests.e2e.test_shipped_model import ADAPTERS, EXAMPLES, Eventually

pytestmark = [pytest.mark.nightly, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
# Blocks for the text under each of the adapters, and for 32 rows behind it.
FLAGS = ("--dtype", "float32", "--threads", "2", "--rows", "32", "--kv-blocks", "1024")
TEXT = "I was charged twice for my order, and nobody answers my letters since May. " * 29
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Is that so? Answer with one of", ("yes", "no")),
    ("Answer with one of", ("A", "B", "C")),
    ("Answer with one of these levels, from lowest to highest", ("1", "2", "3")),
)


@dataclass(frozen=True)
class Asked:
    """A question as OpenAI's client asks it, how its prompt goes on, and its labels."""

    body: Any
    text: str
    labels: tuple[str, ...]


def question(number: int) -> Asked:
    (ask, labels), asked = KINDS[number % 3], f"Part {number} is about money."
    text = "\n".join([asked, f"{ask}:", *(f"- {label}" for label in labels)])
    body: dict[str, Any] = {"type": ("predicate", "choice", "score")[number % 3], "instructions": asked}
    if number % 3 == 1:
        body["choices"] = [{"value": label} for label in labels]
    elif number % 3 == 2:
        body["levels"] = [{"label": label} for label in labels]
    return Asked(body, text, labels)


QUESTIONS = tuple(map(question, range(400)))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, save_adapter: Callable[..., None]) -> Mapping[str, Path]:
    """The three shipped adapters, and five whose weights are drawn."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, paths = auto.from_pretrained(EXAMPLES / "model", dtype=torch.float32), dict(ADAPTERS)
    for seed in range(5):
        paths[f"drawn-{seed}"] = tmp_path_factory.mktemp("drawn") / str(seed)
        save_adapter(model, paths[f"drawn-{seed}"], seed, 0.05, r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    return paths


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, adapters: Mapping[str, Path]) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("decisions") / "cluster"
    async with running_cluster(directory, str(EXAMPLES / "model"), adapters, worker_flags=FLAGS, http=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    headers, url = {"x-loraplex-tenant": TENANT}, f"http://{cluster.local.http}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", default_headers=headers, max_retries=0, timeout=900
    ) as own:
        yield own


class Oracle:
    """Probabilities of transformers and peft in float64; what all prompts begin with is computed once."""

    def __init__(self, adapter: Path) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        auto, tokenizers = AutoModelForCausalLM, AutoTokenizer
        base: Any = auto.from_pretrained(EXAMPLES / "model", dtype=torch.float32)
        self._model: Any = PeftModel.from_pretrained(base, adapter).eval().double()
        self._tokenizer: Any = tokenizers.from_pretrained(EXAMPLES / "model")
        self._prefix: list[int] = self._ids(f"{TEXT}\n\n")[:-8]
        with torch.inference_mode():
            self._past = self._model(input_ids=torch.tensor([self._prefix]), use_cache=True).past_key_values

    def _ids(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(rendered, add_special_tokens=False).input_ids
        return ids

    def probabilities(self, asked: Asked) -> tuple[list[float], float]:
        """Return the probabilities of a question's labels, and those of all together."""
        import torch

        logprobs = []
        prompt = self._ids(f"{TEXT}\n\n{asked.text}")
        assert prompt[: len(self._prefix)] == self._prefix
        for label in asked.labels:
            own = self._tokenizer(label, add_special_tokens=False).input_ids
            behind = [*prompt, *own][len(self._prefix) :]
            with torch.inference_mode():
                output = self._model(input_ids=torch.tensor([behind]), past_key_values=deepcopy(self._past))
            found = output.logits[0, -1 - len(own) : -1].log_softmax(-1)
            logprobs.append(float(found[range(len(own)), own].sum()))
        whole = torch.tensor(logprobs, dtype=torch.float64)
        return whole.softmax(-1).tolist(), float(whole.exp().sum())


def shares(answer: Any) -> list[float]:
    if answer.type == "predicate":
        return [answer.probability, 1 - answer.probability]
    return [one.probability for one in answer.probabilities]


@pytest.mark.timeout(1200)
async def test_probabilities_are_those_of_transformers_and_peft_whatever_is_asked_beside(
    cluster: Cluster, client: openai.AsyncOpenAI, adapters: Mapping[str, Path], eventually: Eventually
) -> None:
    oracle = await asyncio.to_thread(Oracle, adapters["pirate"])
    truth = await asyncio.to_thread(lambda: [oracle.probabilities(asked) for asked in QUESTIONS])
    whole: Sequence[Any] = ()
    for count in (400, 8, 1):
        asked = [one.body for one in QUESTIONS[:count]]
        told = await client.decisions.create(model="pirate", input=TEXT, questions=asked)
        assert told.usage.input_tokens >= 900 * count
        for answer, (expected, mass) in zip(told.answers, truth[:count], strict=True):
            assert shares(answer) == pytest.approx(expected, rel=0, abs=1e-5)
            assert answer.model_dump()["label_mass"] == pytest.approx(mass, rel=0, abs=1e-5)
        whole = whole or told.answers
        assert list(told.answers) == list(whole[:count]), "a question has other bits beside others"
    assert len({tuple(one) for one, _ in truth}) == 400, "the questions do not matter"
    await eventually(cluster.idle)


async def test_bits_are_the_same_alone_and_among_32_rows_of_8_adapters(
    cluster: Cluster, client: openai.AsyncOpenAI, adapters: Mapping[str, Path], eventually: Eventually
) -> None:
    async def ask(name: str, asked: Sequence[Asked]) -> list[Any]:
        bodies: Any = [one.body for one in asked]
        return [*(await client.decisions.create(model=name, input=TEXT, questions=bodies)).answers]

    # Of each call the first question runs before the other four.
    asked = QUESTIONS[1:15:3]
    together = await asyncio.gather(*(ask(name, asked) for name in adapters))
    for name, answers in zip(adapters, together, strict=True):
        assert answers == [(await ask(name, [one]))[0] for one in asked], name
    assert len({answers[0].model_dump_json() for answers in together}) == 8, "the adapters do not matter"
    await eventually(cluster.idle)
