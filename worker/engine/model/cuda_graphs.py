"""Decode steps as CUDA graphs: the host launches a whole step at once, in place of a hundred kernels a layer.

Over buffers at fixed addresses (decode_buffers.py) each padded batch size is captured twice: the base model alone, and
with the adapters' kernels, which look up in a table which row has which adapter. All graphs write their logits to the
same buffer, so that what each has in between can lie where another's does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from worker.engine.model.decode_buffers import DecodeBuffers
from worker.engine.model.inputs import StepInputs

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """Captured decode steps; used by the thread that steps alone."""

    def __init__(
        self, buffers: DecodeBuffers, forward: Callable[[StepInputs], Tensor], begin: Callable[[int, bool], None]
    ) -> None:
        """Capture all of `buffers`' sizes of `forward`, which gives the logits [rows, vocab] of a step.

        `begin` is called before with the size, and whether adapters are to be in it. Raises RuntimeError where the
        model does what a graph can't hold (it waits for the device), or memory is out.
        """
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        pool = None
        # The largest first: the others find room in its memory.
        for size in reversed(buffers.sizes):
            inputs = buffers.inputs(size)
            for adapted in (True, False):
                begin(size, adapted)
                logits = _warm_up(inputs, forward)
                if self._logits is None:
                    self._logits = torch.empty_like(logits)
                del logits
                graph = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile: those that load adapters.
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._logits[:size].copy_(forward(inputs))
                self._graphs[size, adapted] = graph
                pool = graph.pool()

    def replay(self, size: int, *, adapted: bool) -> Tensor:
        """Compute the logits [size, vocab] of what the buffers hold now; the next replay overwrites them."""
        assert self._logits is not None, "there is at least one size"
        self._graphs[size, adapted].replay()
        return self._logits[:size]


def capture_decodes(
    buffers: DecodeBuffers, forward: Callable[[StepInputs], Tensor], begin: Callable[[int, bool], None]
) -> DecodeGraphs | None:
    """Capture a model's decode steps; None, with a warning, where that can't be done: they run uncaptured then."""
    try:
        return DecodeGraphs(buffers, forward, begin)
    except RuntimeError as error:
        _log.warning("decode steps run without CUDA graphs, capturing them failed: %s", " ".join(str(error).split()))
        return None


def _warm_up(inputs: StepInputs, forward: Callable[[StepInputs], Tensor]) -> Tensor:
    """Compile the kernels and let libraries take their workspaces: neither can be done while capturing."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logits = forward(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return logits
