"""Chats with the real model and its adapters, in float32: every answer is transformers' and peft's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from examples.tasks import CHECK, TASKS
from loraplex_client import Generation
from tests.e2e.conftest import Cluster, running_cluster
from tests.real.conftest import WHOLE

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.model,
    pytest.mark.nightly,
    pytest.mark.timeout(3000 if WHOLE else 300),
]

CHATS, TOKENS = (100, 48) if WHOLE else (4, 12)
# Least difference of the two best logits, below which float32 sums in another order may swap them.
MARGIN = 1e-3
TOPICS = (
    "the sea",
    "Zürich",
    "日本の電車",
    "why the sky is blue",
    "a short poem 🌙",
    "Python lists",
    "naïve cafés",
    "2 + 2",
)
TOOL_TEMPLATE = """{% if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chats(count: int) -> list[list[dict[str, str]]]:
    """Return questions of the tasks, and talks of several turns with system prompts and other scripts."""
    tasks = [task.questions(count // 4 or 1, 2, CHECK) for task in TASKS.values()]
    single = [[{"role": "user", "content": question.text}] for questions in tasks for question in questions]
    talks = []
    for number in range(count - len(single)):
        topic = TOPICS[number % len(TOPICS)]
        talk = [{"role": "user", "content": f"Tell me about {topic}."}]
        if number % 3 == 0:
            talk.insert(0, {"role": "system", "content": f"Answer in {number + 3} words."})
        if number % 2 == 0:
            talk += [{"role": "assistant", "content": f"It is {topic}."}, {"role": "user", "content": f"{number}?"}]
        talks.append(talk)
    return single + talks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    model_directory: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """A worker that computes in float32; the adapter `tools` is one of the others with a template of its own."""
    directory = tmp_path_factory.mktemp("real")
    shutil.copytree(adapters["triage"], directory / "tools")
    (directory / "tools" / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    files = {**adapters, "tools": directory / "tools"}
    flags = ("--dtype", "float32", "--rows", "16", "--kv-blocks", "512")
    async with running_cluster(directory / "cluster", str(model_directory), files, worker_flags=flags) as running:
        yield running


def undecided(model: Any, adapter: str | None, prompt: Sequence[int], ids: Sequence[int]) -> int:
    """Check that each id is the best after those before it, as in `generate`; count those that no margin decides."""
    import torch

    if adapter is not None:
        model.set_adapter(adapter)
    with contextlib.nullcontext() if adapter else model.disable_adapter(), torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    margins = best.values[:, 0] - best.values[:, 1]
    close = margins < MARGIN
    wrong = (best.indices[:, 0] != torch.tensor(list(ids))) & ~close
    assert not wrong.any(), f"{adapter}: {list(ids)} differs at {wrong.nonzero().flatten().tolist()}"
    return int(close.sum())


async def test_every_answer_is_that_of_transformers_and_peft(
    cluster: Cluster, tokenizer: Any, peft_model: Any, adapters: dict[str, Path]
) -> None:
    names = (*adapters, None)
    asked = [(chat, name) for chat in chats(CHATS) for name in names]

    async def ask(chat: list[dict[str, str]], name: str | None) -> Generation:
        return await cluster.client.chat(chat, adapter_id=name, max_tokens=TOKENS, temperature=0.0)

    answers = await asyncio.gather(*(ask(*pair) for pair in asked))
    close = 0
    for (chat, name), answer in zip(asked, answers, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.finish_reason == "end" or len(answer.token_ids) == TOKENS
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        close += undecided(peft_model, name, prompt, answer.token_ids)
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{len(answers)} answers, {tokens} tokens, {close} of them undecided")
    assert close <= tokens // 100
    # Answers of different adapters to one chat differ, or the comparison would show little.
    assert sum(len({answers[at + i].text for i in range(4)}) >= 3 for at in range(0, len(answers), 4)) > CHATS // 2


async def test_a_chat_is_rendered_as_its_template_says(cluster: Cluster, tokenizer: Any) -> None:
    for chat in chats(CHATS):
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert await cluster.client.tokenize(messages=chat) == tuple(expected)


async def test_a_stop_string_cuts_the_answer_before_it(cluster: Cluster) -> None:
    chat = [{"role": "user", "content": "Write two sentences about the sea."}]
    whole = await cluster.client.chat(chat, max_tokens=TOKENS * 2, temperature=0.0)
    words = whole.text.split(" ")
    # Cut in the middle of tokens, because a stop string is searched in the text.
    stop = " ".join(words[2:5])[1:-1]
    cut = await cluster.client.chat(chat, max_tokens=TOKENS * 2, temperature=0.0, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.choices[0].stop == stop


async def test_characters_of_several_tokens_arrive_whole(cluster: Cluster) -> None:
    text = "Repeat exactly: 🌙🦊 漢字かな ñandú Ελλάδα"
    stream = cluster.client.chat_stream(
        [{"role": "user", "content": text}], max_tokens=TOKENS, temperature=0.0, regex="🌙🦊 漢字かな ñandú Ελλάδα"
    )
    pieces = [piece.text async for piece in stream]
    assert "".join(pieces) == "🌙🦊 漢字かな ñandú Ελλάδα"[: len("".join(pieces))]
    assert "�" not in "".join(pieces)
    assert len("".join(pieces)) >= 2


async def test_an_adapters_template_renders_tools(cluster: Cluster, tokenizer: Any) -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Berlin?"}]
    expected = tokenizer.apply_chat_template(
        chat, tools=[WEATHER], chat_template=TOOL_TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    answer = await cluster.client.chat(
        chat, adapter_id="tools", tools=[WEATHER], tool_choice="required", max_tokens=60, temperature=0.0
    )
    assert answer.usage.prompt_tokens == len(expected)
    call = answer.choices[0].tool_calls[0]
    assert (call.name, list(call.parsed)) == ("weather", ["city"])
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})}
    follow_up = await cluster.client.chat(
        [*chat, answer.message, result], adapter_id="tools", tools=[WEATHER], max_tokens=8
    )
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": call.parsed}}]}
    expected = tokenizer.apply_chat_template(
        [*chat, called, result],
        tools=[WEATHER],
        chat_template=TOOL_TEMPLATE,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert follow_up.usage.prompt_tokens == len(expected)


async def test_an_answer_goes_on_after_its_worker_was_killed(cluster: Cluster) -> None:
    chat = [{"role": "user", "content": "Tell me a long story about a fox and the moon."}]
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    undisturbed = await cluster.client.chat(chat, **options)
    stream = cluster.client.chat_stream(chat, **options)
    ids: list[int] = []
    async for piece in stream:
        ids += piece.token_ids
        if len(ids) >= 5 and "worker-1" not in cluster.local._expected_to_end:
            cluster.local.kill("worker-1")
            await cluster.local.start_worker()
    assert tuple(ids) == undisturbed.token_ids
