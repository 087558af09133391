"""Decode steps as CUDA graphs: a layer's hundred launches cost the host nothing, the whole step is one.

A graph is captured for each padded batch size, over buffers at fixed addresses (decode_buffers.py). It holds the base
model alone: steps with adapters, whose rows change from step to step, run without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from worker.model.decode_buffers import DecodeBuffers
from worker.model.inputs import StepInputs

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """The captured steps; from one thread, the one that steps."""

    def __init__(self, buffers: DecodeBuffers, forward: Callable[[StepInputs], Tensor]) -> None:
        """Capture all of `buffers`' sizes of `forward`, which gives the logits [rows, vocab] of a step.

        Raises RuntimeError where the model does what a graph can't hold (it waits for the device), or memory is out.
        """
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}
        pool = None
        # The largest first: the others find room in its memory.
        for size in reversed(buffers.sizes):
            inputs = buffers.inputs(size)
            _warm_up(inputs, forward)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: those that load adapters.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._logits[size] = forward(inputs)
            self._graphs[size] = graph
            pool = graph.pool()

    def replay(self, size: int) -> Tensor:
        """The logits [size, vocab] of what the buffers hold now; the next replay overwrites them."""
        self._graphs[size].replay()
        return self._logits[size]


def capture_decodes(buffers: DecodeBuffers, forward: Callable[[StepInputs], Tensor]) -> DecodeGraphs | None:
    """Capture a model's decode steps; None, with a warning, where that can't be done: they run uncaptured then."""
    try:
        return DecodeGraphs(buffers, forward)
    except RuntimeError as error:
        _log.warning("decode steps run without CUDA graphs, capturing them failed: %s", " ".join(str(error).split()))
        return None


def _warm_up(inputs: StepInputs, forward: Callable[[StepInputs], Tensor]) -> None:
    """Compile the kernels and let libraries take their workspaces: neither can be done while capturing."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(inputs)
    torch.cuda.current_stream().wait_stream(stream)
