"""Linear layers over weights in panels, computed by the CPU kernels. Any thread may call them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from worker.engine.device.cpu import threads
from worker.engine.device.cpu.workspace import Workspace
from worker.engine.linear import fixed_kernel, kernel
from worker.engine.linear.panels import Panels, make_panels
from worker.engine.quantized.weight import AnyLinear

# Maximum rows for which each tile unpacks the codes again, in registers: measured, the others unpack a panel first.
_DIRECT_ROWS = {"float32": 12, "bfloat16": 12, "int8": 8, "int4": 8}
# Tasks per thread that a layer is cut into: no thread waits long for the last one.
_TASKS_PER_THREAD = 8
_FLOAT_PARAMETERS = Struct(f"={len(kernel.INTEGERS.split())}q")
_FIXED_PARAMETERS = Struct(f"={len(fixed_kernel.INTEGERS.split())}q")


class _Scratch(threading.local):
    """Memory of the kernels' calls, one for each thread that calls: adapters are read while steps run."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.counters = np.zeros(max(kernel.COUNTERS, fixed_kernel.COUNTERS), np.int64)


_scratch = _Scratch()


def scratch_memory() -> tuple[Tensor, NDArray[np.int64]]:
    """Return this thread's scratch memory, as it is now, and its counters: what the calls before this one refer to."""
    return _scratch.workspace.memory, _scratch.counters


class PanelLayer(nn.Module):
    """A linear layer [..., in_features] to [..., out_features], in one dtype: float32 or bfloat16."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype, panels: Panels) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._dtype = dtype
        self._panels = panels
        # The kernels' parameters `segment` to `bias`: the memory stays where it is.
        self._weight_places = (
            *(panels.segment, panels.memory.data_ptr(), panels.memory[0].nbytes, panels.count, panels.outputs),
            *panels.scale_places(),
            panels.bias.data_ptr(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, and add the bias where there is one."""
        # The kernels check nothing: with another dtype they would read beyond x.
        assert x.dtype == self._dtype, "the dtype that the kernel is compiled for"
        rows = x.reshape(-1, self.in_features)
        y = x.new_empty(len(rows), self.out_features)
        missing = self._panels.columns - self.in_features
        if len(rows):
            self._multiply(pad(rows, (0, missing)) if missing else rows.contiguous(), y)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def input_dtype(self) -> torch.dtype:
        """Return the dtype of `multiply_into`'s inputs."""
        return self._dtype

    @property
    def takes_rows(self) -> bool:
        """Tell whether rows are multiplied as they are; others are padded to whole units of the weight first."""
        return self._panels.columns == self.in_features

    def multiply_into(self, x: Tensor, y: Tensor) -> None:
        """Multiply rows x [rows, in_features] of `input_dtype` into y [rows, out_features], both contiguous.

        Only where `takes_rows`. This is one call of the kernel.
        """
        assert self.takes_rows, "whole units of columns"
        assert x.dtype == self.input_dtype, "the dtype that the kernel is compiled for"
        self._multiply(x, y)

    @abstractmethod
    def _multiply(self, x: Tensor, y: Tensor) -> None:
        """Run the kernel: x [rows, columns] and y [rows, out_features], both contiguous."""

    def _tasks(self, threads: int) -> int:
        return min(self._panels.count, threads * _TASKS_PER_THREAD)


class PanelLinear(PanelLayer):
    """A linear layer whose sums are float32."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype) -> None:
        """Lay out the weight, and compile the kernel for inputs of `dtype`."""
        panels = make_panels(linear)
        super().__init__(linear, dtype, panels)
        self._kernel: Any = kernel.compile_linear(
            panels.format, _kind(dtype), scales=panels.scales is not None, zeros=panels.zeros is not None
        )

    @property
    def input_dtype(self) -> torch.dtype:
        """See PanelLayer."""
        return torch.float32

    def _multiply(self, x: Tensor, y: Tensor) -> None:
        x = x.float()
        panels, count, counters = self._panels, torch.get_num_threads(), _scratch.counters
        counters[:] = 0
        floats = kernel.scratch_floats(panels.columns)
        parameters = _FLOAT_PARAMETERS.pack(
            *(x.data_ptr(), panels.columns * 4, len(x), panels.columns),
            *self._weight_places,
            *(y.data_ptr(), self.out_features * y.itemsize, y.itemsize),
            *(_DIRECT_ROWS[panels.format], panels.format != "float32"),
            *(_scratch.workspace.address(floats * count), floats * 4, counters.ctypes.data, self._tasks(count)),
        )
        threads.run_on_all_threads(self._kernel.address, parameters)


class FixedLinear(PanelLayer):
    """A linear layer over codes whose inputs are rounded to 16 bits, see fixed_rows.py."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype) -> None:
        """Lay out the weight, and compile the kernel for inputs of `dtype`."""
        panels = make_panels(linear, fixed=True)
        super().__init__(linear, dtype, panels)
        self._kernel: Any = fixed_kernel.compile_fixed(panels.format, _kind(dtype), zeros=panels.zeros is not None)

    def _multiply(self, x: Tensor, y: Tensor) -> None:
        panels, rows, count, counters = self._panels, len(x), torch.get_num_threads(), _scratch.counters
        counters[:] = 0
        segments = -(-panels.columns // panels.segment)
        q_bytes, factor_bytes, scratch_bytes = panels.columns * 2, segments * 8, fixed_kernel.scratch_floats() * 4
        q = _scratch.workspace.address((rows * (q_bytes + factor_bytes) + count * scratch_bytes) // 4)
        factors = q + rows * q_bytes
        parameters = _FIXED_PARAMETERS.pack(
            *(x.data_ptr(), panels.columns * x.itemsize, rows, panels.columns),
            *self._weight_places,
            *(y.data_ptr(), self.out_features * y.itemsize, y.itemsize),
            *(q, q_bytes, factors, factor_bytes, segments * 4),
            *(factors + rows * factor_bytes, scratch_bytes, counters.ctypes.data, self._tasks(count)),
        )
        threads.run_on_all_threads(self._kernel.address, parameters)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
