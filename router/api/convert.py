"""Conversion of the public messages to domain objects and back, with every check that needs only the message."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from loraplex.inference.v1 import inference_pb2 as pb

from artifacts.sampling import LOGIT_BIASES, RANGES, OutOfRangeError, SamplingParams, check_sampling
from broker.codec import read_ids
from broker.terms import PRIORITY_LIMIT
from router.api.chat import read_chat, write_tool_call
from router.api.formats import read_format
from router.api.prompt_options import read_prompt_options
from router.api.request_id import read_request_id
from router.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    Message,
    Prompt,
    PromptLogprobs,
    Received,
    Request,
    Stopping,
    Summary,
    TokenLogprobs,
    WeightedAdapter,
)
from rpc.errors import InvalidField

STOP_STRINGS = 16
STOP_CHARACTERS = 64
STOP_TOKEN_IDS = 64
STREAM_INTERVAL = 1_000
CHOICES = 16
LOGPROBS = 20
ADAPTERS = 8

_NEUTRAL = SamplingParams()


def read_request(spec: pb.GenerateSpec, tenant: str) -> Request:
    """Return the request in a message. Raises InvalidField or NotBuilt, naming the field."""
    field, prompt = read_prompt(spec)
    interval = spec.output.stream_interval if spec.output.HasField("stream_interval") else 1
    if interval > STREAM_INTERVAL:
        raise InvalidField("output.stream_interval", f"{interval}; at most {STREAM_INTERVAL}")
    n, best_of = _choices(spec.output)
    format_field, grammar = read_format(spec, tenant)
    if abs(spec.priority) > PRIORITY_LIMIT:
        raise InvalidField("priority", f"{spec.priority} is not between -{PRIORITY_LIMIT} and {PRIORITY_LIMIT}")
    return Request(
        tenant=tenant,
        prompt=prompt,
        prompt_field=field,
        prompt_options=read_prompt_options(spec),
        request_id=read_request_id(spec.request_id),
        model=spec.model,
        adapter=spec.adapter,
        adapters=read_adapters(spec),
        sampling=_sampling(spec.sampling),
        seed=spec.sampling.seed if spec.sampling.HasField("seed") else None,
        stopping=_stopping(spec.stopping),
        skip_special_tokens=not spec.output.HasField("skip_special_tokens") or spec.output.skip_special_tokens,
        echo=spec.output.echo,
        stream_interval=max(1, interval),
        n=n,
        best_of=best_of,
        logprobs=_logprobs("output.logprobs", spec.output.logprobs) if spec.output.HasField("logprobs") else None,
        prompt_logprobs=_logprobs("output.prompt_logprobs", spec.output.prompt_logprobs)
        if spec.output.HasField("prompt_logprobs")
        else None,
        priority=spec.priority,
        format_field=format_field,
        grammar=grammar,
        fingerprint=hashlib.sha256(spec.SerializeToString(deterministic=True)).hexdigest(),
    )


def read_adapters(spec: pb.GenerateSpec | pb.EncodeSpec) -> tuple[WeightedAdapter, ...]:
    """Return the parts of a weighted set. Raises InvalidField."""
    if spec.adapter and spec.adapters:
        raise InvalidField("adapters", "give either adapter or adapters")
    if len(spec.adapters) > ADAPTERS:
        raise InvalidField("adapters", f"{len(spec.adapters)} adapters; at most {ADAPTERS}")
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


def _logprobs(field: str, value: int) -> int:
    if value > LOGPROBS:
        raise InvalidField(field, f"{value}; at most {LOGPROBS}")
    return value


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
    given = {field.name: value for field, value in message.ListFields() if field.name in RANGES}
    if len(message.logit_bias) > LOGIT_BIASES:  # before they are sorted
        raise InvalidField("sampling.logit_bias", f"{len(message.logit_bias)} entries; at most {LOGIT_BIASES}")
    params = SamplingParams(logit_bias=tuple(sorted(message.logit_bias.items())), **given)
    try:
        check_sampling(params)
    except OutOfRangeError as error:
        raise InvalidField(f"sampling.{error.field}", error.message) from error
    return params


def _stopping(message: pb.Stopping) -> Stopping:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
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


_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.END: pb.FINISH_REASON_END,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
}


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


def write_message(message: Message) -> pb.GenerateEvent:
    """Convert a message of the stream."""
    event = _write_event(message.event)
    event.resume_token = message.resume_token
    return event


def _write_event(event: Event) -> pb.GenerateEvent:
    match event:
        case Delta():
            delta = pb.Delta(choice=event.choice, offset=event.offset, token_ids=event.token_ids, text=event.text)
            delta.logprobs.extend(map(_write_logprobs, event.logprobs))
            delta.reasoning = event.reasoning
            delta.tool_calls.extend(map(write_tool_call, event.tool_calls))
            return pb.GenerateEvent(delta=delta)
        case PromptLogprobs():
            tokens = [_write_logprobs(token) for token in event.tokens]
            return pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(tokens=tokens))
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
                    adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in event.adapters],
                )
            )


def _write_logprobs(token: TokenLogprobs) -> pb.TokenLogprobs:
    alternatives = [pb.Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in token.alternatives]
    return pb.TokenLogprobs(logprob=token.logprob, alternatives=alternatives)
