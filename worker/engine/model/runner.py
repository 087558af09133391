"""Launches the scheduler's batches, one after the other, into the model.

A launch hands the device a whole step and returns. The next launch may come before the ids that this one sampled have
been collected: ids that are placeholders are then taken, on the device, from the launch before. The order of one stream
keeps all that a launch reads from the host, and the buffers that it overwrites, safe from the next launch: see
worker/engine/device/transfer.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.engine.attention.kv_cache import KvCache
from worker.engine.device.transfer import upload
from worker.engine.lora.adapter_layers import AdapterLayers
from worker.engine.model.cuda_graphs import DecodeGraphs, capture_decodes
from worker.engine.model.decode_buffers import DecodeBuffers
from worker.engine.model.encoding import Encoding
from worker.engine.model.inputs import StepInputs, step_inputs
from worker.engine.model.loader import LoadedModel
from worker.engine.sampling.masks import NO_MASKS, MaskFiller, forbid_ids
from worker.engine.sampling.step import InFlight, launch_sampling
from worker.engine.scheduling.sequence import Batch
from worker.engine_api import EngineLimits


class Runner:
    """A model, its KV cache and its adapters' slots; from one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KvCache,
        lora: AdapterLayers,
        encoding: Encoding,
        limits: EngineLimits,
        *,
        ahead: bool,
    ) -> None:
        """Capture, on CUDA, the decode steps of up to as many rows and positions as the limits say.

        `ahead`: a step is launched before the one before it is collected, so no launch may wait for the device.
        """
        self._module = loaded.module
        self._attention = loaded.attention
        self._ahead = ahead
        self._last: InFlight | None = None
        self._device = loaded.device
        self._cache = cache
        self._lora = lora
        self._masks = MaskFiller()
        self._encoding = encoding
        self._buffers: DecodeBuffers | None = None
        self._graphs: DecodeGraphs | None = None
        if loaded.device.type == "cuda":
            self._buffers = DecodeBuffers(limits.rows, limits.max_tokens, cache, loaded.device)
            with torch.inference_mode():
                self._graphs = capture_decodes(self._buffers, self._forward, self._begin_empty)
        else:
            self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run one warm-up pass, which triggers compilation."""
        self._begin_empty(1, adapted=False)
        logits = self._forward(DecodeBuffers(1, 1, self._cache, self._device).inputs(1))
        forbid_ids(logits, [np.full(-(-logits.shape[-1] // 32), -1, dtype=np.int32)])

    @torch.inference_mode()
    def launch(self, batch: Batch) -> InFlight:
        """Compute the rows' keys, values and next ids. An error for lack of memory leaves nothing behind."""
        masks = self._masks.begin(batch)
        if self._buffers is not None and _is_decode(batch):
            logits = self._decode(self._buffers, batch)
        else:
            self._lora.begin_step(
                [(row.sequence.adapter_slot, row.count) for row in batch.rows],
                [len(row.prompt_positions) + row.samples for row in batch.rows],
            )
            inputs = step_inputs(batch, self._cache, self._device)
            self._put_sampled_ids(inputs.input_ids[0], batch)
            self._encoding.begin(batch)
            logits = self._forward(inputs)
        vectors = self._encoding.launch(batch)
        allowed = masks.result() if masks else NO_MASKS
        self._last = launch_sampling(logits, batch, allowed, vectors, wait=not self._ahead)
        return self._last

    def close(self) -> None:
        """End the thread that fills masks."""
        self._masks.close()

    def _put_sampled_ids(self, input_ids: Tensor, batch: Batch) -> None:
        """Write what the last launch sampled where input_ids [tokens] have placeholders."""
        places = []
        end = 0
        for row in batch.rows:
            end += row.count
            if row.last_is_placeholder:
                places.append((end - 1, row.sequence))
        if not places or self._last is None:
            return
        index_of = {row.sequence: index for index, row in enumerate(self._last.rows)}
        indices = [[place for place, _ in places], [index_of[sequence] for _, sequence in places]]
        to, of = upload(indices, self._device).unbind()
        # Where logits were not numbers, the id is -1, which is no token; the results of such a row are dropped.
        input_ids.index_copy_(0, to, self._last.ids.index_select(0, of).clamp_(min=0))

    def _forward(self, inputs: StepInputs) -> Tensor:
        with self._attention.during(inputs.attention):
            output = self._module(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.wanted,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _decode(self, buffers: DecodeBuffers, batch: Batch) -> Tensor:
        size = buffers.fill(batch.rows)
        self._put_sampled_ids(buffers.input_ids, batch)
        slots = [row.sequence.adapter_slot for row in batch.rows]
        adapted = max(slots) >= 0
        if adapted:
            self._lora.begin_decode(slots, size)
        else:
            self._begin_empty(size, adapted=False)
        if self._graphs is not None:
            logits = self._graphs.replay(size, adapted=adapted)
        else:
            logits = self._forward(buffers.inputs(size))
        return logits[: len(batch.rows)]

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
