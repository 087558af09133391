"""Builds an EncoderEngine from its configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from worker.engine.device.cores import keep_to_one_core, step_threads
from worker.engine.device.memory import host_adapter_bytes
from worker.engine.encoder.engine import EncoderEngine
from worker.engine.encoder.loader import LoadedEncoder, load_encoder
from worker.engine.encoder.runner import EncoderRunner
from worker.engine.encoder.scheduler import EncoderScheduler
from worker.engine.lora.adapter_memory import PackedAdapter, TorchAdapterMemory
from worker.engine.lora.weights import read_source
from worker.engine.model.model_layers import ModelLayers
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine.scheduling.loader_threads import LoaderThreads
from worker.engine_api import EngineConfig, EngineLimits

# Interval in seconds of the signs of life within a step: a text can't be cut, and a long one takes seconds.
_SIGN_S = 0.2


def build_encoder(
    config: EngineConfig,
    *,
    on_loaded: Callable[[], None] = lambda: None,
    on_begun: Callable[[str], None] = lambda sequence_id: None,
    on_progress: Callable[[], None] = lambda: None,
) -> EncoderEngine:
    """Load an encoder's directory and build an engine around it.

    `on_loaded` is called from another thread when an adapter has been read; `on_begun` before the first step of a text;
    `on_progress` now and then within a step. Raises ModelUnusableError.
    """
    loaded = load_encoder(config.model, config.device, config.dtype, config.quantize)
    base, adaptable = ModelLayers(loaded), {**loaded.linears, **loaded.ends}
    signs = _SignsOfLife(_SIGN_S, on_progress)
    runner = EncoderRunner(loaded, config.adapter_slots, config.max_rank, signs)
    adapters = AdapterCache[PackedAdapter](
        config.adapter_slots,
        TorchAdapterMemory(
            lambda source: read_source(source, adaptable, config.max_rank, base, loaded.family.model_type),
            runner.install,
            loaded.device,
            loaded.dtype,
        ),
        LoaderThreads(on_loaded, prepare=keep_to_one_core),
        host_adapter_bytes(config.host_adapter_bytes),
    )
    torch.set_num_threads(step_threads(loaded.parameters, config.threads))
    scheduler = EncoderScheduler(_limits(loaded, config), config.rows, config.step_tokens, adapters, on_begun)
    engine = EncoderEngine(scheduler, runner, adapters)
    signs.begin()
    return engine


def _limits(loaded: LoadedEncoder, config: EngineConfig) -> EngineLimits:
    # Rows of two steps: the texts of the next one wait while one runs, so that no step waits for a claim.
    rows = 2 * config.rows
    return EngineLimits(
        rows=rows,
        max_tokens=loaded.context_length,
        max_rank=config.max_rank,
        vocab_size=loaded.vocab_size,
        block_size=config.block_size,
        # Texts keep nothing from step to step: so many blocks, always free, hold whatever comes.
        blocks=rows * -(-loaded.context_length // config.block_size),
        adapter_slots=config.adapter_slots,
    )


class _SignsOfLife:
    """Calls `action` where it was not called for so long; not before the engine is there."""

    def __init__(self, interval_s: float, action: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._called_at = math.inf

    def begin(self) -> None:
        """Call `action` from now on."""
        self._called_at = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._called_at >= self._interval_s:
            self._called_at = now
            self._action()
