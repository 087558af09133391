"""Asks a content hook: of a prompt before anything is reserved or queued, of an answer before its client gets it.

    events ──▶ held, by choice ──a part is full, or the choice ends──▶ CheckAnswer ──▶ events, or the choice's end

A part ends with the first event behind a multiple of PART_CHARACTERS of the choice's text, also in a resumed answer.
Nothing is delivered unchecked, nor are its token ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import grpc

from loraplex.contracts.options import FinishReason
from loraplex.hooks.v1 import hooks_pb2 as pb
from loraplex.hooks.v1 import hooks_pb2_grpc
from loraplex.router.catalog.models import Models
from loraplex.router.generation.answer import Answer
from loraplex.router.generation.run import Run
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
)
from loraplex.runtime.rpc.errors import InvalidField, Unavailable
from loraplex.runtime.rpc.principal import calling_key, known_caller
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.rpc.tls import LiveChannel, TlsFiles, tls_of
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.tenancy.auditor import Auditor
from loraplex.runtime.tenancy.guard import is_loopback

log = logging.getLogger(__name__)

# Characters of an answer that are held until they are checked: about two sentences, which a classifier can judge and
# whose wait a reader bears. A token without text counts as one.
PART_CHARACTERS = 200
# Maximum characters of a choice's earlier text that a check has as context.
BEFORE_CHARACTERS = 1_000
# Maximum characters of a reason, which a status must have room for.
REASON_CHARACTERS = 300
# Default of the timeout in ms of one check, and its maximum: a client waits for it.
TIMEOUT_MS, MOST_TIMEOUT_MS = 500, 60_000
PROMPTS, ANSWERS = "prompts", "answers"
_OPEN, _CLOSED = "open", "closed"
_SERVICE, _REFUSED = pb.DESCRIPTOR.services_by_name["ContentHookService"].full_name, "CONTENT_REFUSED"
_FILES = ("cert", "key", "ca")
# The results of checks by decision, as metrics have them; others: the hook is away.
_RESULTS = {pb.DECISION_ALLOW: "allowed", pb.DECISION_REFUSE: "refused"}


@dataclass(frozen=True, slots=True)
class HookSettings:
    """Settings of the URL in --content-hook. `tls`: the files of grpcs://; None: no TLS."""

    address: str
    tls: TlsFiles | None
    timeout_s: float
    fails_open: bool
    checks: frozenset[str]


def read_hook(text: str, own: TlsFiles | None) -> HookSettings:
    """Return the settings in a hook's URL; `own`: the router's certificate. Raises ValueError."""
    try:
        url = urlsplit(text)
        if url.scheme not in {"grpc", "grpcs"} or not url.hostname or not url.port or url.username or url.path:
            raise ValueError("write grpc://HOST:PORT or grpcs://HOST:PORT")
        given = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
        options = dict(given)
        if unknown := options.keys() - {"timeout_ms", "fail", "check", *_FILES}:
            raise ValueError(f"{min(unknown)} is not one of timeout_ms, fail, check, {', '.join(_FILES)}")
        if len(options) < len(given):
            raise ValueError("an option is given twice")
        if (fail := options.get("fail", _CLOSED)) not in {_OPEN, _CLOSED}:
            raise ValueError(f"fail={fail} is not open or closed")
        checks = frozenset(options.get("check", f"{PROMPTS},{ANSWERS}").split(","))
        if not checks <= {PROMPTS, ANSWERS}:
            raise ValueError(f"check={options['check']} is not {PROMPTS}, {ANSWERS} or both with a comma")
        timeout = options.get("timeout_ms", str(TIMEOUT_MS))
        if not (timeout.isascii() and timeout.isdigit() and 1 <= int(timeout) <= MOST_TIMEOUT_MS):
            raise ValueError(f"timeout_ms={timeout} is not a whole number from 1 to {MOST_TIMEOUT_MS}")
        return HookSettings(url.netloc, _tls(url, options, own), int(timeout) / 1e3, fail == _OPEN, checks)
    except ValueError as error:
        raise ValueError(f"--content-hook {text}: {error}") from error


def _tls(url: SplitResult, options: Mapping[str, str], own: TlsFiles | None) -> TlsFiles | None:
    files = [options.get(name, "") for name in _FILES]
    if url.scheme == "grpc":
        if any(files):
            raise ValueError("cert, key and ca are for grpcs://")
        if own is not None and not is_loopback(url.hostname or ""):
            raise ValueError("prompts would leave this machine in clear, while --tls-cert is set; write grpcs://")
        return None
    if any(files) and not all(files):
        raise ValueError("give cert, key and ca, or none of them for the router's own")
    if (tls := tls_of(*files) or own) is None:
        raise ValueError("grpcs:// needs cert, key and ca, or the router's own of --tls-cert")
    return tls


class Hook:
    """Asks the hook, each time within the timeout, and tells logs of refusals without their texts."""

    def __init__(self, settings: HookSettings, models: Models, metrics: RouterMetrics, auditor: Auditor) -> None:
        self.settings, self._models, self._metrics, self._auditor = settings, models, metrics, auditor
        self._channel = LiveChannel(settings.address, settings.tls, channel_options())
        self._log_once = LogOnce(log)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def check_prompt(self, request: Request | EncodeRequest, continuations: Sequence[Any] = ()) -> None:
        """Raise InvalidField where the hook refuses a call's prompt, Unavailable where it is away and that refuses."""
        if PROMPTS not in self.settings.checks:
            return
        model = self._models.get(request.model).manifest.name
        asked = pb.CheckPromptRequest(call=checked_call(request, model))
        if isinstance(request, EncodeRequest):
            field, prompts = "inputs", list[Any](request.inputs)
        else:
            field, prompts = request.prompt_field, [request.prompt]
        for prompt in (*prompts, *continuations):
            self._add(asked, prompt, model)
        refusal = await self._ask(PROMPTS, "CheckPrompt", asked)
        if refusal is not None:
            raise InvalidField(field, refusal, reason=_REFUSED)

    def answer_check(self, run: Run, answer: Answer, received: Mapping[int, Received] | None) -> HookCheck | None:
        """Return the check of a run's answer; `received` is what its client has. None: answers are not checked."""
        return HookCheck(self, run, answer, received or {}) if ANSWERS in self.settings.checks else None

    def _add(self, asked: pb.CheckPromptRequest, prompt: Any, model: str) -> None:
        """Add the texts of a prompt, of an input or of a continuation."""
        match prompt:
            case str():
                asked.texts.append(prompt)
            case TextPair():
                asked.texts.extend((prompt.first, prompt.second))
            case Chat():
                asked.messages.extend(map(_message, prompt.messages))
                tools = (f"{tool.name} {tool.description} {tool.parameters}" for tool in prompt.tools)
                asked.texts.extend((*tools, *([prompt.template_args] if prompt.template_args else [])))
            case _:
                tokenizer = self._models.get(model).tokenizer
                asked.texts.append(tokenizer.decode(prompt, skip_special_tokens=False, whole=False))

    async def check_part(self, asked: pb.CheckAnswerRequest) -> str | None:
        """Return the reason for which the hook refuses a part of an answer; None: it allows it.

        Raises Unavailable where it is away and that refuses.
        """
        return await self._ask(ANSWERS, "CheckAnswer", asked)

    async def _ask(self, stage: str, method: str, asked: pb.CheckPromptRequest | pb.CheckAnswerRequest) -> str | None:
        began = time.monotonic()
        try:
            ask = getattr(self._channel.stub(hooks_pb2_grpc.ContentHookServiceStub), method)
            answer: Any = await ask(asked, timeout=self.settings.timeout_s)
            why = f"its decision is {answer.decision}"
        except grpc.aio.AioRpcError as error:
            answer, why = pb.CheckAnswerResponse(), error.code().name
        finally:
            self._metrics.content_check_time.observe(time.monotonic() - began)
        result = _RESULTS.get(answer.decision, "away")
        self._metrics.content_checks.labels(stage, result).inc()
        if result == "refused":
            call = asked.call
            log.warning("content refused: %s of %s key=%s request=%s", stage, call.tenant, call.key_id, call.request_id)
            refusal = str(answer.reason)[:REASON_CHARACTERS] or "its content is refused"
            self._auditor.refused(
                f"{_SERVICE}/{method}",
                known_caller(),
                InvalidField(stage, refusal, reason=_REFUSED),
                "",
                key=call.key_id,
                request=call.request_id,
                model=call.model,
                adapters=list(call.adapters),
            )
            return refusal
        if result == "allowed":
            self._log_once.reset()
        else:
            self._log_once(f"the content hook at {self.settings.address} is away: {why}")
            if not self.settings.fails_open:
                raise Unavailable("the content hook does not answer", reason="CONTENT_HOOK_AWAY")
        return None


def checked_call(request: Request | EncodeRequest, model: str) -> pb.CheckedCall:
    """Return what a hook is told of a call."""
    adapters = [part.adapter for part in request.adapters] or [request.adapter] * bool(request.adapter)
    return pb.CheckedCall(
        tenant=request.tenant,
        key_id=calling_key(),
        request_id=request.request_id,
        model=model,
        adapters=adapters,
    )


def _message(message: ChatMessage) -> pb.CheckedMessage:
    calls = (f"{call.name} {call.arguments}" for call in message.tool_calls)
    texts: Iterable[str] = (message.content, *message.parts, message.reasoning, *calls)
    return pb.CheckedMessage(role=message.role, text="\n".join(filter(None, texts)))


@dataclass(slots=True)
class _Choice:
    """A choice of an answer: the end of what its client has, the number of characters of it, and what is held."""

    before: str = ""
    offset: int = 0
    held: list[Delta | Finished] = field(default_factory=list)
    size: int = 0
    refused: bool = False

    def hold(self, event: Delta | Finished) -> None:
        """Hold an event until it is checked."""
        self.held.append(event)
        if isinstance(event, Delta):
            self.size += len("".join(_texts(event))) or len(event.token_ids)

    @property
    def is_due(self) -> bool:
        """Return whether what is held is to be checked."""
        is_full = (self.offset + self.size) // PART_CHARACTERS > self.offset // PART_CHARACTERS
        return bool(self.held) and (is_full or isinstance(self.held[-1], Finished))

    def take(self) -> list[Delta | Finished]:
        """Return what is held, which passes on; what comes then is the next part."""
        passed, self.held = self.held, []
        text = "".join("".join(_texts(event)) for event in passed if isinstance(event, Delta))
        self.before = (self.before + text)[-BEFORE_CHARACTERS:]
        self.offset += self.size
        self.size = 0
        return passed


def _texts(delta: Delta) -> tuple[str, str, str]:
    """Return what a delta adds of text, of reasoning, and of calls of tools."""
    return delta.text, delta.reasoning, "".join(call.name + call.arguments for call in delta.tool_calls)


class HookCheck:
    """Checks the answer that one call reads."""

    def __init__(self, hook: Hook, run: Run, answer: Answer, received: Mapping[int, Received]) -> None:
        self._hook, self._answer = hook, answer
        self._call = checked_call(run.request, run.job.model)
        self._choices: dict[int, _Choice] = {}
        for choice, part in received.items():
            skip = run.request.skip_special_tokens
            text = run.tokenizer.decode(part.token_ids, skip_special_tokens=skip, whole=False)
            self._choices[choice] = _Choice(text[-BEFORE_CHARACTERS:], len(text))

    async def passed(self, events: Sequence[Event]) -> list[Event]:
        """Return the events that may go to the client now. Raises Unavailable, see `Hook.check_part`."""
        passed: list[Event] = []
        for event in events:
            if not isinstance(event, (Delta, Finished)):
                passed.append(event)
                continue
            choice = self._choices.setdefault(event.choice, _Choice())
            if not choice.refused:
                choice.hold(event)
        due = [(number, choice) for number, choice in self._choices.items() if choice.is_due]
        for checked in await asyncio.gather(*(self._check(number, choice) for number, choice in due)):
            passed += checked
        return passed

    async def _check(self, number: int, choice: _Choice) -> list[Delta | Finished]:
        deltas = [_texts(event) for event in choice.held if isinstance(event, Delta)]
        text, reasoning, calls = map("".join, zip(*deltas, strict=True)) if deltas else ("", "", "")
        if not (text or reasoning or calls):  # ids alone, such as the end token
            return choice.take()
        part = pb.CheckAnswerRequest(
            call=self._call,
            choice=number,
            before=choice.before,
            offset=choice.offset,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            last=isinstance(choice.held[-1], Finished),
        )
        reason = await self._hook.check_part(part)
        if reason is None:
            return choice.take()
        choice.refused, choice.held = True, []
        self._answer.refuse(number)
        return [Finished(FinishReason.CONTENT_FILTER, choice=number, refusal=reason)]


def open_hook(text: str, own: TlsFiles | None, models: Models, metrics: RouterMetrics, auditor: Auditor) -> Hook:
    """Return the hook of --content-hook. Raises ValueError."""
    return Hook(read_hook(text, own), models, metrics, auditor)
