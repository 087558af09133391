"""Linear layers over weights in panels (kernels/panels.py), computed by the CPU kernels. Any thread may call them."""

from __future__ import annotations

import math
import threading
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from loraplex.kernels import fixed_linear, tiles
from loraplex.kernels import linear as float_linear
from loraplex.kernels.panels import COLUMNS_STEP, SEGMENT_COLUMNS, Panels, groups_in_panels, in_panels, padded_columns
from loraplex.kernels.threads import Workspace, run_on_all_threads
from loraplex.kernels.weight_vectors import (
    CODE_OFFSET,
    FLOATS,
    HAS_BYTES,
    INT4_SCALE,
    OF_BYTES,
    PAIRS,
    PANEL,
    UINT4_SCALE,
    ZERO_STEP,
)
from loraplex.worker.engine.device import dtype_name
from loraplex.worker.engine.quantized.layers import AnyLinear
from loraplex.worker.engine.quantized.weight import INPUT_GROUP, QuantizedWeight

# The float kernel sees codes shifted to the upper half of a word.
_SHIFTED = 65536.0


def can_be_panels(linear: AnyLinear) -> bool:
    """Tell whether there is a format for the layer's weight."""
    weight = linear.weight
    if not isinstance(weight, QuantizedWeight):
        return weight.dtype in (torch.float32, torch.bfloat16)
    return not weight.codes.is_floating_point() and (weight.scales.shape[1] == 1 or weight.group % COLUMNS_STEP == 0)


def make_panels(linear: AnyLinear, bits: int = 0) -> Panels:
    """Lay out a layer's weight and bias. `bits`: of inputs in fixed point, where the weight is codes; 0: floats."""
    weight = linear.weight
    outputs = linear.out_features
    panels = -(-outputs // PANEL)
    bias = torch.zeros(panels * PANEL)
    if linear.bias is not None:
        bias[:outputs] = linear.bias.detach()
    if not isinstance(weight, QuantizedWeight):
        name = dtype_name(weight.dtype)
        memory = in_panels(weight.detach(), name, panels)
        return Panels(name, outputs, padded_columns(linear.in_features), memory, None, None, linear.in_features, bias)
    fixed, name, codes = bits > 0, f"int{weight.bits}", weight.unpacked()
    of_bytes = bits == 8 and HAS_BYTES
    if of_bytes and weight.bits == 4:
        name = "uint4"
    elif of_bytes and weight.zeros is None and weight.scales.shape[1] == 1:
        # Their zero points, all the same, are in the kernel.
        name, codes = "uint8", codes.view(torch.uint8) ^ CODE_OFFSET
    scales, zeros, group = weight.scales.float(), weight.zero_points(), weight.group
    if fixed and scales.shape[1] > 1:
        # Each part of a long group is a segment with its scale.
        group = _part_of(group)
        scales, zeros = _repeated(weight.group // group, scales, zeros)
    elif weight.bits == 4 and scales.shape[1] == 1:
        # Zero points are subtracted from the sums of segments.
        group = SEGMENT_COLUMNS
        scales, zeros = _repeated(-(-weight.in_features // group), scales, zeros)
    if not fixed:
        scales, zeros = scales / _SHIFTED, None if zeros is None else zeros * _SHIFTED
    elif name == "uint4" and zeros is not None:
        scales = scales / UINT4_SCALE
        # The bytes to which those of codes are added.
        zeros = (CODE_OFFSET - zeros * UINT4_SCALE).to(torch.uint8)[..., None].expand(-1, -1, 4)
        zeros = zeros.contiguous().view(torch.int32).squeeze(-1)
    elif zeros is not None:
        if weight.bits == 4:
            scales, zeros = scales / INT4_SCALE, zeros * INT4_SCALE
        # The sums of a row begin with a product of these pairs and of its sum of q.
        zeros = torch.stack((-zeros, -ZERO_STEP * zeros), -1).to(torch.int16).view(torch.int32).squeeze(-1)
    return Panels(
        name,
        outputs,
        padded_columns(linear.in_features),
        in_panels(codes, name, panels),
        groups_in_panels(scales, panels),
        None if zeros is None else groups_in_panels(zeros, panels),
        group,
        bias,
    )


def _repeated(parts: int, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return scales.repeat_interleave(parts, 1), None if zeros is None else zeros.repeat_interleave(parts, 1)


def _part_of(group: int) -> int:
    """Return the largest number of columns of which a group is a multiple, and which integer sums can take."""
    return next(part for part in range(SEGMENT_COLUMNS, 0, -COLUMNS_STEP) if group % part == 0)


# Tasks per thread that a layer is cut into: no thread waits long for the last one.
_TASKS_PER_THREAD = 8
# Bytes of a cache line.
_LINE = 64


class _Scratch(threading.local):
    """Memory of the kernels' calls, one for each thread that calls: adapters are read while steps run."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.counters = np.zeros(max(float_linear.COUNTERS, fixed_linear.COUNTERS), np.int64)
        self.counters_address = self.counters.ctypes.data


_scratch = _Scratch()


def scratch_memory() -> tuple[Tensor, NDArray[np.int64]]:
    """Return this thread's current scratch memory and counters, which queued calls still use."""
    return _scratch.workspace.memory, _scratch.counters


class PanelLayer(nn.Module):
    """A linear layer [..., in_features] to [..., out_features], in one dtype: float32 or bfloat16."""

    # The kernel, those of its parameters that differ from call to call, and the bytes of the others, which stay.
    _kernel: Any
    _call: Struct
    _integers_buffer: bytes
    # The bytes that a row takes beside the threads' scratch, and the float32 of a thread's.
    _row_bytes: int
    _scratch_floats: int

    def __init__(self, linear: AnyLinear, dtype: torch.dtype, panels: Panels) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._dtype = dtype
        # The dtype of `multiply_into`'s inputs.
        self.input_dtype = dtype
        self.panels = panels
        self._missing = panels.columns - self.in_features
        # The kernels' parameters `columns` to `y_size`: the memory stays where it is.
        self._places = (
            *(panels.columns, panels.segment),
            *(panels.memory.data_ptr(), panels.memory[0].nbytes, panels.count, panels.outputs),
            *panels.scale_places(),
            *(panels.bias.data_ptr(), self.out_features * dtype.itemsize, dtype.itemsize),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, and add the bias where there is one."""
        # The kernels check nothing: with another dtype or width they would read beyond x.
        assert x.dtype == self._dtype, "the dtype that the kernel is compiled for"
        *sizes, width = x.shape
        assert width == self.in_features, "a row of x has a number for each column"
        y = x.new_empty((*sizes, self.out_features))
        rows = x.numel() // width
        if rows:
            self._multiply(pad(x, (0, self._missing)) if self._missing else x.contiguous(), rows, y)
        return y

    @property
    def takes_rows(self) -> bool:
        """Tell whether rows are multiplied as they are; others are padded to whole units of the weight first."""
        return self.panels.columns == self.in_features

    def multiply_into(self, x: Tensor, y: Tensor) -> None:
        """Multiply rows x [rows, in_features] of `input_dtype` into y [rows, out_features], both contiguous.

        Only where `takes_rows`. This is one call of the kernel.
        """
        assert self.takes_rows, "whole units of columns"
        assert x.dtype == self.input_dtype, "the dtype that the kernel is compiled for"
        self._multiply(x, len(x), y)

    def _own(self, rows: int) -> tuple[int, ...]:
        """Return the kernel's last parameters of a call with so many rows."""
        return ()

    def _multiply(self, x: Tensor, rows: int, y: Tensor) -> None:
        """Call the kernel in all threads: x [rows, columns] and y [rows, out_features], both contiguous."""
        x = x.to(self.input_dtype)
        _scratch.counters[:] = 0
        threads, panels = torch.get_num_threads(), self.panels.count
        tasks = min(panels, threads * _TASKS_PER_THREAD)
        if rows > tiles.ROWS and self.panels.columns > float_linear.WIDE_COLUMNS:
            # Each task copies all rows.
            tasks = min(tasks, max(1, panels // (float_linear.GROUP_PANELS * threads)) * threads)
        # Threads write to their scratch all the time: it shares no cache line with other memory.
        before = -(-rows * self._row_bytes // _LINE) * _LINE
        memory = _scratch.workspace.address(before // 4 + threads * self._scratch_floats)
        call = x.data_ptr(), rows, y.data_ptr(), _scratch.counters_address, tasks, memory + before, memory
        run_on_all_threads(self._kernel.address, self._call.pack(*call, *self._own(rows)) + self._integers_buffer)


class PanelLinear(PanelLayer):
    """A linear layer whose sums are float32; the products are exact."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype, products: int | None = None) -> None:
        """Lay out the weight, and compile the kernel for inputs of `dtype`.

        `products` are those of float_linear; None: the fastest that this processor has for the dtype and the weight.
        """
        panels = make_panels(linear)
        super().__init__(linear, dtype, panels)
        if products is None:
            products = _products(panels, dtype)
        self._kernel = float_linear.compile_linear(
            panels.format, dtype_name(dtype), products, scales=panels.scales is not None, zeros=panels.zeros is not None
        )
        own, self._scratch_floats = float_linear.plan(panels.format, panels.columns, panels.segment, products)
        self.input_dtype = torch.float32 if products == FLOATS else torch.bfloat16
        self._call = _struct(float_linear.CALL_INTEGERS)
        # The sums of a row of x: see kernels/linear.py.
        self._row_bytes = -(-panels.columns // panels.segment) * 4
        x_bytes = panels.columns * self.input_dtype.itemsize
        self._integers_buffer = _integers(*self._places, x_bytes, self._row_bytes, *own)


class PanelEmbedding(nn.Embedding):
    """Token embeddings that are an output head's weight in panels, without a copy of their own."""

    def __init__(self, head: PanelLayer, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        # [panels, PANEL, units, columns of a unit]
        self._rows, self._dtype = head.panels.memory.transpose(1, 2), dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [...]: [..., embedding_dim]."""
        return self._rows[ids // PANEL, ids % PANEL].flatten(-2)[..., : self.embedding_dim].to(self._dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # nothing sets it
        """Return a copy of all rows [num_embeddings, embedding_dim]."""
        return self.forward(torch.arange(self.num_embeddings))

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


def _products(panels: Panels, dtype: torch.dtype) -> int:
    """Return the products of a layer whose inputs are of `dtype`."""
    if dtype != torch.bfloat16 or panels.format == "float32":
        return FLOATS
    products = tiles.bfloat16_products(math.gcd(panels.columns, panels.segment))
    return FLOATS if products == PAIRS and panels.format != "bfloat16" else products


class FixedLinear(PanelLayer):
    """A linear layer over codes whose inputs are rounded to 8 or 16 bits, see kernels/fixed_linear.py."""

    def __init__(self, linear: AnyLinear, dtype: torch.dtype, bits: int = 16) -> None:
        """Lay out the weight, and compile the kernel for inputs of `dtype`."""
        panels = make_panels(linear, bits)
        super().__init__(linear, dtype, panels)
        self._kernel = fixed_linear.compile_fixed(
            panels.format, dtype_name(dtype), zeros=panels.zeros is not None, bits=bits
        )
        self._call = _struct(fixed_linear.CALL_INTEGERS)
        segments = -(-panels.columns // panels.segment)
        # The bytes of a row in fixed point, and of its factors and sums.
        row_bytes = panels.columns * (1 if panels.format in OF_BYTES else 2), segments * 8
        # Inputs of 8 bits have a factor for so many columns in every scheme: see round_inputs.
        inputs = INPUT_GROUP if bits == 8 else panels.segment
        self._row_bytes, self._scratch_floats = sum(row_bytes), fixed_linear.TILE_ROWS * PANEL
        self._integers_buffer = _integers(
            *(*self._places, panels.columns * dtype.itemsize, inputs, *row_bytes, segments * 4),
            self._scratch_floats * 4,
        )

    def _own(self, rows: int) -> tuple[int, ...]:
        return (fixed_linear.spread(rows),)


def _struct(integers: str) -> Struct:
    return Struct(f"={len(integers.split())}q")


def _integers(*numbers: int) -> bytes:
    return Struct(f"={len(numbers)}q").pack(*numbers)
