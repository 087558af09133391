"""An answer's events as the messages of an engine protocol, and the workers' prefix caches as those of KV events.

The protocols of smg's engines have alike messages for both: chunks, whole choices, log probabilities.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from loraplex.contracts.options import FinishReason, TokenLogprobs
from loraplex.engine_protocols.block_feed import MOST_AT_ONCE, BlockEvent, FollowedBlock
from loraplex.router.request import Delta, Finished, PromptLogprobs, Request, Summary


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


def made(kind: Any, **fields: Any) -> Any:
    """Return a message of a kind with those of the fields that it has; protocols differ in a few."""
    known = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: value for name, value in fields.items() if name in known})


class EngineAnswer:
    """The answer to one request, in the `messages` of a protocol; `streamed`: its tokens come in chunks too.

    `end` is the token that ends its reasoning, where that is counted.
    """

    def __init__(
        self, messages: Any, request: Request, prompt_ids: Sequence[int], *, streamed: bool, end: int | None = None
    ) -> None:
        self._engine = messages
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
                self._prompt_logprobs = self._of_prompt(self._prompt_ids[start:], event.tokens)
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
        return made(self._engine.GenerateResponse, request_id=self._request.request_id, **response)

    def _chunk(self, delta: Delta, choice: _Choice) -> Any:
        return made(
            self._engine.GenerateStreamChunk,
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(choice.ids),
            reasoning_tokens=choice.reasoning.tokens,
            output_logprobs=self._of_output(delta.token_ids, delta.logprobs),
            # In the first chunk of each choice.
            input_logprobs=self._prompt_logprobs if delta.offset == 0 else None,
            index=delta.choice,
        )

    def _complete(self, index: int, choice: _Choice, summary: Summary) -> Any:
        finished = choice.finished
        return made(
            self._engine.GenerateComplete,
            output_ids=choice.ids,
            finish_reason="length" if finished.reason is FinishReason.LENGTH else "stop",
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=len(choice.ids),
            reasoning_tokens=choice.reasoning.tokens,
            cached_tokens=summary.cached_tokens,
            output_logprobs=self._of_output(choice.ids, choice.logprobs),
            input_logprobs=self._prompt_logprobs,
            matched_token_id=finished.stop_token_id,
            matched_stop_str=finished.stop_string,
            index=index,
        )

    def _of_output(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        if not logprobs:
            return None
        return self._engine.OutputLogProbs(
            token_logprobs=[token.logprob for token in logprobs],
            token_ids=ids,
            top_logprobs=map(self._alternatives, logprobs),
        )

    def _of_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
        """Return the log probabilities of prompt tokens; the prompt's first token has none."""
        values = [self._engine.InputTokenLogProb(value=token.logprob) for token in logprobs]
        top = [*map(self._alternatives, logprobs)]
        first = len(ids) - len(values)
        return self._engine.InputLogProbs(
            token_logprobs=[self._engine.InputTokenLogProb()] * first + values,
            token_ids=ids,
            top_logprobs=[self._engine.TopLogProbs()] * first + top,
        )

    def _alternatives(self, token: TokenLogprobs) -> Any:
        return self._engine.TopLogProbs(
            values=[logprob for _, logprob in token.alternatives],
            token_ids=[token_id for token_id, _ in token.alternatives],
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
