"""The hook of a router against a real service: its settings, what it is asked, and one that is away."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from loraplex.content_hooks.hook import PART_CHARACTERS, Hook, HookCheck, read_hook
from loraplex.contracts.options import FinishReason
from loraplex.hooks.v1 import hooks_pb2 as pb
from loraplex.hooks.v1 import hooks_pb2_grpc
from loraplex.router.metrics import RouterMetrics
from loraplex.router.request import (
    Chat,
    ChatMessage,
    Delta,
    EncodeRequest,
    Event,
    Finished,
    Received,
    Request,
    TextPair,
    Tool,
    ToolCall,
    ToolCallDelta,
    WeightedAdapter,
)
from loraplex.router.settings import RouterSettings
from loraplex.router.text.tokenizer import HashTokenizer
from loraplex.runtime.rpc.errors import InvalidField, Unavailable
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, set_caller
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.audit_log import AuditLog
from loraplex.runtime.tenancy.auditor import CALLER_LIMIT, Auditor
from tests.content_hook import REASON, ContentHook, serving_hook
from tests.credentials_files import tls_files, write_tls_files

MODELS: Any = SimpleNamespace(
    get=lambda name: SimpleNamespace(manifest=SimpleNamespace(name=name or "tiny"), tokenizer=HashTokenizer())
)
REQUEST = Request("acme", "Hello", "prompt", request_id="r1", adapter="support")


@pytest.fixture
async def service() -> AsyncIterator[ContentHook]:
    async with serving_hook() as hook:
        yield hook


def auditor_of(path: str = "") -> Auditor:
    """An auditor that keeps records in a file, or nowhere."""
    return Auditor(AuditLog(path, "router", RouterMetrics().audit))


def hook_of(service: ContentHook, options: str = "", auditor: Auditor | None = None) -> Hook:
    settings = read_hook(f"grpc://{service.address}{options}", None)
    return Hook(settings, MODELS, RouterMetrics(), auditor or auditor_of())


def counts(hook: Hook) -> dict[tuple[str, str], float]:
    samples = [sample for family in hook._metrics.content_checks.collect() for sample in family.samples]
    return {
        (sample.labels["of"], sample.labels["result"]): sample.value
        for sample in samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("guard:9000", "write grpc://HOST:PORT or grpcs://HOST:PORT"),
        ("http://guard:9000", "write grpc://HOST:PORT"),
        ("grpc://guard", "write grpc://HOST:PORT"),
        ("grpc://guard:70000", "Port out of range"),
        ("grpc://user:secret@guard:9000", "write grpc://HOST:PORT"),
        ("grpc://guard:9000/path", "write grpc://HOST:PORT"),
        ("grpc://guard:9000?retries=3", "retries is not one of timeout_ms, fail, check, cert, key, ca"),
        ("grpc://guard:9000?fail", "bad query field"),
        ("grpc://guard:9000?fail=open&fail=closed", "an option is given twice"),
        ("grpc://guard:9000?fail=maybe", "fail=maybe is not open or closed"),
        ("grpc://guard:9000?check=", "check= is not prompts, answers or both with a comma"),
        ("grpc://guard:9000?timeout_ms=0", "timeout_ms=0 is not a whole number from 1 to 60000"),
        ("grpc://guard:9000?timeout_ms=1e3", "timeout_ms=1e3 is not a whole number"),
        ("grpc://guard:9000?ca=ca.pem", "cert, key and ca are for grpcs://"),
        ("grpcs://guard:9000", "grpcs:// needs cert, key and ca, or the router's own of --tls-cert"),
        ("grpcs://guard:9000?ca=ca.pem", "give cert, key and ca, or none of them"),
    ],
)
def test_a_url_that_contradicts_itself_stops_the_start_with_one_line(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^--content-hook ") as refused:
        RouterSettings(store="127.0.0.1:1", redis_url="redis://127.0.0.1:1", content_hook=url)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_prompts_do_not_leave_in_clear_where_credentials_are_on(tmp_path: Path) -> None:
    own = Mock(spec=TlsFiles)
    with pytest.raises(ValueError, match="prompts would leave this machine in clear"):
        read_hook("grpc://guard:9000", own)
    assert read_hook("grpc://127.0.0.1:9000", own).tls is None
    assert read_hook("grpcs://guard:9000?fail=open&timeout_ms=20&check=answers", own).tls is own


async def test_a_hook_is_asked_for_all_texts_of_a_prompt(service: ContentHook) -> None:
    hook = hook_of(service)
    call = ToolCall("c", "search", '{"q": 1}')
    messages = ChatMessage("system", "Be kind"), ChatMessage("assistant", parts=("a", "b"), tool_calls=(call,))
    chat = Chat(messages, tools=(Tool("search", "Finds", "{}"),), template_args='{"x": 1}')
    weighted = (WeightedAdapter("a", 1), WeightedAdapter("b", 2))
    await hook.check_prompt(REQUEST, ["more", (72, 105)])
    await hook.check_prompt(replace(REQUEST, prompt=chat, adapter="", adapters=weighted, model="large"))
    await hook.check_prompt(EncodeRequest("acme", "embed", ("one", TextPair("two", "three"), (72,)), ("a", "b", "c")))
    first, second, third = service.prompts
    assert list(first.texts) == ["Hello", "more", "Hi"]
    assert first.call == pb.CheckedCall(tenant="acme", request_id="r1", model="tiny", adapters=["support"])
    assert [(one.role, one.text) for one in second.messages] == [
        ("system", "Be kind"),
        ("assistant", 'a\nb\nsearch {"q": 1}'),
    ]
    assert list(second.texts) == ["search Finds {}", '{"x": 1}']
    assert (second.call.model, list(second.call.adapters)) == ("large", ["a", "b"])
    assert list(third.texts) == ["one", "two", "three", "H"]
    service.word = "Hello"
    with pytest.raises(InvalidField, match=f"^prompt: {REASON}$") as refused:
        await hook.check_prompt(REQUEST)
    assert refused.value.reason == "CONTENT_REFUSED"
    assert counts(hook) == {("prompts", "allowed"): 3, ("prompts", "refused"): 1}
    await hook_of(service, "?check=answers").check_prompt(REQUEST)
    await hook.close()


@pytest.mark.parametrize("fault", ["hangs", "says nothing", "is not there"])
async def test_a_hook_that_is_away_lets_all_pass_or_nothing(
    service: ContentHook, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = "timeout_ms=50" if fault == "hangs" else "timeout_ms=20000"
    opens, closes = hook_of(service, f"?fail=open&{options}"), hook_of(service, f"?{options}")
    if fault == "hangs":
        service.goes_on.clear()
    elif fault == "says nothing":
        service.decision = pb.DECISION_UNSPECIFIED
    else:
        for hook in (opens, closes):
            hook._channel._address = "127.0.0.1:1"
            hook._channel._open()
    for _ in range(2):
        await opens.check_prompt(REQUEST)
        with pytest.raises(Unavailable, match="the content hook does not answer") as away:
            await closes.check_prompt(REQUEST)
        assert away.value.reason == "CONTENT_HOOK_AWAY"
    assert counts(opens) == counts(closes) == {("prompts", "away"): 2}
    assert sum("is away" in record.message for record in caplog.records) == 2  # once for each router
    assert not any("Hello" in record.message for record in caplog.records)
    await asyncio.gather(opens.close(), closes.close())


class Reader:
    """A call that reads an answer, checked by a hook; `ended` has the choices that were refused."""

    def __init__(self, hook: Hook, received: dict[int, Received] | None = None) -> None:
        self.ended: list[int] = []
        run: Any = SimpleNamespace(request=REQUEST, job=SimpleNamespace(model="tiny"), tokenizer=HashTokenizer())
        answer: Any = SimpleNamespace(refuse=self.ended.append)
        check = hook.answer_check(run, answer, received)
        assert check is not None
        self.check: HookCheck = check

    async def read(self, *events: Event) -> list[Event]:
        return await self.check.passed(events)


def words(first: int, last: int, choice: int = 0) -> list[Delta]:
    """Tokens of five characters."""
    return [Delta(at, (at,), f"w{at:03} ", choice) for at in range(first, last)]


PER_PART = PART_CHARACTERS // 5
END = Finished(FinishReason.END)


async def test_parts_end_at_the_same_places_in_a_resumed_answer(service: ContentHook) -> None:
    hook = hook_of(service)
    reader = Reader(hook)
    whole = words(0, 2 * PER_PART + 10)
    assert await reader.read(*whole[: PER_PART - 1]) == []
    assert await reader.read(whole[PER_PART - 1]) == whole[:PER_PART]
    assert await reader.read(*whole[PER_PART:-10]) == whole[PER_PART:-10]
    assert await reader.read(*whole[-10:]) == []
    assert await reader.read(Delta(90, (2,), ""), END) == [*whole[-10:], Delta(90, (2,), ""), END]
    parts = service.parts
    assert "".join(part.text for part in parts) == "".join(delta.text for delta in whole)
    assert [(part.offset, part.last) for part in parts] == [(0, False), (200, False), (400, True)]
    assert [part.before for part in parts] == ["", parts[0].text, parts[0].text + parts[1].text]
    service.parts = []
    # Its client had the first part, and three tokens more.
    had = "".join(delta.text for delta in whole[: PER_PART + 3])
    again = Reader(hook, {0: Received(tuple(had.encode()))})
    assert await again.read(*whole[PER_PART + 3 : 2 * PER_PART - 1]) == []
    assert len(await again.read(whole[2 * PER_PART - 1])) == PER_PART - 3
    (part,) = service.parts
    assert (part.offset, part.before, part.text) == (215, had, parts[1].text[15:])
    await hook.close()


async def test_a_refused_choice_ends_and_others_go_on(service: ContentHook) -> None:
    service.word = f"w{PER_PART + 2:03}"
    hook = hook_of(service)
    reader = Reader(hook)
    both = [
        delta
        for pair in zip(words(0, 2 * PER_PART, 0), words(100, 100 + 2 * PER_PART, 1), strict=True)
        for delta in pair
    ]
    passed = await reader.read(*both[: 2 * PER_PART])
    assert len(passed) == 2 * PER_PART
    later = await reader.read(*both[2 * PER_PART :])
    refused = Finished(FinishReason.CONTENT_FILTER, choice=0, refusal=REASON)
    assert later[0] == refused
    assert {event.choice for event in later[1:] if isinstance(event, Delta)} == {1}
    assert reader.ended == [0]
    assert await reader.read(*words(80, 200), replace(END, choice=0)) == []
    assert await reader.read(replace(END, choice=1)) == [replace(END, choice=1)]
    assert counts(hook) == {("answers", "allowed"): 3, ("answers", "refused"): 1}
    await hook.close()


async def test_reasoning_and_calls_of_tools_are_checked_too(service: ContentHook) -> None:
    hook = hook_of(service)
    call = ToolCallDelta(0, "id", "search", "{}")
    first = Delta(0, (1,), "", reasoning="Let me")
    events = list[Event]([first, Delta(1, (2,), "", tool_calls=(call,)), Delta(2, (3,), "ok"), END])
    assert await Reader(hook).read(*events) == events
    (part,) = service.parts
    assert (part.text, part.reasoning, part.tool_calls) == ("ok", "Let me", "search{}")
    service.word = "Let"
    assert await Reader(hook).read(*events) == [Finished(FinishReason.CONTENT_FILTER, refusal=REASON)]
    await hook.close()


async def test_the_audit_log_has_refusals_with_their_callers_and_without_texts(
    service: ContentHook, tmp_path: Path
) -> None:
    service.word = "w0"
    auditor = auditor_of(str(tmp_path / "audit.jsonl"))
    hook = hook_of(service, auditor=auditor)
    set_caller(Principal("key k1", frozenset({Role.TENANT_USER}), CredentialKind.API_KEY, "acme", "k1"))
    for _ in range(CALLER_LIMIT):
        with pytest.raises(InvalidField):
            await hook.check_prompt(replace(REQUEST, prompt="w0 secret"))
    await Reader(hook).read(*words(0, PER_PART))
    await hook.close()
    auditor.close()
    records = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    refused = {
        "event": "refused", "reason": "CONTENT_REFUSED", "method": "ContentHookService/CheckPrompt", "caller": "key k1",
        "tenant": "acme", "key": "k1", "request": "r1", "model": "tiny", "adapters": ["support"],
    }  # fmt: skip
    assert {name: records[1][name] for name in refused} == refused
    assert [record["event"] for record in records] == [
        "started",
        *["refused"] * CALLER_LIMIT,
        "refused more",
        "stopped",
    ]
    assert records[-2]["reasons"] == {"CONTENT_REFUSED": 1}  # of the answer
    assert "secret" not in (tmp_path / "audit.jsonl").read_text()


async def test_a_hook_that_hangs_in_an_answer_ends_it_unchecked_text_stays(service: ContentHook) -> None:
    service.goes_on.clear()
    closes, opens = hook_of(service, "?timeout_ms=30"), hook_of(service, "?timeout_ms=30&fail=open")
    with pytest.raises(Unavailable, match="does not answer"):
        await Reader(closes).read(*words(0, PER_PART))
    assert await Reader(opens).read(*words(0, PER_PART)) == words(0, PER_PART)
    await asyncio.gather(closes.close(), opens.close())


async def test_the_example_guards_and_takes_certificates(tmp_path: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "content_hook.py"))
    server, guards = grpc.aio.server(), tls_files(tmp_path, "loraplex://router/guard")
    hooks_pb2_grpc.add_ContentHookServiceServicer_to_server(example["Guard"](), server)
    port = server.add_secure_port("127.0.0.1:0", guards.server_credentials(client_certificates=True))
    await server.start()
    cert, key, ca = write_tls_files(tmp_path, "loraplex://router/r1")
    own = Hook(
        read_hook(f"grpcs://127.0.0.1:{port}?cert={cert}&key={key}&ca={ca}", None),
        MODELS,
        RouterMetrics(),
        auditor_of(),
    )
    hook = Hook(read_hook(f"grpcs://127.0.0.1:{port}", TlsFiles(cert, key, ca)), MODELS, RouterMetrics(), auditor_of())
    await own.check_prompt(REQUEST)
    with pytest.raises(InvalidField, match="no passwords, please"):
        await hook.check_prompt(replace(REQUEST, prompt="Tell me the Password"))
    refused = Finished(FinishReason.CONTENT_FILTER, refusal="no passwords, please")
    assert await Reader(hook).read(Delta(0, (1,), "The password is"), END) == [refused]
    assert await Reader(hook).read(Delta(0, (1,), "No"), END) == [Delta(0, (1,), "No"), END]
    plain = Hook(read_hook(f"grpc://127.0.0.1:{port}", None), MODELS, RouterMetrics(), auditor_of())
    with pytest.raises(Unavailable):
        await plain.check_prompt(REQUEST)
    await asyncio.gather(own.close(), hook.close(), plain.close())
    await server.stop(0)
