"""The step of an engine over a transformers model; usable alone, in a script or a notebook.

engine = build_engine(EngineConfig("path/to/model", rows=8))
engine.add_sequence(NewSequence("a", prompt_ids=(1, 2, 3), adapter=AdapterSource(digest, "path/to/adapter")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from loraplex.contracts.artifacts.checkpoint import read_small_file
from loraplex.contracts.artifacts.families import INT8
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.matching import Vocabulary, read_vocabulary, special_tokens
from loraplex.contracts.grammars.prover import Prover
from loraplex.worker.engine.attention.paged import KvCache, fitting_blocks
from loraplex.worker.engine.device import (
    available_bytes,
    is_out_of_memory,
    keep_to_one_core,
    make_current,
    return_freed_memory,
    step_threads,
)
from loraplex.worker.engine.engine import Engine
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.lora.rank_adapters import RankAdapters, SharedAdapterMemory
from loraplex.worker.engine.lora.weights import (
    AdapterLayers,
    MakeMemory,
    PackedAdapter,
    TorchAdapterMemory,
    adapter_cache,
)
from loraplex.worker.engine.lora.whole_layers import WholeLayers
from loraplex.worker.engine.model.encoding import Encoding
from loraplex.worker.engine.model.first_steps import run_first_steps
from loraplex.worker.engine.model.loader import LoadedModel, check_split, choose_dtype, device_of, lay_out, load_model
from loraplex.worker.engine.model.runner import Runner
from loraplex.worker.engine.parallel.group import RankGroup, leave_group, rank_device
from loraplex.worker.engine.sampling.step import InFlight
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.chunk_sizer import ChunkSizer
from loraplex.worker.engine.scheduling.drafts import make_drafter
from loraplex.worker.engine.scheduling.grammars import GrammarThread
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine.scheduling.scheduler import Scheduler
from loraplex.worker.engine_api import EngineConfig, EngineLimits, ModelUnusableError, NewSequence, Output
from loraplex.worker.sizing import slot_numbers

if TYPE_CHECKING:  # it needs msgspec, which may be missing where one device computes
    from loraplex.worker.engine.ranks import Followers, OnLost, RankEnd, Start

_log = logging.getLogger(__name__)
_A = TypeVar("_A")
_B = TypeVar("_B")


class TorchEngine(Engine[Scheduler]):
    """A transformers model as an Engine: continuous batching, a different adapter in every row.

    One that steps ahead launches a step before it collects the one before, so that the device never waits for the host,
    which schedules, lays out and reports meanwhile. Each step's ids are chosen once those before are collected.

        device            │      step 1      │      step 2      │      step 3 ...
        host     launch and sample 1, launch 2 │ collect 1, sample 2, launch 3 │ collect 2, sample 3, launch 4 ...
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        encoding: Encoding,
        adapters: AdapterCache[PackedAdapter],
        grammars: GrammarThread,
        chunk_sizer: ChunkSizer | None,
        *,
        ahead: bool,
        followers: Followers | None = None,
    ) -> None:
        super().__init__(scheduler, adapters, grammars)
        self._runner = runner
        self._followers = followers
        self._encoding = encoding
        self._chunk_sizer = chunk_sizer
        # Without stepping ahead this process computes, and its threads take parts of a step as they come: beside other
        # work the wall's time, and one thread's, depend on which of them must wait; their mean does not.
        self.now = time.monotonic if ahead else lambda: time.process_time() / torch.get_num_threads()
        self._ahead = ahead
        # The step that is to be collected, and when it was launched; when the last one was collected.
        self._in_flight: tuple[InFlight, float] | None = None
        self._collected_at = 0.0

    def add_sequence(self, sequence: NewSequence) -> None:
        """See Engine."""
        super().add_sequence(self._encoding.prepare(sequence))

    def has_work(self) -> bool:
        """See Engine."""
        return self._in_flight is not None or super().has_work()

    def step(self) -> list[Output]:
        """Launch one step of the batch and collect it; when running ahead, collect the previous one."""
        outputs = self._scheduler.take_arrivals()
        if self._in_flight is not None and self._scheduler.needs_ids_of(self._in_flight[0].batch):
            outputs += self._collect(*self._in_flight)
            self._in_flight = None
        batch, began = self._scheduler.schedule(), self.now()
        launched = self._within_memory(self._runner.launch, batch, batch, outputs)
        last, self._in_flight = self._in_flight, None
        if last is not None:
            outputs += self._collect(*last)
        step = self._within_memory(self._runner.sample, launched, batch, outputs)
        if step is not None:
            if self._ahead:
                self._in_flight = step, began
            else:
                outputs += self._collect(step, began)
        return outputs

    def _collect(self, step: InFlight, launched_at: float) -> list[Output]:
        sampled = step.collect()
        # A step begins when the one before it ends, at the earliest.
        began, self._collected_at = max(launched_at, self._collected_at), self.now()
        if self._chunk_sizer is not None:
            self._chunk_sizer.observe(step.batch, self._collected_at - began)
        if self._scheduler.drafter is not None:
            self._scheduler.drafter.observe(step.batch)
        return self._scheduler.commit(step.batch, sampled.ids, sampled.logprobs, sampled.failures)

    def _within_memory(
        self, launch: Callable[[_A], _B], argument: _A | None, batch: Batch | None, outputs: list[Output]
    ) -> _B | None:
        """Launch a part of a batch; None where there is none, or memory is not enough for it.

        Adds the outputs of sequences that end for that.
        """
        if argument is None or batch is None:
            return None
        try:
            return launch(argument)
        except Exception as error:
            # With several ranks the others would be left in the middle of the step.
            if self._followers is not None or not is_out_of_memory(error):
                raise
            _log.warning("memory is not enough for a step of %d rows, %d tokens", len(batch.rows), batch.tokens)
        # Only here, because the exception holds the frames of the failed step, and with them its tensors.
        outputs += self._scheduler.revoke(batch)
        return None

    def close(self) -> None:
        """See Engine."""
        self._runner.close()
        super().close()
        if self._followers is not None:
            self._followers.close()
            leave_group()


def build_engine(
    config: EngineConfig,
    *,
    ahead: bool | None = None,
    paced: bool = True,
    on_loaded: Callable[[], None] = lambda: None,
    on_begun: Callable[[str], None] = lambda sequence_id: None,
    on_lost: OnLost | None = None,
) -> TorchEngine:
    """Load a model directory and build an engine around it.

    `ahead`: schedule one step ahead; by default only on CUDA, because on the CPU the host computes and nothing is
    gained. `paced`: size prompt chunks by measured time (chunk_sizer.py); without, a step's rows do not depend on the
    clock. `on_loaded` is called from another thread when an adapter has been read and a step would let it in;
    `on_begun` before the first step of a sequence; `on_lost` when a rank has ended (default: this process ends).
    Raises ModelUnusableError.
    """
    with contextlib.ExitStack() as stack:
        followers = None
        if config.tensor_parallel > 1:
            from loraplex.worker.engine.ranks import Followers

            check_split(config)
            followers = Followers(config, on_lost)
            stack.callback(leave_group)
            stack.callback(followers.close)
        part = load_part(config, ahead=ahead, followers=followers)
        if followers is not None:
            followers.met()
        loaded = part.loaded
        make: MakeMemory = TorchAdapterMemory
        if followers is not None and loaded.split is not None:
            make = partial(SharedAdapterMemory, loaded.split, followers.install)
        config = replace(config, adapter_slots=part.limits.adapter_slots)
        adapters = adapter_cache(part.base, config, on_loaded, part.lora.install, part.encoding.install, make=make)
        chunk_sizer = ChunkSizer(config.itl_target_ms / 1000) if paced else None
        grammars = _grammars(loaded, on_loaded)
        # Again: the threads that were started set it to one.
        torch.set_num_threads(_threads(loaded, config))
        scheduler = Scheduler(
            part.limits, loaded.end_token_ids, config.step_tokens, adapters, chunk_sizer, on_begun, grammars=grammars
        )
        engine = TorchEngine(
            scheduler, part.runner, part.encoding, adapters, grammars, chunk_sizer,
            ahead=part.ahead, followers=followers,
        )  # fmt: skip
        scheduler.drafter = make_drafter(config.speculation, engine.now)
        stack.pop_all()
    return engine


@dataclass(frozen=True)
class LoadedPart:
    """A model that is ready to run, or this rank's part of it."""

    loaded: LoadedModel
    base: ModelLayers
    lora: AdapterLayers
    encoding: Encoding
    runner: Runner
    limits: EngineLimits
    ahead: bool


def load_part(
    config: EngineConfig, *, ahead: bool | None = None, followers: Followers | None = None, start: Start | None = None
) -> LoadedPart:
    """Load a model; of several ranks rank 0 has `followers`, and `start` is how another one was started.

    Raises ModelUnusableError.
    """
    group, device = None, config.device
    if config.tensor_parallel > 1:
        rank, store = (start.rank, start.store) if start else (0, followers.store if followers else "")
        device = rank_device(device, rank)
        group = RankGroup(rank, config.tensor_parallel, store, device_of(device))
    make_current(device_of(device))  # before the model loads, which launches kernels if it is quantized
    loaded = load_model(config.model, device, config.dtype, config.quantize, group, slot_ranks=_slot_ranks(config))
    torch.set_num_threads(_threads(loaded, config))
    loaded = choose_dtype(loaded, config.dtype)
    if loaded.device.type == "cuda" and config.fewer_slots:
        config = replace(config, adapter_slots=fitting_slots(loaded, config))
    base = WholeLayers(loaded) if loaded.split is not None else ModelLayers(loaded)
    lora = adapter_layers(loaded, config)
    encoding = Encoding(loaded, config.adapter_slots)
    on_cuda = loaded.device.type == "cuda"
    if on_cuda:
        run_first_steps(loaded, lora, encoding, config)
    blocks = _blocks(loaded, config)
    limits = EngineLimits.of(config, blocks=blocks, context=loaded.context_length, vocab_size=loaded.vocab_size)
    int8 = config.kv_cache_dtype == INT8
    cache = KvCache(
        loaded.kv, limits.blocks, limits.block_size, loaded.dtype, loaded.device, int8=int8,
        batch_invariant=config.batch_invariant,
    )  # fmt: skip
    ahead = on_cuda if ahead is None else ahead
    runner = Runner(loaded, cache, lora, encoding, ahead=ahead, send=followers.send if followers else None)
    if on_cuda:
        runner.capture_decodes(limits, graphs=config.graphs)
        run_first_steps(loaded, lora, encoding, config, again=True)
    else:
        runner.warm_up()
    return LoadedPart(loaded, base, lora, encoding, runner, limits, ahead)


def follow(end: RankEnd) -> int:
    """Run a rank from 1 on until rank 0 has gone; return the exit code."""
    from loraplex.worker.engine.ranks import Install, RunDecode, RunStep, Start

    part: LoadedPart | None = None
    for message, memory in end.messages():
        match message:
            case Start():
                try:
                    part = load_part(message.config, start=message)
                except ModelUnusableError as error:
                    end.refuse(error)
                    return 2
                adapters = RankAdapters(part.loaded, part.lora)
            case Install(shapes, slot):
                assert memory is not None, "it comes with its file"
                adapters.install(shapes, memory, slot)
            case RunStep(layout) | RunDecode(layout):
                assert part is not None, "it was started"
                part.runner.execute(layout)
    return 0


def _slot_ranks(config: EngineConfig) -> tuple[int, int]:
    """Return the ranks of a slot, for layers and for experts; without slots they are 0."""
    return (config.max_rank, config.max_expert_rank) if config.adapter_slots else (0, 0)


def fitting_slots(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return how many of the slots fit into half of the memory that the weights leave on this device; 1 at least."""
    layers = [(*sizes, 0) for sizes in loaded.linears.values()]
    numbers = slot_numbers([*layers, *loaded.experts.values()], *_slot_ranks(config))
    half = available_bytes(loaded.device) // 2
    slots = max(1, min(config.adapter_slots, half // (numbers * loaded.dtype.itemsize)))
    if loaded.split is not None:
        slots = loaded.split.group.least(slots)
    if slots < config.adapter_slots:
        _log.warning("memory holds %d adapter slots of rank %d: --max-rank may be lower", slots, config.max_rank)
    return slots


def _threads(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the number of threads of this rank's steps: ranks on the CPU share out the worker's."""
    return max(1, step_threads(loaded.parameters, config.threads) // config.tensor_parallel)


def adapter_layers(loaded: LoadedModel, config: EngineConfig) -> AdapterLayers:
    """Replace the model's linear layers by adaptable ones, as the device wants them. Raises ModelUnusableError."""
    module, device, dtype = loaded.module, loaded.device, loaded.dtype
    slots, max_rank = config.adapter_slots, config.max_rank
    if device.type == "cpu":
        lay_out(loaded)
        from loraplex.worker.engine.decoder.cpu import use_kernels  # numba is there only where the CPU computes
        from loraplex.worker.engine.lora.cpu import CpuLayers

        layers = CpuLayers(module, loaded.linears, slots, max_rank, dtype, loaded.ends, loaded.experts)
        if loaded.split is not None:
            loaded.split.join(module)
        use_kernels(module, loaded.attention, dtype, loaded.context_length)
        return layers
    # Triton is there only with CUDA
    from loraplex.worker.engine.decoder.cuda import use_kernels as use_cuda_kernels
    from loraplex.worker.engine.lora.cuda import adapt_linears
    from loraplex.worker.engine.lora.cuda_experts import adapt_experts

    try:
        linears = adapt_linears(module, loaded.linears, slots, max_rank, config.rows, device, dtype)
        if config.batch_invariant:
            linears.keep_low_tiles()
        cuda_layers: AdapterLayers = linears
        if loaded.experts and config.max_expert_rank:
            max_rank = config.max_expert_rank
            cuda_layers = adapt_experts(
                cuda_layers, module, loaded.experts, slots, max_rank, config.rows, device, dtype
            )
    except torch.OutOfMemoryError:
        raise ModelUnusableError(
            f"{slots} adapter slots of rank {max_rank} do not fit in the memory of {device}; use fewer, or a lower rank"
        ) from None
    if loaded.split is not None:
        loaded.split.join(module)
    use_cuda_kernels(module, dtype, loaded.context_length)
    if config.batch_invariant:
        from loraplex.worker.engine.decoder.invariant import use_invariant_products

        use_invariant_products(module)
    return cuda_layers


def _grammars(loaded: LoadedModel, on_compiled: Callable[[], None]) -> GrammarThread:
    """Return what compiles formats; a model without a tokenizer.json serves none."""

    def tokenizer() -> bytes:
        if not (loaded.directory / "tokenizer.json").is_file():
            raise GrammarError("format", "the model has no tokenizer.json, without which it serves no formats")
        return read_small_file(loaded.directory / "tokenizer.json")

    def vocabulary() -> Vocabulary:
        read = read_vocabulary(tokenizer(), loaded.vocab_size, loaded.end_token_ids)
        return_freed_memory()  # reading the file took half as much again
        return read

    grammars = GrammarThread(
        vocabulary,
        lambda: Prover(loaded.vocab_size, special_tokens(tokenizer())),
        LoaderThreads(on_compiled, threads=1, prepare=keep_to_one_core),
    )
    grammars.warm()
    return grammars


def _blocks(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the number of blocks of the KV cache. Raises ModelUnusableError where the memory does not hold so many."""
    # On CUDA the adapter slots and the memory of the largest step have been allocated before this; on the CPU an empty
    # slot takes no memory.
    available = available_bytes(loaded.device)
    group = loaded.split.group if loaded.split is not None else None
    if group is not None and loaded.device.type == "cpu":
        available //= group.ranks
    token_bytes = loaded.kv.token_bytes(loaded.dtype.itemsize, config.kv_cache_dtype)
    if config.kv_blocks:
        held = available // (token_bytes * config.block_size)
        if config.kv_blocks > held:
            raise ModelUnusableError(
                f"--kv-blocks: {config.kv_blocks} blocks of {config.block_size} tokens do not fit in the memory of "
                f"{loaded.device}, which holds {held}; use fewer, or 0 for as many as fit"
            )
        return config.kv_blocks
    blocks = fitting_blocks(
        available, token_bytes, config.block_size, config.rows, loaded.context_length, loaded.device
    )
    if group is not None:
        blocks = group.least(blocks)
    if blocks < 1:
        raise ModelUnusableError(
            f"no memory is left on {loaded.device} for the KV cache; use a smaller model, fewer adapter slots or ranks"
        )
    return blocks
