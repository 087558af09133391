"""An engine whose next token is a hash of everything that it may depend on: real scheduler, blocks and slots, no model.

A token that is lost, repeated, out of order, or of another adapter changes every id after it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Collection, Container, Iterable
from collections.abc import Sequence as Ids
from dataclasses import fields
from hashlib import blake2b
from io import SEEK_END
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.contracts.artifacts.base_model import HASH_LABELS
from loraplex.contracts.artifacts.hash_model import VECTOR_SIZE, HashModel, parse_hash_model
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.contracts.grammars.matching import hash_vocabulary
from loraplex.contracts.grammars.prover import Prover
from loraplex.contracts.options import Encode, SamplingParams, TokenLogprobs
from loraplex.worker.engine.engine import Engine
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.grammars import GrammarThread
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine.scheduling.scheduler import Scheduler
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import (
    AdapterSource,
    EngineConfig,
    EngineLimits,
    Failure,
    Output,
    Removal,
    Speculation,
)

if TYPE_CHECKING:  # imported by the first grammar
    import numpy as np

# Numbers of a request that change the logits, and all others, which only choose among them; new fields are among these.
_ADJUSTING = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_OTHERS = ("logit_bias", "allowed_token_ids", "bad_word_ids", "processed_logprobs")
_DRAWING = tuple(declared.name for declared in fields(SamplingParams) if declared.name not in {*_ADJUSTING, *_OTHERS})
_FLOATS = frozenset(declared.name for declared in fields(SamplingParams) if declared.type == "float")


def hash_vector(model: HashModel, adapter_digest: str, ids: Iterable[int], encode: Encode) -> tuple[float, ...]:
    """Return the numbers of a text's vector, from -1 to 1; floats of 32 bits hold them exactly."""
    root = f"{model.seed}|{adapter_digest}|{encode.task}|{encode.pooling}|{encode.pair_tokens}|"
    size = VECTOR_SIZE if encode.task == "embed" else len(HASH_LABELS)
    state = blake2b(root.encode(), digest_size=size)
    state.update(id_bytes(ids))
    return tuple(byte / 128 - 1 for byte in state.digest())


def hash_root(model: HashModel, adapter_digest: str, sampling: SamplingParams, choice: int) -> blake2b:
    """Return the hash of everything but the ids.

    As with a real model, temperature, limits and seed leave greedy answers as they are.
    """
    root = f"{model.seed}|{adapter_digest}|{choice}|"
    if sampling.temperature:
        root += f"{_values(sampling, _DRAWING)}|"
    if sampling.adjusts_logits:
        root += f"{_values(sampling, _ADJUSTING)}|{[(token, _wired(value)) for token, value in sampling.logit_bias]}|"
    return blake2b(root.encode(), digest_size=8)


def _values(sampling: SamplingParams, names: Iterable[str]) -> list[float]:
    return [_wired(getattr(sampling, name)) if name in _FLOATS else getattr(sampling, name) for name in names]


def _wired(value: float) -> float:
    """Round a float to the 32 bits that it had on the wire."""
    return array("f", [value])[0]


def next_token(model: HashModel, state: blake2b, answered: int, banned: Collection[int]) -> int:
    """Return the token after `answered` tokens; the end token comes where end_after says and nowhere else."""
    span = model.vocab
    if model.end_after:
        span -= 1
        if answered + 1 == model.end_after and span not in banned:
            return span
    token = int.from_bytes(state.digest(), "little") % span
    while banned and token in banned:
        token = (token + 1) % span
    return token


def next_listed_token(
    model: HashModel, state: blake2b, answered: int, allowed: Collection[int], banned: Collection[int]
) -> int:
    """Return the token after `answered` tokens of the allowed ones, as `next_allowed_token` does."""
    import numpy as np

    return next_allowed_token(model, state, answered, np.array([one for one in allowed if one not in banned]))


def next_allowed_token(model: HashModel, state: blake2b, answered: int, allowed: np.ndarray) -> int:
    """Return the token after `answered` tokens of those that a grammar allows; there is one at least.

    The end token comes where end_after says, if it may, and where nothing else may.
    """
    if model.end_after:
        end = model.vocab - 1
        if answered + 1 == model.end_after and end in allowed:
            return end
        others = allowed[allowed != end]
        allowed = others if len(others) else allowed
    return int(allowed[int.from_bytes(state.digest(), "little") % len(allowed)])


def hash_logprobs(
    model: HashModel, token: int, number: int, alternatives: int, named: tuple[int, ...] = ()
) -> TokenLogprobs:
    """Return one of 16 log probabilities, chosen by `number`; the likeliest tokens are `token` and those after it."""
    logprob = -(number % 16 + 1) / 16
    if named:
        return TokenLogprobs(logprob, tuple((one, -((number + one) % 16 + 1) / 16) for one in named))
    likeliest = range(min(alternatives, model.vocab))
    return TokenLogprobs(logprob, tuple(((token + rank) % model.vocab, logprob - rank) for rank in likeliest))


def id_bytes(ids: Iterable[int]) -> bytes:
    """Return the ids as 32-bit numbers, to be hashed."""
    return array("I", ids).tobytes()


class IdsHash:
    """The hash of a sequence's ids, which grows with them: a token costs the same at any length."""

    def __init__(self, root: blake2b) -> None:
        self._state, self._count = root, 0

    def of(self, ids: Ids[int], drafted: Ids[int]) -> blake2b:
        """Return the hash of these ids, which begin with those of the call before, and of drafted ids after them."""
        self._state.update(id_bytes(ids[self._count :]))
        self._count = len(ids)
        if not drafted:
            return self._state
        state = self._state.copy()
        state.update(id_bytes(drafted))
        return state


def following(model: HashModel, sequence: Sequence, drafted: Ids[int]) -> tuple[int | Failure, blake2b]:
    """Return the token after a sequence's ids and drafted ones, and the hash of all of these."""
    spec, answered = sequence.spec, sequence.answered + len(drafted)
    if sequence.engine_state is None:
        digest = spec.adapter.digest if spec.adapter else ""
        digest += f"@{spec.invoked_at}" if spec.invoked_at else ""
        sequence.engine_state = IdsHash(hash_root(model, digest, spec.sampling, spec.choice))
    state: blake2b = sequence.engine_state.of(sequence.ids, drafted)
    banned = sequence.banned_ids(answered, drafted)
    if ids := spec.sampling.allowed_token_ids:
        return next_listed_token(model, state, answered, ids, banned), state
    grammar = sequence.grammar
    if grammar is None:
        return next_token(model, state, answered, banned), state
    if drafted:
        grammar = grammar.copy()
        if failure := grammar.replay(drafted):
            return failure, state
    allowed = grammar.allowed_ids(banned)
    return (next_allowed_token(model, state, answered, allowed) if len(allowed) else grammar.problem()), state


class HashDrafter:
    """Drafts tokens that are right with the model's probability `draft`: a Drafter that knows the answer."""

    def __init__(self, model: HashModel, tokens: int) -> None:
        self._model, self._tokens = model, tokens

    def propose(self, sequences: list[Sequence], rows: int, free: int) -> list[Ids[int]]:
        """See Drafter."""
        drafts = list[Ids[int]]()
        for sequence in sequences:
            drafts.append(self._draft(sequence, min(self._tokens, free)))
            free -= len(drafts[-1])
        return drafts

    def _draft(self, sequence: Sequence, tokens: int) -> list[int]:
        draft = list[int]()
        while len(draft) < tokens:
            token, state = following(self._model, sequence, draft)
            if isinstance(token, Failure):
                break
            wrong = state.digest()[-1] >= 256 * self._model.draft
            draft.append((token + wrong) % self._model.vocab)
        return draft

    def observe(self, batch: Batch) -> None:
        """See Drafter; as all that follow, without effect."""

    def learn(self, sequence: Sequence, checked: int, accepted: int) -> None:
        """See Drafter."""

    def end(self, sequence: Sequence) -> None:
        """See Drafter."""

    def forget_tenant(self, tenant: str, kept_adapters: Container[str], running: Iterable[Sequence]) -> Removal:
        """See Drafter."""
        return Removal()


# Maximum bytes of adapters in host memory by default; like blocks, these are counted and take no memory.
_HOST_BYTES = 1 << 30


class HashEngine(Engine[Scheduler]):
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
        if model.draft:
            scheduler.drafter = HashDrafter(model, (config.speculation or Speculation()).num_speculative_tokens)
        super().__init__(scheduler, adapters, grammars)

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
        for row in batch.rows:
            sequence, told = row.sequence, row.prompt_positions
            alternatives = sequence.spec.prompt_logprobs or 0
            for token in sequence.ids[told.start + 1 : told.stop + 1]:
                sequence.prompt_logprobs.append(hash_logprobs(self._model, token, token, alternatives))
        sampled = [self._next(row) for row in sampling]
        failures = {row: token for row, (token, _) in zip(sampling, sampled, strict=True) if isinstance(token, Failure)}
        ids = [token if isinstance(token, int) else -1 for token, _ in sampled]
        return self._scheduler.commit(batch, ids, [logprobs for _, logprobs in sampled], failures)

    def _next(self, row: Row) -> tuple[int | Failure, TokenLogprobs | None]:
        sequence, spec = row.sequence, row.sequence.spec
        if spec.encode:
            digest = spec.adapter.digest if spec.adapter else ""
            sequence.vector = hash_vector(self._model, digest, sequence.ids, spec.encode)
            return 0, None
        token, state = following(self._model, sequence, row.drafted)
        if isinstance(token, Failure) or spec.logprobs is None:
            return token, None
        number = state.digest()[spec.sampling.processed_logprobs]
        return token, hash_logprobs(self._model, token, number, spec.logprobs, spec.logprob_token_ids)


def _inject_fault(model: HashModel, batch: Batch) -> None:
    """Kill the process, or never return, where the batch has the token that the model is to fail on."""
    if model.die_on is not None and _has(batch, model.die_on):
        os.kill(os.getpid(), signal.SIGKILL)
    if model.hang_on is not None and _has(batch, model.hang_on):
        threading.Event().wait()


def _has(batch: Batch, token: int) -> bool:
    return any(token in row.known_ids for row in batch.rows)


def _limits(model: HashModel, config: EngineConfig) -> EngineLimits:
    """Return the limits; by default the blocks hold a whole context for every row, within reason."""
    context_blocks = -(-model.context // config.block_size)
    blocks = config.kv_blocks or max(context_blocks, min(config.rows * context_blocks, 1 << 14))
    return EngineLimits.of(config, blocks=blocks, context=model.context, vocab_size=model.vocab)


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
