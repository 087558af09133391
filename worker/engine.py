"""The engine over a transformers model: usable alone, in a script or a notebook.

engine = build_engine("path/to/model", rows=8)
engine.add(NewSequence("a", prompt_ids=(1, 2, 3), adapter=AdapterSource(digest, "path/to/adapter")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.lora.cache import AdapterCache
from worker.lora.layers import LoraLayers
from worker.lora.weights import AdapterWeights, read_adapter
from worker.model.errors import ModelUnusableError
from worker.model.kv_cache import KvCache, fitting_blocks
from worker.model.loader import LoadedModel, load_model
from worker.model.memory import available_bytes
from worker.model.packed import PackedWeight, pack_linears, packing_works
from worker.model.runner import Runner
from worker.scheduling.contract import EngineLimits, EngineStats, NewSequence, Output
from worker.scheduling.scheduler import Scheduler


class TorchEngine:
    """A transformers model as an Engine: continuous batching, a different adapter in every row."""

    def __init__(
        self, limits: EngineLimits, scheduler: Scheduler, runner: Runner, adapters: AdapterCache[AdapterWeights]
    ) -> None:
        self._limits = limits
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters

    @property
    def limits(self) -> EngineLimits:
        """What it can take."""
        return self._limits

    def add(self, sequence: NewSequence) -> None:
        """Take a sequence; starts loading its adapter where it is not resident. Raises SequenceRefusedError."""
        self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence and free all it holds, at once; unknown ids are ignored."""
        self._scheduler.abort(sequence_id)

    def has_work(self) -> bool:
        """Whether a step would do anything now (a sequence that waits for its adapter is no work)."""
        return self._scheduler.has_work()

    def step(self) -> list[Output]:
        """Run one step of the batch."""
        outputs = self._scheduler.poll()
        batch = self._scheduler.schedule()
        if batch is None:
            return outputs
        sampled = self._runner.run(batch)
        for sequence_id, failure in sampled.failures.items():
            outputs += self._scheduler.fail([sequence_id], failure)
        return outputs + self._scheduler.commit(batch, sampled.ids, sampled.logprobs)

    def stats(self) -> EngineStats:
        """What it holds now."""
        return self._scheduler.stats()

    def close(self) -> None:
        """End the adapters' thread. The memory goes with the engine."""
        self._adapters.close()


def build_engine(  # noqa: PLR0913 - one for each of the worker's settings
    model: str,
    device: str = "cpu",
    dtype: str = "auto",
    *,
    rows: int = 32,
    kv_blocks: int = 0,
    block_size: int = 16,
    adapter_slots: int = 32,
    max_rank: int = 64,
    step_tokens: int = 512,
    threads: int = 0,
    on_loaded: Callable[[], None] = lambda: None,
) -> TorchEngine:
    """Load a model directory and build an engine around it; zero blocks or threads: as fits.

    `on_loaded` is called from another thread when an adapter has been read and a step would let it in. Raises
    ModelUnusableError.
    """
    if threads > 0:
        torch.set_num_threads(threads)
    loaded = load_model(model, device, dtype)
    packs = loaded.device.type == "cpu" and packing_works(loaded.dtype)
    lora = LoraLayers(
        loaded.module, loaded.linears, adapter_slots, max_rank, loaded.device, PackedWeight if packs else None
    )
    if packs:
        pack_linears(loaded.module)
    blocks = kv_blocks or _fitting_blocks(loaded, rows, block_size, adapter_slots * max_rank)
    limits = EngineLimits(
        rows=rows,
        max_tokens=min(loaded.context_length, blocks * block_size),
        max_rank=max_rank,
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        blocks=blocks,
        adapter_slots=adapter_slots,
    )
    kv = loaded.kv
    cache = KvCache(
        kv.layers, kv.kv_heads, kv.key_dim, blocks, block_size, loaded.dtype, loaded.device, value_dim=kv.value_dim
    )
    adapters = AdapterCache(
        adapter_slots,
        lambda source: read_adapter(source.directory, loaded.linears, max_rank, loaded.dtype, loaded.device),
        lora.install,
        on_loaded,
    )
    scheduler = Scheduler(limits, loaded.end_token_ids, step_tokens, adapters)
    runner = Runner(loaded, cache, lora, rows, limits.max_tokens)
    return TorchEngine(limits, scheduler, runner, adapters)


def _fitting_blocks(loaded: LoadedModel, rows: int, block_size: int, adapter_ranks: int) -> int:
    available = available_bytes(loaded.device)
    if loaded.device.type == "cuda":
        # On the CPU a slot takes memory when it is written, and then what its adapter takes.
        features = sum(in_features + out_features for in_features, out_features in loaded.linears.values())
        available -= adapter_ranks * features * loaded.dtype.itemsize
    blocks = fitting_blocks(available, loaded.kv_token_bytes, block_size, rows, loaded.context_length, loaded.device)
    if blocks < 1:
        raise ModelUnusableError(
            f"no memory is left on {loaded.device} for the KV cache; use a smaller model, fewer adapter slots or ranks"
        )
    return blocks
