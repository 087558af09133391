"""Runs one step of the scheduler's batch through the model."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.lora.layers import LoraLayers
from worker.model.attention import attention_step
from worker.model.cuda_graphs import DecodeGraphs, capture_decodes
from worker.model.decode_buffers import DecodeBuffers
from worker.model.inputs import StepInputs, step_inputs
from worker.model.kv_cache import KvCache
from worker.model.loader import LoadedModel
from worker.sampling.step import Sampled, sample_step
from worker.scheduling.batch import Batch


class Runner:
    """A model, its KV cache and its adapters' slots; from one thread."""

    def __init__(self, loaded: LoadedModel, cache: KvCache, lora: LoraLayers, rows: int, max_tokens: int) -> None:
        """On CUDA this captures the decode steps of up to `rows` rows of up to `max_tokens` positions."""
        self._module = loaded.module
        self._device = loaded.device
        self._cache = cache
        self._lora = lora
        self._buffers: DecodeBuffers | None = None
        self._graphs: DecodeGraphs | None = None
        if loaded.device.type == "cuda":
            # Triton launches on the thread's current device.
            torch.cuda.set_device(loaded.device)
            self._buffers = DecodeBuffers(rows, max_tokens, cache, loaded.device)
            lora.begin_step([], 0)
            with torch.inference_mode():
                self._graphs = capture_decodes(self._buffers, self._forward)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Sampled:
        """Compute the rows' keys, values and next ids."""
        self._lora.begin_step([(row.sequence.adapter_slot, row.count) for row in batch.rows], batch.decodes)
        if self._buffers is not None and _is_plain_decode(batch):
            logits = self._decode(self._buffers, batch)
        else:
            logits = self._forward(step_inputs(batch, self._cache, self._device))
        return sample_step(logits, batch)

    def _forward(self, inputs: StepInputs) -> Tensor:
        with attention_step(inputs.attention):
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
        logits = self._forward(buffers.inputs(size)) if self._graphs is None else self._graphs.replay(size)
        return logits[: len(batch.rows)]


def _is_plain_decode(batch: Batch) -> bool:
    """Whether every row is one token with the logits of the next, without an adapter."""
    return batch.decodes == len(batch.rows) and all(
        row.samples and not row.prompt_positions and row.sequence.adapter_slot < 0 for row in batch.rows
    )
