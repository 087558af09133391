"""Templates that open reasoning, with every kind of format, in every protocol: reasoning first, then the format.

The model is random, with a liking for the tokens that end things: its answers are short, whatever their seeds.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
import pytest_asyncio
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc
from tokenizers import AddedToken, Tokenizer

from loraplex.runtime.rpc.settings import is_installed
from loraplex_client import AsyncClient
from tests.drawn_schemas import byte_tokenizer
from tests.e2e.conftest import TENANT, running_cluster

if TYPE_CHECKING:  # imported by the tests that need it: it takes seconds
    import anthropic

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

# Ids of the byte tokenizer, behind which the marks are.
BYTES = 300
# Whether each mark is a special token, as in the models that have it.
MARKS = {"<think>": False, "</think>": False, "[THINK]": True, "[/THINK]": True,
         "<tool_call>": False, "</tool_call>": False, "[TOOL_CALLS]": True}  # fmt: skip
MESSAGES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TEMPLATES = {
    "hermes": MESSAGES + "<a><think>\n{# </think> <tool_call> #}",
    "mistral": MESSAGES + "<a>[THINK]{# [/THINK] [TOOL_CALLS] #}",
    "llama3": MESSAGES + '<a><think>{# </think> <|start_header_id|> "parameters" #}',
    "qwen3_coder": MESSAGES + "<a><think>\n{# </think> <tool_call> <function= <parameter= #}",
    # The adapter's own formats.
    "own": MESSAGES + "<a>(hm ",
    # Opens no block; the model may.
    "optional": MESSAGES
    + "<a>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{# <think> </think> <tool_call> #}",
}
OWN_FORMATS = {
    "tool_calls": {"opens": ["{{"], "closes": "}}", "call": ["call ", " with ", ""]},
    "reasoning": {"opens": "(hm ", "closes": "</think>"},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
LARK = 'start: "(" start ")" | WORD\nWORD: /[a-z]{1,5}/'
TEXTS = {"regex": "[a-f]{4,12}", "choices": "yes|no", "grammar": r"\(*[a-z]{1,5}\)*"}
TOOL: dict[str, Any] = {"name": "look", "description": "Look.", "parameters": SCHEMA}


@dataclass
class Found:
    """The text of an answer, its reasoning, and the arguments of its calls."""

    text: str = ""
    reasoning: str = ""
    arguments: list[str] = field(default_factory=list)

    def add_arguments(self, index: int, text: str) -> None:
        self.arguments += [""] * (index + 1 - len(self.arguments))
        self.arguments[index] += text


def check(found: Found, kind: str) -> None:
    assert "think" not in found.text.lower()
    if kind == "either":
        kind = "tools" if found.arguments else "json_schema"
    if kind == "tools":
        assert found.text == ""
        for arguments in found.arguments:
            jsonschema.validate(json.loads(arguments), SCHEMA)
        assert found.arguments
    elif kind == "json_schema":
        jsonschema.validate(json.loads(found.text), SCHEMA)
    elif kind == "json_object":
        assert isinstance(json.loads(found.text), dict)
    else:
        assert re.fullmatch(
            {"regex": "[a-f]{4,12}", "choices": "yes|no", "grammar": r"\(*[a-z]{1,5}\)*"}[kind], found.text
        )


def write_model(directory: Path) -> Path:
    """Write a tiny Llama whose logits are small but for a few tokens, with which texts end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_str(byte_tokenizer(BYTES))
    for mark, special in MARKS.items():
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken(mark, special=special)])
    config = LlamaConfig(
        vocab_size=BYTES + len(MARKS), hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    # A direction that every hidden state has, for logits of the tokens themselves.
    model.model.embed_tokens.weight.data[:, 0] = 100.0
    model.lm_head.weight.data[:, 0] = 0.0
    for token in ("</think>", "[/THINK]", "<think>", '"', "}", "]"):
        model.lm_head.weight.data[tokenizer.token_to_id(token), 0] = 0.4
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    return directory


def write_adapter(directory: Path, template: str, chat: Any) -> Path:
    """Write an adapter with a template of its own."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"],
              "loraplex_chat": chat}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(1, 64) / 100, name.format("B"): torch.ones(64, 1) / 100}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@dataclass(frozen=True)
class Clients:
    """A client of each protocol."""

    own: AsyncClient
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    router: str
    tokenizer: Any


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    import anthropic

    directory = tmp_path_factory.mktemp("reasoning")
    model = write_model(directory / "model")
    adapters = {
        name: write_adapter(directory / "adapters" / name, source, OWN_FORMATS if name == "own" else {})
        for name, source in TEMPLATES.items()
    }
    protocol = ("--engine-protocol", "sglang", "--engine-tenant", TENANT, "--engine-adapter", "hermes")
    router_flags = protocol if is_installed("smg_grpc_proto") else ()
    flags = ("--dtype", "float32", "--threads", "1", "--rows", "32", "--kv-blocks", "2048")
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_cluster(
                directory / "cluster", str(model), adapters, worker_flags=flags, http=True, router_flags=router_flags
            )
        )
        url, headers = f"http://{running.local.http}", {"x-loraplex-tenant": TENANT}
        of_openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers, max_retries=0)
        of_anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", default_headers=headers, max_retries=0)
        yield Clients(
            running.client,
            await stack.enter_async_context(of_openai),
            await stack.enter_async_context(of_anthropic),
            running.local.router,
            Tokenizer.from_file(str(model / "tokenizer.json")),
        )


Ask = Callable[..., Awaitable[Found]]
# Options of the own protocol by the kind of format.
OWN: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "json_object": {"json_schema": '{"type": "object"}'},
    "regex": {"regex": "[a-f]{4,12}"},
    "choices": {"choices": ["yes", "no"]},
    "grammar": {"grammar": LARK},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "either": {"tools": [TOOL], "json_schema": json.dumps(SCHEMA)},
}
FUNCTION: dict[str, Any] = {"type": "function", "function": TOOL}
CHAT: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"extra_body": {"structured_outputs": {"regex": TEXTS["regex"]}}},
    "choices": {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": LARK}}},
    "tools": {"tools": [FUNCTION], "tool_choice": "required"},
    "either": {
        "tools": [FUNCTION],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
}
MESSAGE: dict[str, dict[str, Any]] = {
    "json_schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "tools": {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    "either": {
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
RESPONSE: dict[str, dict[str, Any]] = {
    "json_schema": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "json_object": {"text": {"format": {"type": "json_object"}}},
    "tools": {"tools": [{"type": "function", "strict": True, **TOOL}], "tool_choice": "required"},
    "either": {
        "tools": [{"type": "function", "strict": True, **TOOL}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    },
}
SAID: Any = [{"role": "user", "content": "Go"}]


async def ask_own(clients: Clients, template: str, kind: str, *, stream: bool, seed: int, **more: Any) -> Found:
    options = {"adapter_id": template, "max_tokens": 2000, "temperature": 1.0, "seed": seed, **OWN[kind], **more}
    if not stream:
        whole = await clients.own.chat(SAID, **options)
        return Found(whole.text, whole.reasoning, [call.arguments for call in whole.tool_calls])
    found = Found()
    async for piece in clients.own.chat_stream(SAID, **options):
        found.text += piece.text
        found.reasoning += piece.reasoning
        for part in piece.tool_calls:
            found.add_arguments(part.index, part.arguments)
    return found


async def ask_chat(clients: Clients, template: str, kind: str, *, stream: bool, seed: int) -> Found:
    options: Any = {"model": template, "messages": SAID, "max_tokens": 2000, "seed": seed, **CHAT[kind]}
    create: Any = clients.openai.chat.completions.create
    if not stream:
        message = (await create(**options)).choices[0].message
        calls = [call.function.arguments for call in message.tool_calls or ()]
        return Found(message.content or "", (message.model_extra or {}).get("reasoning_content") or "", calls)
    found = Found()
    async for chunk in await create(**options, stream=True):
        for choice in chunk.choices:
            found.text += choice.delta.content or ""
            found.reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            for part in choice.delta.tool_calls or ():
                found.add_arguments(part.index, part.function.arguments or "")
    return found


async def ask_message(clients: Clients, template: str, kind: str, *, stream: bool, seed: int) -> Found:
    options: Any = {"model": template, "messages": SAID, "max_tokens": 2000, **MESSAGE[kind]}
    if stream:
        async with clients.anthropic.messages.stream(**options) as events:
            message = await events.get_final_message()
    else:
        message = await clients.anthropic.messages.create(**options)
    found = Found()
    for block in message.content:
        found.text += getattr(block, "text", "")
        found.reasoning += getattr(block, "thinking", "")
        found.arguments += [json.dumps(block.input)] if block.type == "tool_use" else []
    return found


async def ask_response(clients: Clients, template: str, kind: str, *, stream: bool, seed: int) -> Found:
    options: Any = {"model": template, "input": "Go", "max_output_tokens": 2000, "temperature": 1.0, **RESPONSE[kind]}
    if stream:
        events = [event async for event in await clients.openai.responses.create(**options, stream=True)]
        response = events[-1].response
    else:
        response = await clients.openai.responses.create(**options)
    found = Found(response.output_text)
    for item in response.output:
        if item.type == "reasoning":
            found.reasoning += "".join(part.text for part in item.content or ())
        found.arguments += [item.arguments] if item.type == "function_call" else []
    return found


PROTOCOLS: dict[str, tuple[Ask, dict[str, dict[str, Any]]]] = {
    "own": (ask_own, OWN),
    "chat": (ask_chat, CHAT),
    "messages": (ask_message, MESSAGE),
    "responses": (ask_response, RESPONSE),
}


# Pairs of `make test`: every template and every protocol.
OFTEN = {
    ("hermes", "own"),
    ("optional", "own"),
    ("qwen3_coder", "own"),
    ("own", "chat"),
    ("mistral", "chat"),
    ("llama3", "messages"),
    ("hermes", "responses"),
}


@pytest.mark.parametrize(
    ("template", "protocol"),
    [
        pair if pair in OFTEN else pytest.param(*pair, marks=pytest.mark.nightly)
        for pair in product(TEMPLATES, PROTOCOLS)
    ],
)
async def test_reasoning_comes_first_and_then_the_format(clients: Clients, template: str, protocol: str) -> None:
    ask, kinds = PROTOCOLS[protocol]
    cases = [(kind, stream, seed) for kind in kinds for stream in (False, True) for seed in range(3)]
    answers = await asyncio.gather(
        *(ask(clients, template, kind, stream=stream, seed=seed) for kind, stream, seed in cases)
    )
    for (kind, stream, seed), found in zip(cases, answers, strict=True):
        print(kind, stream, seed, found)
        check(found, kind)
    assert any(found.reasoning for found in answers)
    if template == "optional" and protocol == "own":  # which takes seeds, and formats with many beginnings
        assert not all(found.reasoning for found in answers)


@pytest.mark.skipif(not is_installed("smg_grpc_proto"), reason="the engine protocol's package is not installed")
async def test_a_constraint_of_the_engine_protocol_begins_behind_the_reasoning(clients: Clients) -> None:
    from smg_grpc_proto import sglang_scheduler_pb2_grpc

    from tests.e2e.gateway.engine_calls import answers, asked

    end = clients.tokenizer.token_to_id("</think>")
    async with grpc.aio.insecure_channel(clients.router) as channel:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
        params = {"temperature": 1.0, "n": 4, "json_schema": json.dumps(SCHEMA)}
        found = await answers(stub, asked(2000, params=params, require_reasoning=True))
    for choice in found:
        ids = list(choice.output_ids)
        assert ids.count(end) == 1
        text = clients.tokenizer.decode(ids[ids.index(end) + 1 :])
        check(Found(text.lstrip("\n")), "json_schema")
    assert any(choice.reasoning_tokens for choice in found)


@pytest.mark.parametrize("template", ["hermes", pytest.param("mistral", marks=pytest.mark.nightly)])
async def test_a_budget_ends_reasoning_and_the_answer_begins(clients: Clients, template: str) -> None:
    """With no liking for the mark, each answer reasons for exactly its budget, a resumed one too."""
    mark = "[/THINK]" if template == "mistral" else "</think>"
    end, last = (clients.tokenizer.token_to_id(one) for one in (mark, "e"))
    # The mark comes where nothing else may.
    options: dict[str, Any] = {
        "adapter_id": template, "max_tokens": 600, "temperature": 1.0, "logit_bias": {end: -100.0, last: 2.0}
    }  # fmt: skip

    async def ask(budget: int, seed: int, kind: str) -> None:
        found = await clients.own.chat(
            SAID, thinking_token_budget=budget, seed=seed, **options, **(OWN[kind] if kind else {})
        )
        ids = found.choices[0].token_ids
        assert (ids.index(end) if end in ids else -1) == budget
        if kind:
            check(Found(found.text, found.reasoning, [call.arguments for call in found.tool_calls]), kind)

    kinds = ["", "regex", "json_schema", "choices", "tools"]
    cases = [(budget, seed, kind) for budget in (0, 10, 200) for seed, kind in enumerate(kinds)]
    await asyncio.gather(*(ask(*case) for case in [*cases, (-1, 1, "")]))
    whole = await clients.own.chat(SAID, thinking_token_budget=10, seed=3, **options, **OWN["regex"])
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Go")], thinking_token_budget=10)
    spec = pb.GenerateSpec(
        adapter=template, chat=chat, regex=TEXTS["regex"], stopping=pb.Stopping(max_tokens=600),
        sampling=pb.Sampling(temperature=1.0, seed=3, logit_bias={end: -100.0, last: 2.0}),
    )  # fmt: skip
    metadata = (("x-loraplex-tenant", TENANT),)
    async with grpc.aio.insecure_channel(clients.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(spec=spec), metadata=metadata)
        token, received = "", list[int]()
        async for response in call:
            token = token or response.event.resume_token
            received += response.event.delta.token_ids
            if len(received) >= 5:
                call.cancel()
                break
        told = pb.ReceivedTokens(choice=0, token_ids=received)
        resumed = stub.Resume(pb.ResumeRequest(spec=spec, resume_token=token, received=[told]), metadata=metadata)
        received += [one async for response in resumed for one in response.event.delta.token_ids]
    assert tuple(received) == whole.choices[0].token_ids


async def test_max_tokens_in_reasoning_leaves_no_text(clients: Clients) -> None:
    """Stop strings are not looked for in reasoning, so they do not end the answer sooner."""
    found = await clients.own.chat(
        SAID, adapter_id="hermes", max_tokens=2, logit_bias={clients.tokenizer.token_to_id("</think>"): -100.0},
        temperature=1.0, seed=1, **OWN["json_schema"],
    )  # fmt: skip
    assert (found.text, found.finish_reason) == ("", "length")
    stopped = await ask_own(clients, "hermes", "regex", stream=False, seed=1, stop=[*"abcdef\n}]"])
    assert stopped.reasoning
    assert len(stopped.text) == 0
