"""The engine over a transformers model: usable alone, in a script or a notebook.

engine = build_engine("path/to/model", rows=8)
engine.add(NewSequence("a", prompt_ids=(1, 2, 3), adapter=AdapterSource(digest, "path/to/adapter")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from worker.engine.adapter_cache.loading import LoaderThreads
from worker.engine.adapter_cache.operated_cache import OperatedCache
from worker.engine.attention.kv_cache import KvCache, fitting_blocks
from worker.engine.device.cores import keep_to_one_core
from worker.engine.device.memory import available_bytes
from worker.engine.device.out_of_memory import is_out_of_memory
from worker.engine.lora.adapter_layers import AdapterLayers
from worker.engine.lora.adapter_memory import PackedAdapter, TorchAdapterMemory
from worker.engine.lora.weights import read_source
from worker.engine.model.errors import ModelUnusableError
from worker.engine.model.loader import LoadedModel, load_model
from worker.engine.model.model_layers import ModelLayers
from worker.engine.model.packed import pack_linears, packing_works
from worker.engine.model.runner import Runner
from worker.engine.sampling.step import InFlight
from worker.engine.scheduling.batch import Batch
from worker.engine.scheduling.chunk_sizer import ChunkSizer, StepTimer
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine_api import AdapterSource, EngineLimits, EngineStats, NewSequence, Output

# Of the available memory, kept for adapters when nobody says how much.
_HOST_ADAPTER_SHARE = 8
# What torch would use; an engine that was built earlier may have set less.
_CORES = torch.get_num_threads()
# Below so many parameters one thread is as fast, and does not wait for another that the machine lets wait: 5 M of them
# made 250 tokens/s with one thread, and 27 with two beside other work. With 28 M two are nearly twice as fast.
_ONE_CORE_PARAMETERS = 16_000_000

_log = logging.getLogger(__name__)


class TorchEngine:
    """A transformers model as an Engine: continuous batching, a different adapter in every row.

    One that steps ahead gives the device a step before it collects the one before: so the device never waits for the
    host, which schedules, lays out and reports meanwhile.

        device            │      step 1      │      step 2      │      step 3 ...
        host     launch 1, launch 2 │ collect 1, launch 3 │ collect 2, launch 4 ...
    """

    def __init__(
        self,
        limits: EngineLimits,
        scheduler: Scheduler,
        runner: Runner,
        adapters: OperatedCache[PackedAdapter],
        chunk_sizer: ChunkSizer | None,
        *,
        ahead: bool,
    ) -> None:
        self._limits = limits
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters
        self._chunk_sizer = chunk_sizer
        self._timer = StepTimer()
        self._ahead = ahead
        self._in_flight: InFlight | None = None

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
        """Whether a step would do anything now (a sequence that waits for its adapter is no work)."""
        return self._in_flight is not None or self._scheduler.has_work()

    def step(self) -> list[Output]:
        """Launch one step of the batch, and collect it, or, stepping ahead, the one before it."""
        outputs = self._scheduler.poll()
        batch = self._scheduler.schedule()
        step = self._launch(batch, outputs) if batch else None
        if self._ahead:
            step, self._in_flight = self._in_flight, step
        if step is not None:
            sampled = step.collect()
            seconds = self._timer.collected(time.monotonic())
            if self._chunk_sizer is not None:
                self._chunk_sizer.observe(step.batch, seconds)
            outputs += self._scheduler.commit(step.batch, sampled.ids, sampled.logprobs, sampled.failures)
        return outputs

    def _launch(self, batch: Batch, outputs: list[Output]) -> InFlight | None:
        """None where memory is not enough for this batch; sequences that end of it come among the outputs."""
        began = time.monotonic()
        try:
            step = self._runner.launch(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("memory is not enough for a step of %d rows, %d tokens", len(batch.rows), batch.tokens)
        else:
            self._timer.launched(began)
            return step
        # Not before here: the exception holds the frames of the failed step, and with them its tensors.
        outputs += self._scheduler.revoke(batch)
        return None

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
    host_adapter_bytes: int = 0,
    max_rank: int = 64,
    step_tokens: int = 512,
    threads: int = 0,
    ahead: bool | None = None,
    paced: bool = True,
    on_loaded: Callable[[], None] = lambda: None,
    on_begun: Callable[[str], None] = lambda sequence_id: None,
) -> TorchEngine:
    """Load a model directory and build an engine around it; zero blocks, bytes or threads: as fits.

    `ahead`: schedule one step ahead; unless said, on CUDA, since on the CPU the host computes and nothing is gained.
    `paced`: chunks are as long as measured time allows (chunk_sizer.py); else a step's rows do not depend on the clock.
    `on_loaded` is called from another thread when an adapter has been read and a step would let it in; `on_begun`
    before the first step of a sequence. Raises ModelUnusableError.
    """
    loaded = load_model(model, device, dtype)
    small = sum(parameter.numel() for parameter in loaded.module.parameters()) < _ONE_CORE_PARAMETERS
    # The kernels on CUDA know nothing of embeddings and the output head.
    adaptable = {**loaded.linears, **(loaded.ends if loaded.device.type == "cpu" else {})}
    base = ModelLayers(loaded)
    lora = adapter_layers(loaded, adapter_slots, max_rank, rows)
    blocks = kv_blocks or _fitting_blocks(loaded, rows, block_size)
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
    adapters = OperatedCache[PackedAdapter](
        adapter_slots,
        TorchAdapterMemory(
            lambda source: read_source(source, adaptable, max_rank, base),
            lora.install,
            loaded.device,
            loaded.dtype,
        ),
        LoaderThreads(on_loaded, prepare=keep_to_one_core),
        host_adapter_bytes or available_bytes(torch.device("cpu")) // _HOST_ADAPTER_SHARE,
    )
    torch.set_num_threads(threads or (1 if small else _CORES))
    chunk_sizer = ChunkSizer() if paced else None
    scheduler = Scheduler(limits, loaded.end_token_ids, step_tokens, adapters, chunk_sizer, on_begun)
    if ahead is None:
        ahead = loaded.device.type == "cuda"
    runner = Runner(loaded, cache, lora, rows, limits.max_tokens, ahead=ahead)
    return TorchEngine(limits, scheduler, runner, adapters, chunk_sizer, ahead=ahead)


def adapter_layers(loaded: LoadedModel, slots: int, max_rank: int, rows: int) -> AdapterLayers:
    """Replace the model's linear layers by adaptable ones, as the device wants them. Raises ModelUnusableError."""
    module, device, dtype = loaded.module, loaded.device, loaded.dtype
    if device.type == "cpu":
        if packing_works(dtype):
            pack_linears(module)
        from worker.engine.lora.cpu.layers import CpuLayers  # numba is there only where the CPU computes

        return CpuLayers(module, loaded.linears, slots, max_rank, dtype, loaded.ends)
    from worker.engine.lora.cuda.layers import CudaLayers  # Triton is there only with CUDA

    # Triton launches on the thread's current device.
    torch.cuda.set_device(device)
    try:
        return CudaLayers(module, loaded.linears, slots, max_rank, rows, device, dtype)
    except torch.OutOfMemoryError:
        raise ModelUnusableError(
            f"{slots} adapter slots of rank {max_rank} do not fit in the memory of {device}; use fewer, or a lower rank"
        ) from None


def _fitting_blocks(loaded: LoadedModel, rows: int, block_size: int) -> int:
    # What adapters take is taken already on CUDA; on the CPU a slot takes none of its own.
    available = available_bytes(loaded.device)
    blocks = fitting_blocks(available, loaded.kv_token_bytes, block_size, rows, loaded.context_length, loaded.device)
    if blocks < 1:
        raise ModelUnusableError(
            f"no memory is left on {loaded.device} for the KV cache; use a smaller model, fewer adapter slots or ranks"
        )
    return blocks
