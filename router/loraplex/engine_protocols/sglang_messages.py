"""The engine protocol's messages: its requests as this router's own, an answer's events as chunks and whole choices.

Those of SubscribeKvEvents are made of the events of the workers' prefix caches.

A number that is 0 stands for what Loraplex takes where it is unset: the protocol's numbers cannot be unset.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from loraplex.inference.v1 import inference_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2 as engine
from smg_grpc_proto.generated import common_pb2 as common

from loraplex.contracts.artifacts.chat_formats import REASONING
from loraplex.contracts.options import LOGIT_BIASES, FinishReason, TokenLogprobs
from loraplex.engine_protocols.block_feed import MOST_AT_ONCE, BlockEvent, FollowedBlock
from loraplex.router.api.convert import STOP_STRINGS, STOP_TOKEN_IDS, check_count, check_most, read_spec
from loraplex.router.api.encoding import read_embed
from loraplex.router.catalog.models import Models
from loraplex.router.generation.chat_format import behind_open_block
from loraplex.router.request import DEFAULT_MAX_TOKENS, Delta, EncodeRequest, Finished, PromptLogprobs, Request, Summary
from loraplex.router.text.tokenizer import ModelTokenizer, PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField, NotBuilt
from loraplex.runtime.rpc.server import MESSAGE_BYTES

_PARAMS = "sampling_params"
# By the beginning of the path in loraplex.inference.v1; the first one that fits.
_NAMES = {
    "inputs[0].token_ids": "tokenized.input_ids",
    "inputs": "tokenized.input_ids",
    "input": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    "prompt": "tokenized.input_ids",
    "adapter": "lora_id",
    "stopping.max_tokens": f"{_PARAMS}.max_new_tokens",
    "stopping.min_tokens": f"{_PARAMS}.min_new_tokens",
    "stopping": _PARAMS,
    "sampling": _PARAMS,
    "output.logprobs": "top_logprobs_num",
    "output.prompt_logprobs": "top_logprobs_num",
    "output.best_of": f"{_PARAMS}.n",
    "output": _PARAMS,
    "json_schema": f"{_PARAMS}.json_schema",
    "regex": f"{_PARAMS}.regex",
    "grammar": f"{_PARAMS}.ebnf_grammar",
}


@contextmanager
def engine_field_names() -> Iterator[None]:
    """Raise an InvalidField of Loraplex's own messages as one of the engine protocol's."""
    try:
        yield
    except InvalidField as error:
        message = error.message.removeprefix(f"{error.field}: ")
        raise InvalidField(_renamed(error.field), message, reason=error.reason) from error


def _renamed(field: str) -> str:
    for path, name in _NAMES.items():
        if field == path or field.startswith((f"{path}.", f"{path}[")):
            return name + field[len(path) :]
    return field


_FIELD = "sampling_params.ebnf_grammar"
# Maximum bytes of a grammar: llguidance's converter takes 0.2 s for 500 rules, and four times as long for 1,000.
EBNF_BYTES = 8 * 1024
# Maximum length of a grammar that is converted on the event loop, in 5 milliseconds.
_SHORT_CHARACTERS = 1_024


async def read_ebnf(ebnf: str, tenant: str, prompts: PromptTokenizer) -> str:
    """Return a grammar in llguidance's syntax; a large one is converted in a thread, at the tenant's turn.

    Raises InvalidField.
    """
    return await prompts.in_turn(tenant, partial(lark_of, ebnf)) if len(ebnf) > _SHORT_CHARACTERS else lark_of(ebnf)


def lark_of(ebnf: str) -> str:
    """Return a grammar in llguidance's syntax. Raises InvalidField."""
    # Imported for such a request alone.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (size := len(ebnf.encode())) > EBNF_BYTES:
        raise InvalidField(_FIELD, f"{size} bytes; at most {EBNF_BYTES}", reason="INVALID_FORMAT")
    try:
        return str(gbnf_to_lark(ebnf)).removeprefix("%llguidance {}\n")
    except Exception as error:  # it raises what its own code happens to
        message = f"not a grammar in EBNF: {str(error) or type(error).__name__}"
        raise InvalidField(_FIELD, message, reason="INVALID_FORMAT") from error


# Fields whose meaning no part of Loraplex has.
_UNSERVED = (
    "mm_inputs",
    "input_embeds",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
    "disaggregated_params",
)
_UNSERVED_OF_EMBED = ("mm_inputs", "token_type_ids", "is_cross_encoder", "texts")
# Maximum bytes of the message that ends an answer: of its other fields, of a token with its log probability, and of an
# alternative.
_REST_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 64 * 1024, 24, 9
_TOO_LARGE = "ANSWER_TOO_LARGE"
# Maximum numbers of values in fields of sampling_params.
_MOST_VALUES = {"logit_bias": LOGIT_BIASES, "stop": STOP_STRINGS, "stop_token_ids": STOP_TOKEN_IDS}


async def read_generate(request: Any, tenant: str, adapter: str, models: Models, prompts: PromptTokenizer) -> Request:
    """Return the request in a message; `adapter` is that of a message without lora_id. Raises a CallError."""
    _check_served(request, _UNSERVED)
    ids, params = request.tokenized.input_ids, request.sampling_params
    # Before they are copied, which takes the event loop seconds for a full message.
    check_count("token_ids", ids, models.get("").manifest.context_length)
    for field, most in _MOST_VALUES.items():
        check_most(f"sampling_params.{field}", len(getattr(params, field)), most, "values")
    start = _logprob_start(request)
    if request.top_logprobs_num < 0:
        raise InvalidField("top_logprobs_num", f"{request.top_logprobs_num}; at least 0")
    logprobs = request.top_logprobs_num if request.return_logprob else None
    spec = pb.GenerateSpec(
        # Chunks carry it before Loraplex's own messages do.
        request_id=request.request_id or secrets.token_hex(8),
        adapter=request.lora_id or adapter,
        token_ids=pb.TokenIds(ids=ids),
        sampling=_sampling(params),
        stopping=_stopping(params),
        output=pb.Output(
            n=params.n or 1,
            logprobs=logprobs,
            prompt_logprobs=None if start is None else logprobs,
            skip_special_tokens=params.skip_special_tokens,
            stream_interval=_stream_interval(params),
        ),
    )
    match params.WhichOneof("constraint"):
        case "json_schema":
            spec.json_schema = params.json_schema
        case "regex":
            spec.regex = params.regex
        case "ebnf_grammar":
            spec.grammar = await read_ebnf(params.ebnf_grammar, tenant, prompts)
        case "structural_tag":
            raise NotBuilt("sampling_params.structural_tag")
    read = await read_spec(spec, tenant, models, prompts)
    _check_size(read, 0 if start is None else len(ids) - start, models.get("").default_max_tokens(DEFAULT_MAX_TOKENS))
    if request.require_reasoning and read.grammar:
        tokenizer = models.get("").tokenizer
        end = reasoning_end(tokenizer)
        mark = tokenizer.decode([end], skip_special_tokens=False)
        read = replace(read, grammar=behind_open_block(mark, end, read.grammar))
    # The spec has no such fields: two requests that differ in them alone are two.
    fingerprint = f"{read.fingerprint}/{start or 0}/{request.require_reasoning}"
    return replace(read, keep_stop=True, prompt_logprobs_start=start or 0, fingerprint=fingerprint)


def read_embedding(request: Any, tenant: str, adapter: str) -> EncodeRequest:
    """Return what an Embed call asks for; the protocol's sampling_params mean nothing here. Raises a CallError."""
    _check_served(request, _UNSERVED_OF_EMBED)
    prompt = pb.EncodeInput(token_ids=pb.TokenIds(ids=request.tokenized.input_ids))
    spec = pb.EncodeSpec(request_id=request.request_id, adapter=adapter, inputs=[prompt])
    return read_embed(pb.EmbedRequest(spec=spec), tenant)


def _check_served(message: Any, unserved: tuple[str, ...]) -> None:
    set_fields = {field.name for field, _ in message.ListFields()}
    for field in unserved:
        if field in set_fields:
            raise NotBuilt(field)
    if message.data_parallel_rank:
        raise InvalidField("data_parallel_rank", f"{message.data_parallel_rank}; there is rank 0 alone")


def _sampling(params: Any) -> pb.Sampling:
    if params.HasField("custom_params") and params.custom_params.fields:
        raise NotBuilt("sampling_params.custom_params")
    if params.top_k < -1:
        raise InvalidField("sampling_params.top_k", f"{params.top_k}; at least 1, or -1 for no limit")
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p or None,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        logit_bias={_token_id(key): bias for key, bias in params.logit_bias.items()},
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise InvalidField("sampling_params.logit_bias", f"{key[:20]!r} is not a token id")
    return int(key)


def _stopping(params: Any) -> pb.Stopping:
    return pb.Stopping(
        max_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else None,
        min_tokens=params.min_new_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def _stream_interval(params: Any) -> int | None:
    if not params.HasField("stream_interval"):
        return None
    if params.stream_interval < 0:
        raise InvalidField("sampling_params.stream_interval", f"{params.stream_interval}; at least 0")
    return int(params.stream_interval)


def _logprob_start(request: Any) -> int | None:
    """Return the first prompt token whose log probabilities are wanted; None: those of no one."""
    start, count = request.logprob_start_len, len(request.tokenized.input_ids)
    if not request.return_logprob or start == -1:
        return None
    if not 0 <= start < max(1, count):
        raise InvalidField("logprob_start_len", f"{start} of {count} tokens; -1 for none of the prompt's")
    return int(start)


def _check_size(request: Request, prompt: int, default_max_tokens: int) -> None:
    """Raise InvalidField where the log probabilities of the answer, and of `prompt` tokens, do not fit one message."""
    if request.logprobs is None:
        return
    asked = request.stopping.max_tokens
    tokens = prompt + (default_max_tokens if asked is None else asked)
    most = ((MESSAGE_BYTES - _REST_BYTES) // max(1, tokens) - _TOKEN_BYTES) // _ALTERNATIVE_BYTES
    if request.logprobs > most:
        message = f"{request.logprobs} for each of {tokens} tokens do not fit a message"
        hint = f"at most {most} do" if most >= 0 else "leave return_logprob out"
        raise InvalidField("top_logprobs_num", f"{message}; {hint}", reason=_TOO_LARGE)


def reasoning_end(tokenizer: ModelTokenizer) -> int:
    """Return the token that ends a model's reasoning. Raises NotBuilt for a model that has none."""
    source = tokenizer.chat.source
    # What the template shows comes first, and what stands in every answer, as gpt-oss's channels do, last.
    for form in sorted(REASONING, key=lambda one: (not one.is_shown(source), one.anywhere)):
        try:
            ids = tokenizer.tokenize(form.closes, special_tokens=False)
        except InvalidField:  # a model without a tokenizer
            break
        if len(ids) == 1:
            return ids[0]
    raise NotBuilt("require_reasoning")


class ReasoningCount:
    """The number of an answer's tokens before the one that ends its reasoning; 0 where `end` is None."""

    def __init__(self, end: int | None) -> None:
        self._end = end
        self.tokens = 0

    def add(self, ids: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        if self._end is None:
            return
        reasoning = ids[: ids.index(self._end)] if self._end in ids else ids
        self.tokens += len(reasoning)
        if len(reasoning) < len(ids):
            self._end = None


class EngineAnswer:
    """The answer to one request; `streamed`: its tokens come in chunks too.

    `end` is the token that ends its reasoning, where that is counted.
    """

    def __init__(self, request: Request, prompt_ids: Sequence[int], *, streamed: bool, end: int | None = None) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._streamed = streamed
        self._prompt_logprobs: Any = None
        self._choices = [_Choice(end) for _ in range(request.n)]

    def messages_of(self, event: PromptLogprobs | Delta | Finished | Summary) -> Iterator[Any]:
        """Yield the messages that an event makes."""
        match event:
            case PromptLogprobs():
                start = self._request.prompt_logprobs_start
                self._prompt_logprobs = _of_prompt(self._prompt_ids[start:], event.tokens)
            case Delta() if event.token_ids:
                choice = self._choices[event.choice]
                choice.add(event)
                if self._streamed:
                    yield self._message(chunk=self._chunk(event, choice))
            case Finished():
                self._choices[event.choice].finished = event
            case Summary():
                for index, choice in enumerate(self._choices):
                    yield self._message(complete=self._complete(index, choice, event))

    def _message(self, **response: Any) -> Any:
        return engine.GenerateResponse(request_id=self._request.request_id, **response)

    def _chunk(self, delta: Delta, choice: _Choice) -> Any:
        return engine.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(choice.ids),
            reasoning_tokens=choice.reasoning.tokens,
            output_logprobs=_of_output(delta.token_ids, delta.logprobs),
            # In the first chunk of each choice.
            input_logprobs=self._prompt_logprobs if delta.offset == 0 else None,
            index=delta.choice,
        )

    def _complete(self, index: int, choice: _Choice, summary: Summary) -> Any:
        finished = choice.finished
        return engine.GenerateComplete(
            output_ids=choice.ids,
            finish_reason="length" if finished.reason is FinishReason.LENGTH else "stop",
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=len(choice.ids),
            reasoning_tokens=choice.reasoning.tokens,
            cached_tokens=summary.cached_tokens,
            output_logprobs=_of_output(choice.ids, choice.logprobs),
            input_logprobs=self._prompt_logprobs,
            matched_token_id=finished.stop_token_id,
            matched_stop_str=finished.stop_string,
            index=index,
        )


class _Choice:
    """The tokens of a choice so far, and its end."""

    def __init__(self, end: int | None) -> None:
        self.reasoning = ReasoningCount(end)
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished = Finished(FinishReason.END)

    def add(self, delta: Delta) -> None:
        """Add the tokens of a delta."""
        self.reasoning.add(delta.token_ids)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs


def _of_output(ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    if not logprobs:
        return None
    return engine.OutputLogProbs(
        token_logprobs=[token.logprob for token in logprobs], token_ids=ids, top_logprobs=map(_alternatives, logprobs)
    )


def _of_prompt(ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    """Return the log probabilities of prompt tokens; the prompt's first token has none."""
    values = [engine.InputTokenLogProb(value=token.logprob) for token in logprobs]
    top = [*map(_alternatives, logprobs)]
    first = len(ids) - len(values)
    return engine.InputLogProbs(
        token_logprobs=[engine.InputTokenLogProb()] * first + values,
        token_ids=ids,
        top_logprobs=[engine.TopLogProbs()] * first + top,
    )


def _alternatives(token: TokenLogprobs) -> Any:
    return engine.TopLogProbs(
        values=[logprob for _, logprob in token.alternatives],
        token_ids=[token_id for token_id, _ in token.alternatives],
    )


class KvEventBatches:
    """Makes the batches of one stream, and numbers them and their events from 1.

        snapshot, in parts   sequence 1, 2, ...: all blocks cleared, then those that are there now, parents first
        changes              the next sequence numbers, one by one

    A block's hash is the first 64 bits of its key, which depends on its ids, the block before it, adapter and tenant.
    """

    def __init__(self) -> None:
        self._batches, self._events = count(1), count(1)

    def snapshot(self, blocks: Sequence[FollowedBlock]) -> Iterator[Any]:
        """Yield the batches that replace whatever the subscriber knows; their events have the number 0."""
        starts = range(0, max(1, len(blocks)), MOST_AT_ONCE)
        for index, start in enumerate(starts):
            batch = self._new_batch()
            batch.snapshot.MergeFrom(common.KvSnapshotChunk(index=index, count=len(starts), blocks=len(blocks)))
            if index == 0:
                batch.events.add().cleared.SetInParent()
            part = blocks[start : start + MOST_AT_ONCE]
            batch.events.extend(common.KvCacheEvent(stored=_stored(run)) for run in _runs(part))
            yield batch

    def changes(self, events: Iterable[BlockEvent]) -> Any:
        """Return the batch of events that followed each other."""
        batch = self._new_batch()
        for stored, alike in groupby(events, attrgetter("stored")):
            blocks = [event.block for event in alike]
            if stored:
                batch.events.extend(
                    common.KvCacheEvent(event_id=next(self._events), stored=_stored(run)) for run in _runs(blocks)
                )
                continue
            event = batch.events.add(event_id=next(self._events))
            event.removed.block_hashes.extend(block.key for block in blocks)
            event.removed.tier = common.KV_CACHE_TIER_DEVICE
        return batch

    def _new_batch(self) -> Any:
        # All workers are one rank, as in GetLoads.
        return common.KvEventBatch(sequence_number=next(self._batches), timestamp=time.time(), dp_rank=0)


def _runs(blocks: Iterable[FollowedBlock]) -> Iterator[list[FollowedBlock]]:
    """Yield blocks of which each follows the one before it."""
    run: list[FollowedBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].key:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _stored(run: Sequence[FollowedBlock]) -> Any:
    """Return the event of blocks of one sequence; their adapter as a request's lora_id names it."""
    first = run[0]
    adapter, _, digest = first.adapter.rpartition("/revisions/")
    return common.KvBlocksStored(
        blocks=[_block(block) for block in run],
        parent_block_hash=first.parent,
        tier=common.KV_CACHE_TIER_DEVICE,
        lora_name=(f"{adapter}@{digest}" if adapter else first.adapter) or None,
        cache_salt=first.tenant,
    )


def _block(block: FollowedBlock) -> Any:
    ids = array("I", block.token_ids)
    return common.KvBlock(block_hash=block.key, token_ids=ids, block_size=len(ids))
