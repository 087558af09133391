"""An engine whose next token is a hash of everything that it may depend on: real scheduler, blocks and slots, no model.

A token that is lost, repeated, out of order, or of another adapter changes every id after it;
`hash_tokens.expected_ids` tells what they must be.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from io import SEEK_END
from pathlib import Path

from artifacts.grammars.prover import Prover
from artifacts.grammars.vocabulary import hash_vocabulary
from artifacts.hash_model import HashModel, parse_hash_model
from artifacts.revision import CONFIG_FILE, WEIGHTS_FILE
from worker.engine.hash_tokens import (
    Hash,
    hash_logprobs,
    hash_root,
    hash_vector,
    id_bytes,
    next_allowed_token,
    next_token,
)
from worker.engine.scheduled_engine import ScheduledEngine
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine.scheduling.grammars import GrammarThread
from worker.engine.scheduling.loader_threads import LoaderThreads
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.sequence import Batch, Row, Sequence
from worker.engine_api import AdapterSource, Failure, Output, TokenLogprobs
from worker.engine_api.config import EngineConfig, EngineLimits

# Maximum bytes of adapters in host memory by default; like blocks, these are counted and take no memory.
_HOST_BYTES = 1 << 30


class HashEngine(ScheduledEngine[Scheduler]):
    """The hash model as an Engine. `on_loaded` is called from another thread when an adapter has been loaded;
    `on_begun` before the first step of a sequence.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_loaded: Callable[[], None] = lambda: None,
        on_begun: Callable[[str], None] = lambda sequence_id: None,
    ) -> None:
        """Build the engine from the model's options. Raises ArtifactError if `config.model` names no hash model."""
        self._model = model = parse_hash_model(config.model)
        limits = _limits(model, config)
        self._step_s = model.step_ms / 1000
        adapters = AdapterCache[int](
            config.adapter_slots,
            HashAdapterMemory(),
            LoaderThreads(on_loaded),
            config.host_adapter_bytes or _HOST_BYTES,
        )
        grammars = GrammarThread(
            lambda: hash_vocabulary(model), lambda: Prover(model.vocab, {}), LoaderThreads(on_loaded, threads=1)
        )
        scheduler = Scheduler(
            limits, model.end_token_ids, config.step_tokens, adapters, on_begun=on_begun, grammars=grammars
        )
        super().__init__(limits, scheduler, adapters, grammars)

    def step(self) -> list[Output]:
        """Run one step; with a batch it takes the model's step_ms."""
        began = time.monotonic()
        outputs = self._scheduler.take_arrivals()
        batch = self._scheduler.schedule()
        if batch:
            _inject_fault(self._model, batch)
            outputs += self._commit(batch, [row for row in batch.rows if row.samples])
            if self._step_s:
                time.sleep(max(0.0, began + self._step_s - time.monotonic()))
        return outputs

    def _commit(self, batch: Batch, sampling: list[Row]) -> list[Output]:
        sampled = [self._next(row.sequence) for row in sampling]
        failures = {row: token for row, (token, _) in zip(sampling, sampled, strict=True) if isinstance(token, Failure)}
        ids = [token if isinstance(token, int) else -1 for token, _ in sampled]
        return self._scheduler.commit(batch, ids, [logprobs for _, logprobs in sampled], failures)

    def _next(self, sequence: Sequence) -> tuple[int | Failure, TokenLogprobs | None]:
        if encode := sequence.spec.encode:
            digest = sequence.spec.adapter.digest if sequence.spec.adapter else ""
            sequence.vector = hash_vector(self._model, digest, sequence.ids, encode)
            return 0, None
        # The hash of all ids so far stays with the sequence, so that a token costs the same at any length.
        state: Hash | None = sequence.engine_state
        if state is None:
            spec = sequence.spec
            digest = spec.adapter.digest if spec.adapter else ""
            state = sequence.engine_state = hash_root(self._model, digest, spec.sampling, spec.choice)
            state.update(id_bytes(sequence.ids))
        banned = sequence.banned_ids(sequence.answered)
        grammar = sequence.grammar
        if grammar is not None:
            allowed = grammar.allowed_ids(banned)
            if not len(allowed):
                return grammar.problem(), None
            token = next_allowed_token(self._model, state, sequence.answered, allowed)
        else:
            token = next_token(self._model, state, sequence.answered, banned)
        logprobs = None
        if sequence.spec.logprobs is not None:
            logprobs = hash_logprobs(self._model, token, state.digest()[0], sequence.spec.logprobs)
        for position in sequence.missing_prompt_logprobs:
            following = sequence.ids[position + 1]
            alternatives = sequence.spec.prompt_logprobs or 0
            sequence.prompt_logprobs.append(hash_logprobs(self._model, following, following, alternatives))
        state.update(id_bytes((token,)))
        return token, logprobs


def _inject_fault(model: HashModel, batch: Batch) -> None:
    """Kill the process, or never return, where the batch has the token that the model is to fail on."""
    if model.die_on is not None and _has(batch, model.die_on):
        os.kill(os.getpid(), signal.SIGKILL)
    if model.hang_on is not None and _has(batch, model.hang_on):
        threading.Event().wait()


def _has(batch: Batch, token: int) -> bool:
    return any(token in row.sequence.ids[row.start : row.start + row.count] for row in batch.rows)


def _limits(model: HashModel, config: EngineConfig) -> EngineLimits:
    """Return the limits; by default the blocks hold a whole context for every row, within reason."""
    context_blocks = -(-model.context // config.block_size)
    blocks = config.kv_blocks or max(context_blocks, min(config.rows * context_blocks, 1 << 14))
    return EngineLimits(
        rows=config.rows,
        max_tokens=min(model.context, blocks * config.block_size),
        max_rank=config.max_rank,
        vocab_size=model.vocab,
        block_size=config.block_size,
        blocks=blocks,
        adapter_slots=config.adapter_slots,
    )


class HashAdapterMemory:
    """Adapters of which only the size in bytes is kept: an AdapterMemory without memory."""

    transfers = False

    def read(self, source: AdapterSource) -> int:
        """Return the size of the adapter's files, which must be readable."""
        size = 0
        for part in source.summands:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                with (Path(part.directory) / name).open("rb") as file:
                    size += file.seek(0, SEEK_END)
        return size

    def transfer(self, prepared: int) -> int:
        """Return the adapter as it is: there is no device."""
        return prepared

    def install(self, prepared: int, slot: int) -> None:
        """Copy nothing."""

    def size(self, prepared: int) -> int:
        """Return the bytes as stored."""
        return prepared
