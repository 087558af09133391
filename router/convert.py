"""The public messages to domain objects and back, with every check that needs nothing but the message."""

from __future__ import annotations

import math

from loraplex.inference.v1 import inference_pb2 as pb

from broker.messages import SamplingParams
from router.request import ChatMessage, Delta, Event, Finished, FinishReason, Prompt, Request, Stopping, Summary
from rpc.errors import InvalidField, NotBuilt

STOP_STRINGS = 16
STOP_CHARACTERS = 64
STOP_TOKEN_IDS = 64
REQUEST_ID_CHARACTERS = 128
CHAT_ROLES = ("system", "user", "assistant")

# In the contract, but not served by this version: anything but its neutral value is refused by name.
_UNBUILT: dict[str, object] = {
    "adapters": None,
    "json_schema": None,
    "regex": None,
    "grammar": None,
    "choices": None,
    "priority": 0,
}
_UNBUILT_SAMPLING: dict[str, object] = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
}
_UNBUILT_OUTPUT: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "echo": False,
}


def read_request(spec: pb.GenerateSpec, tenant: str) -> Request:
    """The request in a message. Raises InvalidField or NotBuilt, naming the field."""
    _refuse_unbuilt(spec)
    if len(spec.request_id) > REQUEST_ID_CHARACTERS:
        raise InvalidField("request_id", f"longer than {REQUEST_ID_CHARACTERS} characters")
    field, prompt = read_prompt(spec)
    interval = spec.output.stream_interval if spec.output.HasField("stream_interval") else 1
    return Request(
        tenant=tenant,
        prompt=prompt,
        prompt_field=field,
        request_id=spec.request_id,
        model=spec.model,
        adapter=spec.adapter,
        sampling=_sampling(spec.sampling),
        seed=spec.sampling.seed if spec.sampling.HasField("seed") else None,
        stopping=_stopping(spec.stopping),
        skip_special_tokens=not spec.output.HasField("skip_special_tokens") or spec.output.skip_special_tokens,
        stream_interval=max(1, interval),
    )


def _refuse_unbuilt(spec: pb.GenerateSpec) -> None:
    for prefix, message, neutral in (
        ("", spec, _UNBUILT),
        ("sampling.", spec.sampling, _UNBUILT_SAMPLING),
        ("output.", spec.output, _UNBUILT_OUTPUT),
    ):
        for field, value in message.ListFields():
            if field.name in neutral and value != neutral[field.name]:
                raise NotBuilt(prefix + field.name)


def read_prompt(message: pb.GenerateSpec | pb.TokenizeRequest) -> tuple[str, Prompt]:
    """The name of the input that is set, and its value. Raises InvalidField."""
    match message.WhichOneof("input"):
        case "prompt":
            if not message.prompt:
                raise InvalidField("prompt", "is empty")
            return "prompt", message.prompt
        case "token_ids" if isinstance(message, pb.GenerateSpec):
            if not message.token_ids.ids:
                raise InvalidField("token_ids", "is empty")
            return "token_ids", tuple(message.token_ids.ids)
        case "chat":
            if not message.chat.messages:
                raise InvalidField("chat.messages", "is empty")
            for turn in message.chat.messages:
                if turn.role not in CHAT_ROLES:
                    raise InvalidField("chat.messages.role", f"{turn.role!r} is none of {', '.join(CHAT_ROLES)}")
            return "chat", tuple(ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
    raise InvalidField("input", "give one of prompt, token_ids and chat")


def _sampling(message: pb.Sampling) -> SamplingParams:
    temperature = message.temperature if message.HasField("temperature") else 0.0
    if not (math.isfinite(temperature) and 0 <= temperature <= 100):
        raise InvalidField("sampling.temperature", f"{temperature} is not between 0 (greedy) and 100")
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidField("sampling.top_p", f"{top_p} is not above 0 and at most 1")
    return SamplingParams(temperature=temperature, top_k=message.top_k, top_p=top_p)


def _stopping(message: pb.Stopping) -> Stopping:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidField("stopping.max_tokens", "0; ask for at least one token")
    if len(message.stop) > STOP_STRINGS:
        raise InvalidField("stopping.stop", f"{len(message.stop)} strings; at most {STOP_STRINGS}")
    for text in message.stop:
        if not 0 < len(text) <= STOP_CHARACTERS:
            raise InvalidField("stopping.stop", f"a stop string has 1 to {STOP_CHARACTERS} characters")
    if len(message.stop_token_ids) > STOP_TOKEN_IDS:
        raise InvalidField("stopping.stop_token_ids", f"{len(message.stop_token_ids)} ids; at most {STOP_TOKEN_IDS}")
    if max_tokens is not None and message.min_tokens > max_tokens:
        raise InvalidField("stopping.min_tokens", f"{message.min_tokens} is more than max_tokens ({max_tokens})")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.END: pb.FINISH_REASON_END,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}


def write_event(event: Event) -> pb.GenerateEvent:
    """An event's message."""
    match event:
        case Delta():
            delta = pb.Delta(choice=event.choice, offset=event.offset, token_ids=event.token_ids, text=event.text)
            return pb.GenerateEvent(delta=delta)
        case Finished():
            finished = pb.Finished(choice=event.choice, reason=_REASONS[event.reason])
            if event.stop_string is not None:
                finished.stop_string = event.stop_string
            if event.stop_token_id is not None:
                finished.stop_token_id = event.stop_token_id
            return pb.GenerateEvent(finished=finished)
        case Summary():
            return pb.GenerateEvent(
                summary=pb.Summary(
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
                )
            )
