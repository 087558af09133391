"""The first steps of an engine on CUDA, which it runs before it serves: the largest ones that its limits allow.

They compile Triton's kernels, which takes up to two seconds each, load those of torch, and let libraries take their
workspaces. torch keeps the memory that they took for the steps to come: what is free afterwards the KV cache may have.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loraplex.contracts.artifacts.families import INT8
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine.attention.paged import KvCache
from loraplex.worker.engine.lora.weights import AdapterLayers
from loraplex.worker.engine.model.encoding import Encoding
from loraplex.worker.engine.model.loader import LoadedModel
from loraplex.worker.engine.model.runner import Runner
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import EngineConfig, ModelUnusableError, NewSequence

# Options that between them use all of sampling; rows take them by turns. With an adjusted row the logits are float32.
_PLAIN = (
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, top_n_sigma=3.0),
    SamplingParams(temperature=1.0, typical_p=0.9),
)
_ADJUSTED = (SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, logit_bias=((0, 1.0),)), *_PLAIN)
# Number of alternatives of each log probability.
_LOGPROBS = 20


def run_first_steps(
    loaded: LoadedModel, lora: AdapterLayers, encoding: Encoding, config: EngineConfig, *, again: bool = False
) -> None:
    """Run the largest step of each kind; `again`: the largest of all, once graphs are captured, which empties caches.

    Raises ModelUnusableError where one fails, or the memory is not enough.
    """
    int8 = config.kv_cache_dtype == INT8
    # All positions of all rows are in its scratch block: the numbers do not matter.
    cache = KvCache(
        loaded.kv, 1, config.block_size, loaded.dtype, loaded.device, int8=int8, batch_invariant=config.batch_invariant
    )
    runner = Runner(loaded, cache, lora, encoding, ahead=True)
    try:
        batches = _batches(loaded, cache, config)
        for batch in [max(batches, key=lambda one: one.tokens)] if again else batches:
            if runner.sample(runner.launch(batch)).failures:
                raise ModelUnusableError(f"no token could be sampled on {loaded.device}: the log above says why")
        torch.cuda.synchronize(loaded.device)
    except torch.OutOfMemoryError:
        raise ModelUnusableError(
            f"a step of --rows {config.rows} and --step-tokens {config.step_tokens} does not fit in the memory of "
            f"{loaded.device} beside the weights and the adapter slots; use fewer"
        ) from None
    finally:
        runner.close()


def _batches(loaded: LoadedModel, cache: KvCache, config: EngineConfig) -> list[Batch]:
    """Return the largest steps, and of a quantized model the largest of each tile of products, with its own kernels."""
    sizes = {config.step_tokens}
    if loaded.quantized is not None:
        from loraplex.worker.engine.quantized.cuda import TILES  # Triton is there only with CUDA

        sizes |= {min(tile.height, config.step_tokens) for tile in TILES}
    limits = (replace(config, step_tokens=tokens) for tokens in sorted(sizes))
    largest = [batch for one in limits for batch in _largest_batches(cache, loaded.context_length, one)]
    return largest + _late_batches(cache, loaded.context_length, config)


def _largest_batches(cache: KvCache, context: int, config: EngineConfig) -> list[Batch]:
    """Return steps of decode rows alone, and one of the most tokens, whose logits are all wanted."""
    slot, count = 0 if config.adapter_slots else -1, min(config.rows, config.step_tokens)

    def decode_rows(samplings: tuple[SamplingParams, ...]) -> list[Row]:
        slots = [-1] * (count // 2) + [slot] * (count - count // 2)
        return [_row(cache, samplings[index % len(samplings)], 1, 1, slot) for index, slot in enumerate(slots)]

    decodes = decode_rows(_ADJUSTED)[: min(config.rows - 1, config.step_tokens // 2)]
    left, longer = config.step_tokens - len(decodes), list[Row]()
    while left > 1:
        longer.append(_row(cache, _ADJUSTED[0], 0, min(left, context), slot))
        left -= longer[-1].count
    steps = [Batch(tuple(decode_rows(samplings)), count, count) for samplings in (_PLAIN, _ADJUSTED)]
    if longer:
        steps.append(Batch((*decodes, *longer), len(decodes), config.step_tokens - left))
    return steps


def _late_batches(cache: KvCache, context: int, config: EngineConfig) -> list[Batch]:
    """Return small steps behind a long context, whose attention has kernels of its own, and one behind none."""
    from loraplex.worker.engine.attention.kernels import CHUNK_SPLIT  # Triton is there only with CUDA

    if context <= CHUNK_SPLIT:
        return []
    slot, late = 0 if config.adapter_slots else -1, min(CHUNK_SPLIT, context - 2)
    spans = ((late, 1), (late, 2), (0, 2)) if config.step_tokens > 1 else ((late, 1),)
    rows = [_row(cache, _ADJUSTED[0], start, count, slot) for start, count in spans]
    return [Batch((row,), int(row.count == 1), row.count) for row in rows]


def _row(cache: KvCache, sampling: SamplingParams, start: int, count: int, slot: int) -> Row:
    """Return a row of a sequence of its own, all of whose blocks are the scratch block."""
    spec = NewSequence(
        "", (0,) * (start + count), sampling=sampling, stopping=StoppingParams(1),
        logprobs=_LOGPROBS, prompt_logprobs=_LOGPROBS if count > 1 else None,
    )  # fmt: skip
    sequence = Sequence(spec, 0, frozenset())
    sequence.adapter_slot = slot
    sequence.block_table = [cache.scratch_block] * -(-(start + count) // cache.block_size)
    return Row(sequence, start, count, samples=True)
