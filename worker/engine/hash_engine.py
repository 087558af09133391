"""An engine whose next token is a hash of all that it may depend on: the real scheduler, blocks and slots, no model.

A token that is lost, repeated, out of order, or of another adapter changes every id after it; `expected_ids` tells what
they must be.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable
from io import SEEK_END
from pathlib import Path
from typing import Protocol

from artifacts.hash_model import HashModel, parse_hash_model
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE
from worker.engine.adapter_cache.loading import LoaderThreads
from worker.engine.adapter_cache.operated_cache import OperatedCache
from worker.engine.scheduling.batch import Batch
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.sequence import Sequence
from worker.engine_api import (
    AdapterSource,
    EngineConfig,
    EngineLimits,
    EngineStats,
    NewSequence,
    Output,
    Sampling,
    Stopping,
    TokenLogprobs,
)

# Of adapters in host memory when nobody says; like blocks, they are counted and take no memory.
_HOST_BYTES = 1 << 30


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


class HashEngine:
    """The hash model as an Engine. `on_loaded` is called from another thread when an adapter has been loaded;
    `on_begun` before the first step of a sequence.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_loaded: Callable[[], None] = lambda: None,
        on_begun: Callable[[str], None] = lambda sequence_id: None,
    ) -> None:
        """Raises ArtifactError where `config.model` names no hash model."""
        self._model = model = parse_hash_model(config.model)
        self._limits = _limits(model, config)
        self._step_s = model.step_ms / 1000
        self._adapters = OperatedCache[int](
            config.adapter_slots,
            HashAdapterMemory(),
            LoaderThreads(on_loaded),
            config.host_adapter_bytes or _HOST_BYTES,
        )
        self._scheduler = Scheduler(
            self._limits, model.end_token_ids, config.step_tokens, self._adapters, on_begun=on_begun
        )

    @property
    def limits(self) -> EngineLimits:
        """What it can take."""
        return self._limits

    def add(self, sequence: NewSequence) -> None:
        """Take a sequence. Raises SequenceRefusedError."""
        self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence; unknown ids are ignored."""
        self._scheduler.abort(sequence_id)

    def warm(self, adapter: AdapterSource) -> None:
        """Bring an adapter into a slot as soon as nobody who waits needs it."""
        self._adapters.warm(adapter)

    def pin(self, adapter: AdapterSource) -> None:
        """The same, and it stays there. Raises ValueError where no slot would be left for others."""
        self._adapters.keep(adapter)

    def unpin(self, digest: str) -> None:
        """It may leave again."""
        self._adapters.let_go(digest)

    def has_work(self) -> bool:
        """Whether a step would do anything now."""
        return self._scheduler.has_work()

    def step(self) -> list[Output]:
        """Run one step; with a batch it takes the model's step_ms."""
        began = time.monotonic()
        outputs = self._scheduler.poll()
        batch = self._scheduler.schedule()
        if batch:
            _go_wrong(self._model, batch)
            sampled = [self._next(row.sequence) for row in batch.rows if row.samples]
            outputs += self._scheduler.commit(batch, [token for token, _ in sampled], [told for _, told in sampled])
            if self._step_s:
                time.sleep(max(0.0, began + self._step_s - time.monotonic()))
        return outputs

    def stats(self) -> EngineStats:
        """What it holds now."""
        return self._scheduler.stats()

    def close(self) -> None:
        """End the loader thread."""
        self._adapters.close()

    def _next(self, sequence: Sequence) -> tuple[int, TokenLogprobs | None]:
        # The hash of all ids so far stays with the sequence, so that a token costs the same at any length.
        state: _Hash | None = sequence.engine_state
        if state is None:
            spec = sequence.spec
            digest = spec.adapter.digest if spec.adapter else ""
            state = sequence.engine_state = _root(self._model, digest, spec.sampling, spec.choice)
            state.update(_id_bytes(sequence.ids))
        token = _token(self._model, state, sequence.answered, sequence.banned_ids(sequence.answered))
        told = None
        if sequence.spec.logprobs is not None:
            told = _logprobs(self._model, token, state.digest()[0], sequence.spec.logprobs)
        for position in sequence.missing_prompt_logprobs:
            known = sequence.ids[position + 1]
            sequence.prompt_logprobs.append(_logprobs(self._model, known, known, sequence.spec.prompt_logprobs or 0))
        state.update(_id_bytes((token,)))
        return token, told


def _go_wrong(model: HashModel, batch: Batch) -> None:
    """What a fault of a model's kernel does: the process is gone, or its step never ends, and it tells nobody why."""
    if model.die_on is not None and _has(batch, model.die_on):
        os.kill(os.getpid(), signal.SIGKILL)
    if model.hang_on is not None and _has(batch, model.hang_on):
        threading.Event().wait()


def _has(batch: Batch, token: int) -> bool:
    return any(token in row.sequence.ids[row.start : row.start + row.count] for row in batch.rows)


def _limits(model: HashModel, config: EngineConfig) -> EngineLimits:
    """Return the limits; by default the blocks hold a whole context for every row, within reason."""
    context_blocks = -(-model.context // config.block_size)
    return EngineLimits(
        rows=config.rows,
        max_tokens=model.context,
        max_rank=config.max_rank,
        vocab_size=model.vocab,
        block_size=config.block_size,
        blocks=config.kv_blocks or max(context_blocks, min(config.rows * context_blocks, 1 << 14)),
        adapter_slots=config.adapter_slots,
    )


def expected_ids(
    spec: str,
    prompt_ids: Iterable[int],
    *,
    adapter_digest: str = "",
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    choice: int = 0,
) -> tuple[int, ...]:
    """The whole answer of the model `spec` (`hash:?...`), ending token included. Raises ArtifactError."""
    model = parse_hash_model(spec)
    stopping = stopping or Stopping()
    ends = set() if stopping.ignore_eos else set(model.end_token_ids)
    ends |= set(stopping.stop_token_ids)
    state = _root(model, adapter_digest, sampling or Sampling(), choice)
    state.update(_id_bytes(prompt_ids))
    answer: list[int] = []
    while len(answer) < stopping.max_tokens:
        may_end = len(answer) >= stopping.min_tokens
        token = _token(model, state, len(answer), () if may_end else ends)
        answer.append(token)
        if may_end and token in ends:
            break
        state.update(_id_bytes((token,)))
    return tuple(answer)


def _root(model: HashModel, adapter_digest: str, sampling: Sampling, choice: int) -> _Hash:
    """The hash of everything but the ids. As with any model, what only shapes noise does not touch greedy answers."""
    root = f"{model.seed}|{adapter_digest}|{choice}|"
    if sampling.temperature:
        limits = _wired(sampling.temperature, sampling.top_p, sampling.min_p, sampling.typical_p)
        root += f"{limits}|{sampling.top_k}|{sampling.seed}|"
    if sampling.adjusts_logits:
        penalties = _wired(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        bias = [(token, *_wired(value)) for token, value in sampling.logit_bias]
        root += f"{penalties}|{bias}|"
    return hashlib.blake2b(root.encode(), digest_size=8)


def _wired(*floats: float) -> list[float]:
    """Floats with the 32 bits that they had on the wire."""
    return array("f", floats).tolist()


def _token(model: HashModel, state: _Hash, answered: int, banned: Collection[int]) -> int:
    """The token after `answered` tokens of the answer; the end token comes where end_after says and nowhere else."""
    span = model.vocab
    if model.end_after:
        span -= 1
        if answered + 1 == model.end_after and span not in banned:
            return span
    token = int.from_bytes(state.digest(), "little") % span
    while banned and token in banned:
        token = (token + 1) % span
    return token


def _logprobs(model: HashModel, token: int, number: int, alternatives: int) -> TokenLogprobs:
    """One of 16 log probabilities, by `number`; the likeliest tokens are this one and those after it."""
    logprob = -(number % 16 + 1) / 16
    likeliest = range(min(alternatives, model.vocab))
    return TokenLogprobs(logprob, tuple(((token + rank) % model.vocab, logprob - rank) for rank in likeliest))


def _id_bytes(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


class HashAdapterMemory:
    """Adapters of which nothing is kept but their size in bytes; see
    worker.engine.adapter_cache.loading.AdapterMemory.
    """

    stages = False

    def read(self, source: AdapterSource) -> int:
        """The bytes of its files, which must be readable."""
        size = 0
        for part in source.summands:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                with (Path(part.directory) / name).open("rb") as file:
                    size += file.seek(0, SEEK_END)
        return size

    def stage(self, prepared: int) -> int:
        """There is no device."""
        return prepared

    def install(self, prepared: int, slot: int) -> None:
        """Nothing to copy."""

    def size(self, prepared: int) -> int:
        """Bytes as stored."""
        return prepared
