"""Launches the scheduler's batches, one after the other, into the model.

A launch hands the device a step up to its logits and returns; `sample` adds what chooses the next ids. The next launch
may come before the ids that this one sampled have been collected: ids that are placeholders are then taken, on the
device, from the launch before. They are collected before the next sampling, whose penalties and grammars need them:

    device    │ logits of step 1, its ids │ logits of step 2, its ids │ ...
    host      launch 1, sample 1, launch 2, collect 1, sample 2, launch 3, collect 2 ...

The order of one stream keeps all that a launch reads from the host, and the buffers that it overwrites, safe from the
next launch: see worker/engine/device.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.worker.engine.attention.paged import AttentionPlan, AttentionStep, KvCache, RowBlocks
from loraplex.worker.engine.device import upload
from loraplex.worker.engine.lora.weights import AdapterLayers
from loraplex.worker.engine.model.encoding import Encoding
from loraplex.worker.engine.model.layouts import (
    DecodeLayout,
    Layout,
    Placeholders,
    StepLayout,
    decode_layout,
    step_layout,
)
from loraplex.worker.engine.model.loader import LoadedModel
from loraplex.worker.engine.sampling.sampler import NO_MASKS, MaskFiller, Masks, best_of_rows, forbid_ids
from loraplex.worker.engine.sampling.step import InFlight, PendingVector, launch_sampling
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine_api import CaptureFailedError, EngineLimits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`input_ids` and `position_ids` are [1, tokens]; `logit_places` indexes the tokens whose logits are needed.

    These are, row after row, its prompt_positions and, where it samples, its last token.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_places: Tensor
    attention: AttentionStep


def step_inputs(layout: StepLayout, cache: KvCache, device: torch.device) -> StepInputs:
    """Return a layout's inputs. Ids that are placeholders are left 0."""
    ids, positions, slots = upload(layout.tokens[:, None], device).unbind()
    attention = AttentionStep(cache, slots[0], _plan(layout, cache, device))
    return StepInputs(ids, positions, upload(layout.logit_places, device, torch.int64), attention)


def _plan(layout: StepLayout, cache: KvCache, device: torch.device) -> AttentionPlan:
    if device.type == "cuda":
        from loraplex.worker.engine.attention.cuda import triton_plan  # Triton is there only with CUDA

        return triton_plan(layout.rows, layout.decodes, cache, device)
    from loraplex.worker.engine.attention.cpu import cpu_plan  # numba is there only where the CPU computes

    return cpu_plan(layout.rows, cache)


class DecodeBuffers:
    """The inputs of decode steps at fixed addresses, padded to a few batch sizes, so that CUDA graphs can hold them.

        row      0   1   2 │ padding
        id       17  5   9 │ 0        its logits are dropped
        position 40  7   3 │ 0
        slot     ..  ..  ..│ the scratch block's first
        blocks   ..  ..  ..│ scratch, scratch, ...

    They hold up to `rows` rows of up to `max_tokens` positions each; `sizes` are the batch sizes padded to.
    """

    def __init__(self, rows: int, max_tokens: int, cache: KvCache, device: torch.device) -> None:
        self.sizes = padded_sizes(rows)
        self._cache = cache
        blocks = -(-max_tokens // cache.block_size)
        # Ids, positions, slots. Filled as padding, so that a step can be captured before there is a sequence.
        self._tokens = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._tokens[2] = cache.scratch_block * cache.block_size
        self._tables = torch.full((rows, blocks), cache.scratch_block, dtype=torch.int32, device=device)
        self._logit_places = torch.arange(rows, device=device)

    def lay_out(self, rows: Sequence[Row], sampled: Sequence[Row]) -> DecodeLayout:
        """Lay out decode rows; see decode_layout."""
        return decode_layout(rows, self.sizes, self._cache.block_size, self._cache.scratch_block, sampled)

    def fill(self, layout: DecodeLayout) -> int:
        """Take a layout; returns the size that it is padded to.

        A step may still read the buffers meanwhile: see worker/engine/device.py.
        """
        size, tables = int(layout.tokens.shape[1]), layout.tables
        self._tokens[:, :size].copy_(upload(layout.tokens, self._tokens.device))
        # Values of earlier steps beyond these columns are beyond the rows' positions, where attention does not look.
        self._tables[:size, : tables.shape[1]].copy_(upload(tables, self._tables.device, torch.int32))
        return size

    @property
    def input_ids(self) -> torch.Tensor:
        """Return the ids [rows] of the step to come."""
        return self._tokens[0]

    def inputs(self, size: int) -> StepInputs:
        """Return the step of that size: views of the buffers, at the same addresses every time."""
        ids, positions, slots = self._tokens[:, :size].unbind()
        step = AttentionStep(self._cache, slots, self._plan(size))
        return StepInputs(ids[None], positions[None], self._logit_places[:size], step)

    def _plan(self, size: int) -> AttentionPlan:
        tables, positions = self._tables[:size], self._tokens[1, :size]
        if tables.device.type == "cuda":
            from loraplex.worker.engine.attention.cuda import DecodeRows, TritonPlan  # Triton is there only with CUDA

            return TritonPlan(DecodeRows(tables, positions), None)
        from loraplex.worker.engine.attention.cpu import cpu_plan  # and numba only where the CPU computes

        pairs = zip(positions.tolist(), tables.tolist(), strict=True)
        blocks = self._cache.block_size
        return cpu_plan([RowBlocks(at, 1, table[: at // blocks + 1]) for at, table in pairs], self._cache)


def padded_sizes(rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, then multiples of 8, from 64 on of 16, and from 128 on of 32, up to `rows`.

    Each is captured at the start, in half a second; the time of a step is that of its weights' bytes.
    """
    multiples = (*range(8, 64, 8), *range(64, 128, 16), *range(128, rows, 32))
    return (*(size for size in (1, 2, 4, *multiples) if size < rows), rows)


_log = logging.getLogger(__name__)


class DecodeGraphs:
    """Decode steps as CUDA graphs: the host launches a whole step at once, in place of a hundred kernels a layer.

    Over buffers at fixed addresses each padded batch size is captured twice: the base model alone, and with the
    adapters' kernels, which look up in a table which row has which adapter. All graphs write their logits to the same
    buffer, so that what each has in between can lie where another's does. Used by the thread that steps alone.
    """

    def __init__(
        self, buffers: DecodeBuffers, forward: Callable[[StepInputs], Tensor], begin: Callable[[int, bool], None]
    ) -> None:
        """Capture all of `buffers`' sizes of `forward`, which gives the logits [rows, vocab] of a step.

        `begin` is called before with the size, and whether adapters are to be in it. Raises errors of torch and Triton
        where the model does what a graph can't hold (it waits for the device), or memory is out.
        """
        # One for all: cuBLAS takes a workspace of megabytes for each stream that it is used on.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        pool = None
        # The largest first: the others find room in its memory.
        for size in reversed(buffers.sizes):
            inputs = buffers.inputs(size)
            for adapted in (True, False):
                begin(size, adapted)
                logits = _warm_up(inputs, forward, stream)
                if self._logits is None:
                    self._logits = torch.empty_like(logits)
                del logits
                graph = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile: those that load adapters.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._logits[:size].copy_(forward(inputs))
                self._graphs[size, adapted] = graph
                pool = graph.pool()

    def replay(self, size: int, *, adapted: bool) -> Tensor:
        """Compute the logits [size, vocab] of what the buffers hold now; the next replay overwrites them."""
        assert self._logits is not None, "there is at least one size"
        self._graphs[size, adapted].replay()
        return self._logits[:size]


def _grouped_products_are_captured(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether torch._grouped_mm has one kernel for all experts, and not a loop over offsets that the host reads.

    As ATen's native/cuda/GroupedBlas.cpp chooses. A failed capture would cost a second start.
    """
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def _warm_up(inputs: StepInputs, forward: Callable[[StepInputs], Tensor], stream: torch.cuda.Stream) -> Tensor:
    """Compile the kernels and let libraries take their workspaces: neither can be done while capturing."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logits = forward(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return logits


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose `logits` [wanted, vocab] and `vectors` are on their way; `masks` too, where they can be already."""

    batch: Batch
    logits: Tensor
    vectors: Sequence[tuple[Row, PendingVector]]
    masks: Future[Masks] | None


class Runner:
    """A model, its KV cache and its adapters' slots; from one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KvCache,
        lora: AdapterLayers,
        encoding: Encoding,
        *,
        ahead: bool,
        send: Callable[[Layout], None] | None = None,
    ) -> None:
        """Make a runner; with `ahead` a step is launched before the one before it is collected.

        `send` sends each launch's layout to the other ranks of a split model.
        """
        self._send = send
        self._group = loaded.split.group if loaded.split is not None else None
        self._module = loaded.module
        self._attention = loaded.attention
        self._ahead = ahead
        self._last: InFlight | None = None
        self._device = loaded.device
        # Dtype of the experts; None: the model has none.
        self._grouped = loaded.dtype if loaded.experts else None
        self._cache = cache
        self._lora = lora
        self._masks = MaskFiller()
        self._encoding = encoding
        self._buffers: DecodeBuffers | None = None
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_decodes(self, limits: EngineLimits, *, graphs: bool) -> None:
        """Capture, on CUDA, the decode steps of up to as many rows and positions as the limits say.

        Without `graphs` they are only laid out in the same way. Raises CaptureFailedError: torch's allocator may go on
        capturing in this process.
        """
        self._buffers = DecodeBuffers(limits.rows, limits.max_tokens, self._cache, self._device)
        if not graphs:
            return
        if self._grouped and not _grouped_products_are_captured(self._grouped, self._device):
            _log.warning(
                "decode steps run without CUDA graphs: torch's grouped products of experts wait for the device, but in "
                "bfloat16 on GPUs of compute capability 9.0 and 10.0"
            )
            return
        try:
            self._graphs = DecodeGraphs(self._buffers, self._forward, self._begin_empty)
        except Exception as error:  # torch's and Triton's have no common class
            why = " ".join(str(error).split())
            raise CaptureFailedError(f"decode steps run without CUDA graphs, capturing them failed: {why}") from error

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one warm-up pass on the CPU, which triggers compilation."""
        self._begin_empty(1, adapted=False)
        logits = self._forward(DecodeBuffers(1, 1, self._cache, self._device).inputs(1))
        forbid_ids(logits, [np.full(-(-logits.shape[-1] // 32), -1, dtype=np.int32)])
        best_of_rows(logits)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Compute the rows' keys, values and logits. An error for lack of memory leaves nothing behind."""
        # Stepping ahead, the ids of the step before are missing still.
        masks = None if self._ahead else self._masks.begin(batch)
        layout = self.layout(batch)
        if self._send is not None:
            self._send(layout)
        self._encoding.begin(batch)
        logits = self.execute(layout)
        return Launched(batch, logits, self._encoding.launch(batch), masks)

    @torch.inference_mode()
    def sample(self, step: Launched) -> InFlight:
        """Choose the rows' next ids; all ids before them are known now. Memory may lack here as well."""
        masks = self._masks.begin(step.batch) if self._ahead else step.masks
        allowed = masks.result() if masks else NO_MASKS
        self._last = launch_sampling(step.logits, step.batch, allowed, step.vectors)
        return self._last

    def layout(self, batch: Batch) -> Layout:
        """Lay out a batch for `execute`, on this rank and on others."""
        sampled = self._last.rows if self._last is not None else ()
        if self._buffers is not None and _is_decode(batch):
            return self._buffers.lay_out(batch.rows, sampled)
        return step_layout(batch, self._cache.block_size, sampled)

    @torch.inference_mode()
    def execute(self, layout: Layout) -> Tensor:
        """Compute the logits of a layout, until the next step: row after row, those that it asks for."""
        if isinstance(layout, DecodeLayout):
            return self._decode(layout)
        self._lora.begin_step(layout.adapters, layout.logit_counts)
        inputs = step_inputs(layout, self._cache, self._device)
        self._put_sampled_ids(inputs.input_ids[0], layout.placeholders)
        return self._forward(inputs)

    def close(self) -> None:
        """End the thread that fills masks."""
        self._masks.close()

    def _put_sampled_ids(self, input_ids: Tensor, places: Placeholders) -> None:
        """Write what the last launch sampled where input_ids [tokens] have placeholders."""
        if not places[0]:
            return
        if self._last is not None:
            to, of = upload(places, self._device).unbind()
            # Where logits were not numbers, the id is -1, which is no token; the results of such a row are dropped.
            input_ids.index_copy_(0, to, self._last.ids.index_select(0, of).clamp_(min=0))
        if self._group is not None:
            self._group.send_to_all(input_ids)

    def _forward(self, inputs: StepInputs) -> Tensor:
        with self._attention.during(inputs.attention):
            output = self._module(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.logit_places,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _decode(self, layout: DecodeLayout) -> Tensor:
        buffers = self._buffers
        assert buffers is not None, "decode steps were captured"
        size = buffers.fill(layout)
        self._put_sampled_ids(buffers.input_ids, layout.placeholders)
        adapted = max(layout.slots) >= 0
        if adapted:
            self._lora.begin_decode(layout.slots, size)
        else:
            self._begin_empty(size, adapted=False)
        if self._graphs is not None:
            logits = self._graphs.replay(size, adapted=adapted)
        else:
            logits = self._forward(buffers.inputs(size))
        return logits[: len(layout.slots)]

    def _begin_empty(self, size: int, adapted: bool) -> None:
        """Begin a decode step of rows without adapters, through the adapters' kernels or past them."""
        if adapted:
            self._lora.begin_decode([], size)
        else:
            self._lora.begin_step([])


def _is_decode(batch: Batch) -> bool:
    """Tell whether every row is one token with the logits of the next."""
    return batch.decodes == len(batch.rows) and all(
        row.samples and not row.prompt_positions and not row.sequence.spec.encode for row in batch.rows
    )
