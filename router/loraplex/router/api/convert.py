"""Conversion of the public messages to domain objects and back, with the checks of a message alone.

JSON in a chat (arguments, schemas, template variables) is parsed where it is rendered, in a child process.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.contracts.broker.terms import PRIORITY_LIMIT
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import choices_grammar, json_grammar, lark_grammar, regex_grammar
from loraplex.contracts.grammars.json_schema import JsonStyle, Whitespace
from loraplex.contracts.options import (
    ALLOWED_TOKEN_IDS,
    CLIENT_REASONS,
    LOGIT_BIASES,
    RANGES,
    OutOfRangeError,
    SamplingParams,
    TokenLogprobs,
    check_sampling,
)
from loraplex.router.catalog.models import Models, ServedModel
from loraplex.router.request import (
    DEFAULT_MAX_TOKENS,
    Chat,
    ChatMessage,
    Delta,
    Event,
    Finished,
    Message,
    Prompt,
    PromptLogprobs,
    PromptOptions,
    Received,
    Request,
    Stopping,
    Summary,
    Tool,
    ToolCall,
    ToolMode,
    WeightedAdapter,
)
from loraplex.router.text.tokenizer import PromptTokenizer, check_text, context_exceeded
from loraplex.runtime.rpc.errors import InvalidField, NotBuilt

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOLS = 128
# Maximum bytes of all tools together, and of the variables for the template.
TOOLS_BYTES = 256 * 1024
TEMPLATE_ARGS_BYTES = 16 * 1024
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MODES = {pb.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO} | {
    pb.ToolMode.Value(f"TOOL_MODE_{mode.name}"): mode for mode in ToolMode
}


def check_most(field: str, number: int, most: int, unit: str = "") -> None:
    """Raise InvalidField where a field has a larger number than the maximum, or more of a unit."""
    if number > most:
        raise InvalidField(field, f"{number} {unit}; at most {most}" if unit else f"{number}; at most {most}")


def read_chat(chat: pb.Chat) -> Chat:
    """Return the chat in a message. Raises InvalidField or NotBuilt, naming the field."""
    if not chat.messages:
        raise InvalidField("chat.messages", "is empty")
    if len(chat.template_args.encode()) > TEMPLATE_ARGS_BYTES:
        raise InvalidField("chat.template_args", f"is larger than {TEMPLATE_ARGS_BYTES} bytes")
    tools = _tools(chat.tools)
    mode, name = _tool_choice(chat, {tool.name for tool in tools})
    continued, last = chat.continue_final_message, len(chat.messages) - 1
    if continued and chat.messages[last].role != "assistant":
        raise InvalidField(f"chat.messages[{last}].role", "only an assistant's message can be continued")
    prompted = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued
    if continued and prompted:
        raise InvalidField("chat.add_generation_prompt", "true cannot be combined with continue_final_message")
    if (budget := chat.thinking_token_budget) < -1:
        raise InvalidField("chat.thinking_token_budget", f"{budget}; give a number of tokens, or -1 for no limit")
    return Chat(
        messages=tuple(_message(f"chat.messages[{index}]", turn) for index, turn in enumerate(chat.messages)),
        # An answer without calls comes from a prompt without tools.
        tools=() if mode is ToolMode.NONE else tools,
        tool_mode=mode,
        tool_name=name,
        parallel_tool_calls=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
        continue_final_message=continued,
        add_generation_prompt=prompted,
        template_args=chat.template_args,
        thinking_token_budget=budget if chat.HasField("thinking_token_budget") and budget >= 0 else None,
    )


def _message(field: str, turn: pb.ChatMessage) -> ChatMessage:
    if turn.role not in ROLES:
        raise InvalidField(f"{field}.role", f"{turn.role!r} is not one of {', '.join(ROLES)}")
    if turn.content and turn.parts:
        raise InvalidField(f"{field}.parts", "give either content or parts")
    for index, part in enumerate(turn.parts):
        if part.type not in ("", "text"):
            raise NotBuilt(f"{field}.parts[{index}].type={part.type}")
    if turn.role != "assistant":
        for name in ("tool_calls", "reasoning"):
            if getattr(turn, name):
                raise InvalidField(f"{field}.{name}", f"only an assistant's message has it, not one of {turn.role}")
    if turn.tool_call_id and turn.role != "tool":
        raise InvalidField(f"{field}.tool_call_id", f"only a tool's message has it, not one of {turn.role}")
    return ChatMessage(
        role=turn.role,
        content=turn.content,
        parts=tuple(part.text for part in turn.parts),
        tool_calls=tuple(
            _tool_call(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(turn.tool_calls)
        ),
        tool_call_id=turn.tool_call_id,
        name=turn.name,
        reasoning=turn.reasoning,
    )


def _tool_call(field: str, call: pb.ToolCall) -> ToolCall:
    if not call.name:
        raise InvalidField(f"{field}.name", "is empty")
    return ToolCall(call.id, call.name, call.arguments)


def _tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    check_most("chat.tools", len(tools), TOOLS, "tools")
    if sum(tool.ByteSize() for tool in tools) > TOOLS_BYTES:
        raise InvalidField("chat.tools", f"are larger than {TOOLS_BYTES} bytes")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"chat.tools[{index}].name"
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidField(field, f"{tool.name[:80]!r} is not 1 to 128 letters, digits, '_', '.' and '-'")
        if tool.name in seen:
            raise InvalidField(field, f"{tool.name} is there twice")
        seen.add(tool.name)
    return tuple(Tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in tools)


def _tool_choice(chat: pb.Chat, names: set[str]) -> tuple[ToolMode, str]:
    """Return the mode, and the tool that has to be called where one is named."""
    choice = chat.tool_choice
    if choice.WhichOneof("choice") == "name":
        if choice.name not in names:
            raise InvalidField("chat.tool_choice.name", f"{choice.name!r} is not one of chat.tools")
        mode, name = ToolMode.REQUIRED, choice.name
    elif choice.mode in _MODES:
        mode, name = _MODES[choice.mode], ""
    else:
        raise InvalidField("chat.tool_choice.mode", f"{choice.mode} is not a ToolMode that this version knows")
    if mode is ToolMode.REQUIRED and not names:
        raise InvalidField("chat.tools", "is empty; chat.tool_choice asks for a call")
    return mode, name


REQUEST_ID_CHARACTERS = 128
# No spaces, no control characters, nothing that needs quotes.
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:/@+=~-]{{0,{REQUEST_ID_CHARACTERS}}}")


def read_request_id(request_id: str) -> str:
    """Return a client's request id, which may be empty. Raises InvalidField."""
    if not _REQUEST_ID.fullmatch(request_id):
        message = f"not {REQUEST_ID_CHARACTERS} characters at most of A-Z a-z 0-9 . _ : / @ + = ~ -"
        raise InvalidField("request_id", message)
    return request_id


# Maximum characters of a session's id, which may be whatever an application calls a conversation or a user.
SESSION_ID_CHARACTERS = 256


# Number of ids that are read at once: between two such pieces a thread gives way to the event loop.
_PIECE = 4_096


def read_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids in a message; of many it may run in a thread."""
    return tuple(chain.from_iterable(ids[at : at + _PIECE] for at in range(0, len(ids), _PIECE)))


def read_prompt_options(message: pb.GenerateSpec | pb.TokenizeRequest) -> PromptOptions:
    """Return the options of a message. Raises InvalidField."""
    options = {field.name: value for field, value in message.prompt_options.ListFields()}
    if message.WhichOneof("input") == "token_ids":
        for name in ("add_special_tokens", "parse_special_tokens"):
            if name in options:
                raise InvalidField(f"prompt_options.{name}", "concerns texts; token_ids are taken as they are")
    return PromptOptions(**options)


def check_prompt_size(message: pb.GenerateSpec | pb.TokenizeRequest, model: ServedModel) -> None:
    """Raise InvalidField where the prompt can't fit the model's context, naming the field."""
    context = model.manifest.context_length
    if message.prompt_options.HasField("truncate_to"):  # a message's size is the bound
        return
    match message.WhichOneof("input"):
        case "prompt":
            check_text(model.tokenizer, message.prompt, "prompt", context)
        case "token_ids" if isinstance(message, pb.GenerateSpec):
            check_count("token_ids", message.token_ids.ids, context)
        case "chat":
            # Every template makes at least one token of a message.
            check_count("chat.messages", message.chat.messages, context)


def check_count(field: str, values: Sequence[object], limit: int) -> None:
    """Raise InvalidField where a field has more values than the context has tokens."""
    if len(values) > limit:
        raise context_exceeded(field, str(len(values)), limit)


# Maximum length of a format that is read on the event loop, in a few milliseconds; others take some 100 ms.
_SHORT_CHARACTERS = 4_096
# Maximum number of grammars that are kept for the next request with the same format; each is some kilobytes, and its
# format 64 KiB at most.
_CACHED_FORMATS = 512


def read_format(spec: pb.GenerateSpec, tenant: str) -> tuple[str, str]:
    """Return the field that holds a request's format, and its grammar; both are empty without. Raises InvalidField."""
    field = spec.WhichOneof("format") or ""
    style = _json_style(spec)
    if style and field != "json_schema":
        raise InvalidField("json_style", "is for a json_schema alone")
    try:
        match field:
            case "json_schema":
                return field, _grammar(tenant, json_grammar, spec.json_schema, style or JsonStyle())
            case "regex":
                return field, _grammar(tenant, regex_grammar, spec.regex)
            case "grammar":
                return field, _grammar(tenant, lark_grammar, spec.grammar)
            case "choices":
                return "choices.values", _grammar(tenant, choices_grammar, tuple(spec.choices.values))
    except GrammarError as error:
        refused = InvalidField(error.path, error.message, reason="INVALID_FORMAT")
    else:
        return "", ""
    raise refused  # here, without what the traceback of the GrammarError holds: freeing it takes milliseconds


def _json_style(spec: pb.GenerateSpec) -> JsonStyle | None:
    if not spec.HasField("json_style"):
        return None
    whitespace, order = spec.json_style.whitespace, spec.json_style.property_order
    if whitespace not in pb.JsonWhitespace.values():
        raise InvalidField("json_style.whitespace", f"{whitespace} is not known")
    if order not in pb.PropertyOrder.values():
        raise InvalidField("json_style.property_order", f"{order} is not known")
    return JsonStyle(_WHITESPACE.get(whitespace, Whitespace.SPACED), order == pb.PROPERTY_ORDER_SORTED)


_WHITESPACE = {
    pb.JSON_WHITESPACE_COMPACT: Whitespace.COMPACT,
    pb.JSON_WHITESPACE_FLEXIBLE: Whitespace.FLEXIBLE,
}


# For each tenant: the time of a request must not tell what another has asked.
@lru_cache(_CACHED_FORMATS)
def _grammar(_tenant: str, make: Callable[..., str], *arguments: object) -> str:
    return make(*arguments)


def forget_formats() -> int:
    """Forget the formats that are kept; returns how many there were."""
    count = _grammar.cache_info().currsize
    _grammar.cache_clear()
    return count


STOP_STRINGS = 16
STOP_CHARACTERS = 64
STOP_TOKEN_IDS = 64
BAD_WORD_STRINGS = 64
BAD_WORD_CHARACTERS = 64
STREAM_INTERVAL = 1_000
CHOICES = 16
LOGPROBS = 20
LOGPROB_TOKEN_IDS = 256
ADAPTERS = 8

_NEUTRAL = SamplingParams()


def read_request(spec: pb.GenerateSpec, tenant: str) -> Request:
    """Return the request in a message. Raises InvalidField or NotBuilt, naming the field."""
    field, prompt = read_prompt(spec)
    interval = spec.output.stream_interval if spec.output.HasField("stream_interval") else 1
    check_most("output.stream_interval", interval, STREAM_INTERVAL)
    n, best_of = _choices(spec.output)
    format_field, grammar = read_format(spec, tenant)
    check_priority(spec.priority)
    check_most("session_id", len(spec.session_id), SESSION_ID_CHARACTERS, "characters")
    named_ids = _logprob_token_ids(spec.output)
    return Request(
        tenant=tenant,
        prompt=prompt,
        prompt_field=field,
        prompt_options=read_prompt_options(spec),
        request_id=read_request_id(spec.request_id),
        model=spec.model,
        adapter=spec.adapter,
        adapters=read_adapters(spec),
        sampling=_with_mode(_sampling(spec.sampling), spec.output),
        sampling_set=frozenset(field.name for field, _ in spec.sampling.ListFields()),
        bad_words=_bad_words(spec.sampling),
        seed=spec.sampling.seed if spec.sampling.HasField("seed") else None,
        stopping=_stopping(spec.stopping),
        skip_special_tokens=not spec.output.HasField("skip_special_tokens") or spec.output.skip_special_tokens,
        echo=spec.output.echo,
        keep_stop=spec.output.keep_stop,
        stream_interval=max(1, interval),
        n=n,
        best_of=best_of,
        logprobs=len(named_ids) or _logprobs(spec.output, "logprobs"),
        logprob_token_ids=named_ids,
        prompt_logprobs=_logprobs(spec.output, "prompt_logprobs"),
        priority=spec.priority,
        session_id=spec.session_id,
        speculate=_speculate(spec.speculation),
        allow_inactive=spec.allow_inactive,
        format_field=format_field,
        grammar=grammar,
        fingerprint=hashlib.sha256(spec.SerializeToString(deterministic=True)).hexdigest(),
    )


def check_priority(priority: int) -> None:
    """Raise InvalidField on a priority out of range."""
    if abs(priority) > PRIORITY_LIMIT:
        raise InvalidField("priority", f"{priority} is not between -{PRIORITY_LIMIT} and {PRIORITY_LIMIT}")


def _speculate(speculation: pb.Speculation.ValueType) -> bool:
    if speculation not in pb.Speculation.values():
        raise InvalidField("speculation", f"{speculation} is not known")
    return speculation != pb.SPECULATION_OFF


def read_adapters(spec: pb.GenerateSpec | pb.EncodeSpec) -> tuple[WeightedAdapter, ...]:
    """Return the parts of a weighted set. Raises InvalidField."""
    if spec.adapter and spec.adapters:
        raise InvalidField("adapters", "give either adapter or adapters")
    check_most("adapters", len(spec.adapters), ADAPTERS, "adapters")
    seen = set()
    for index, part in enumerate(spec.adapters):
        if not part.adapter:
            raise InvalidField(f"adapters[{index}].adapter", "is empty")
        if not math.isfinite(part.weight) or part.weight == 0:
            raise InvalidField(f"adapters[{index}].weight", f"{part.weight:g} is not a finite number other than 0")
        if part.adapter in seen:
            raise InvalidField(f"adapters[{index}].adapter", f"{part.adapter} is there twice; add up its weights")
        seen.add(part.adapter)
    return tuple(WeightedAdapter(part.adapter, part.weight) for part in spec.adapters)


def _choices(output: pb.Output) -> tuple[int, int]:
    n = output.n if output.HasField("n") else 1
    best_of = output.best_of if output.HasField("best_of") else n
    for field, value in (("output.n", n), ("output.best_of", best_of)):
        if not 1 <= value <= CHOICES:
            raise InvalidField(field, f"{value} is not between 1 and {CHOICES}")
    if best_of < n:
        raise InvalidField("output.best_of", f"{best_of} candidates are fewer than output.n ({n})")
    return n, best_of


def _logprobs(output: pb.Output, field: str) -> int | None:
    value: int = getattr(output, field)
    check_most(f"output.{field}", value, LOGPROBS)
    return value if output.HasField(field) else None  # type: ignore[arg-type]


def _logprob_token_ids(output: pb.Output) -> tuple[int, ...]:
    ids, field = tuple(output.logprob_token_ids), "output.logprob_token_ids"
    check_most(field, len(ids), LOGPROB_TOKEN_IDS, "ids")
    if ids and output.HasField("logprobs"):
        raise InvalidField(field, "give either output.logprobs or these")
    if len(set(ids)) < len(ids):
        raise InvalidField(field, "has an id twice")
    return ids


def read_prompt(message: pb.GenerateSpec | pb.TokenizeRequest) -> tuple[str, Prompt]:
    """Return the name of the input that is set, and its value. Raises InvalidField."""
    match message.WhichOneof("input"):
        case "prompt":
            if not message.prompt:
                raise InvalidField("prompt", "is empty")
            return "prompt", message.prompt
        case "token_ids" if isinstance(message, pb.GenerateSpec):
            if not message.token_ids.ids:
                raise InvalidField("token_ids", "is empty")
            return "token_ids", read_ids(message.token_ids.ids)
        case "chat":
            return "chat", read_chat(message.chat)
    raise InvalidField("input", "give one of prompt, token_ids and chat")


def _sampling(message: pb.Sampling) -> SamplingParams:
    if not message.ByteSize():
        return _NEUTRAL
    set_fields = {field.name: value for field, value in message.ListFields() if field.name in RANGES}
    check_most("sampling.logit_bias", len(message.logit_bias), LOGIT_BIASES, "entries")  # before they are sorted
    check_most("sampling.allowed_token_ids", len(message.allowed_token_ids), ALLOWED_TOKEN_IDS, "ids")
    if message.HasField("default_temperature"):
        set_fields.setdefault("temperature", message.default_temperature)
    params = SamplingParams(
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(message.allowed_token_ids))),
        **set_fields,
    )
    try:
        RANGES["temperature"].check("default_temperature", message.default_temperature)
        check_sampling(params)
    except OutOfRangeError as error:
        raise InvalidField(f"sampling.{error.field}", error.message) from error
    return params


def _with_mode(params: SamplingParams, output: pb.Output) -> SamplingParams:
    if (mode := output.logprobs_mode) not in pb.LogprobsMode.values():
        raise InvalidField("output.logprobs_mode", f"{mode} is not known")
    return replace(params, processed_logprobs=True) if mode == pb.LOGPROBS_MODE_PROCESSED else params


def _bad_words(message: pb.Sampling) -> tuple[str, ...]:
    if message.bad_words and message.allowed_token_ids:
        raise InvalidField("sampling.bad_words", "cannot be combined with allowed_token_ids")
    return _strings("sampling.bad_words", message.bad_words, BAD_WORD_STRINGS, BAD_WORD_CHARACTERS)


def _strings(field: str, texts: Sequence[str], most: int, characters: int) -> tuple[str, ...]:
    check_most(field, len(texts), most, "strings")
    if not all(0 < len(text) <= characters for text in texts):
        raise InvalidField(field, f"each string has 1 to {characters} characters")
    return tuple(texts)


def _stopping(message: pb.Stopping) -> Stopping:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    stop = _strings("stopping.stop", message.stop, STOP_STRINGS, STOP_CHARACTERS)
    check_most("stopping.stop_token_ids", len(message.stop_token_ids), STOP_TOKEN_IDS, "ids")
    if max_tokens is not None and message.min_tokens > max_tokens:
        raise InvalidField("stopping.min_tokens", f"{message.min_tokens} is more than max_tokens ({max_tokens})")
    return Stopping(
        max_tokens=max_tokens,
        default_max_tokens=message.default_max_tokens or DEFAULT_MAX_TOKENS,
        cap_max_tokens=message.cap_max_tokens,
        min_tokens=message.min_tokens,
        stop=stop,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def count_received(received: Sequence[pb.ReceivedTokens], n: int, max_tokens: int) -> int:
    """Return how many ids the client has of `n` choices, without reading them.

    Raises InvalidField where it cannot have got as many.
    """
    choices = [part.choice for part in received[: n + 1]]  # of as many, one is there twice or beyond
    for index, choice in enumerate(choices):
        if choice >= n:
            raise InvalidField(f"received[{index}].choice", f"{choice}; the request has {n}")
        if choice in choices[:index]:
            raise InvalidField(f"received[{index}].choice", f"{choice} is there twice")
        if len(received[index].token_ids) > max_tokens:
            raise InvalidField(f"received[{index}].token_ids", f"more than max_tokens ({max_tokens})")
    return sum(len(part.token_ids) for part in received)


def read_received(received: Sequence[pb.ReceivedTokens]) -> dict[int, Received]:
    """Return what the client has of each choice; of many ids it may run in a thread."""
    return {
        part.choice: Received(
            read_ids(part.token_ids), part.finished, part.text_bytes if part.HasField("text_bytes") else None
        )
        for part in received
    }


_REASONS = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in CLIENT_REASONS}


def count_numbers(event: Event) -> int:
    """Return how many ids and log probabilities a message has, each of which takes about a microsecond to write."""
    match event:
        case Delta():
            size, logprobs = len(event.token_ids), event.logprobs
        case PromptLogprobs():
            size, logprobs = len(event.tokens), event.tokens
        case _:
            return 0
    return size * (1 + len(logprobs[0].alternatives)) if logprobs else size


def write_message(message: Message, written: pb.GenerateEvent) -> None:
    """Write a message of the stream in its place: copies of many log probabilities take longer than all else."""
    written.resume_token = message.resume_token
    event = message.event
    match event:
        case Delta():
            delta = written.delta
            delta.choice, delta.offset = event.choice, event.offset
            delta.text, delta.reasoning = event.text, event.reasoning
            delta.token_ids.extend(event.token_ids)
            _add_logprobs(event.logprobs, delta.logprobs.add)
            delta.text_lengths.extend(event.text_lengths)
            for part in event.tool_calls:
                delta.tool_calls.add(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        case PromptLogprobs():
            written.prompt_logprobs.SetInParent()
            _add_logprobs(event.tokens, written.prompt_logprobs.tokens.add)
        case Finished():
            written.finished.choice, written.finished.reason = event.choice, _REASONS[event.reason]
            written.finished.refusal = event.refusal
            if event.stop_string is not None:
                written.finished.stop_string = event.stop_string
            if event.stop_token_id is not None:
                written.finished.stop_token_id = event.stop_token_id
        case Summary():
            written.summary.CopyFrom(
                pb.Summary(
                    request_id=event.request_id,
                    adapter_revision=event.adapter_revision,
                    usage=pb.Usage(
                        prompt_tokens=event.prompt_tokens,
                        cached_tokens=event.cached_tokens,
                        completion_tokens=event.completion_tokens,
                    ),
                    timings=pb.Timings(
                        queue=event.queue_s, adapter=event.adapter_s, ttft=event.ttft_s, decode=event.decode_s
                    ),
                    continuations=event.continuations,
                    adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in event.adapters],
                    not_enforced=event.not_enforced,
                    activated=event.activated,
                )
            )
            if (drafts := event.drafts).steps:
                counts = written.summary.speculative_decoding
                counts.steps, counts.draft_tokens, counts.accepted_tokens = drafts.steps, drafts.tokens, drafts.accepted
                counts.mean_acceptance_length = drafts.mean_acceptance_length


def _add_logprobs(tokens: Iterable[TokenLogprobs], add: Callable[..., pb.TokenLogprobs]) -> None:
    for token in tokens:
        alternatives = add(logprob=token.logprob).alternatives
        for token_id, logprob in token.alternatives:
            alternatives.add(token_id=token_id, logprob=logprob)


async def read_spec(spec: pb.GenerateSpec, tenant: str, models: Models, prompts: PromptTokenizer) -> Request:
    """Return the request in a message. Raises InvalidField, NotBuilt, NotFound or Unavailable."""
    check_prompt_size(spec, models.get(spec.model))
    if max(len(spec.json_schema), len(spec.regex), len(spec.grammar)) > _SHORT_CHARACTERS:  # read_request then knows it
        await prompts.in_turn(tenant, lambda: read_format(spec, tenant))
    return await prompts.run(tenant, len(spec.token_ids.ids), lambda: read_request(spec, tenant))
