"""Tiles of the float kernel: some rows times one panel, their sums in registers. See vectors.py.

    sums[row, output] = sum over segments of scale[output] * sum over columns of x[row, column] * (code - zero)

Columns are added one by one, whatever the number of rows: a row's bits do not depend on it.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    CONTRACT,
    F32,
    I64,
    broadcast,
    field_length,
    int64,
    load,
    load_field,
    load_floats,
    store,
)
from worker.engine.linear.vectors import (
    AHEAD,
    FLOAT32,
    HALVES,
    PANEL,
    TileSums,
    V,
    column_of,
    each_segment,
    fetch,
    keep_order,
    load_half,
    unit_sizes,
)


def _multiplying(rows: int, *, unpacked: bool = False) -> Any:
    @intrinsic
    def multiply(typingctx, parameters, x, weights, scales, zeros, sums):
        """Write sums float32 [rows, PANEL] for x float32 and a panel; `unpacked`: the panel is what unpack wrote."""
        code = FLOAT32 if unpacked else field_length(parameters, "of_format")
        has_zeros = field_length(parameters, "of_zeros") > 1 and not unpacked
        has_scales = field_length(parameters, "of_scales") > 1

        def generate(context, b, signature, arguments):
            p, x, weights, scales, zeros, sums = arguments
            unit, unit_bytes = unit_sizes(code)
            x_bytes, step = (load_field(b, parameters, p, name) for name in ("x_bytes", "scale_step"))
            lines = [b.add(x, b.mul(x_bytes, int64(row))) for row in range(rows)]
            totals, parts = TileSums(b, F32, rows), TileSums(b, F32, rows)
            totals.clear()
            with each_segment(b, parameters, p) as (first, stop, number):
                parts.clear()
                of_segment = b.mul(number, step)
                zero_points = _load_panel(b, b.add(zeros, of_segment)) if has_zeros else [None for _ in HALVES]
                with cgutils.for_range_slice(b, first, stop, int64(unit), I64) as (index, _):
                    address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
                    if not unpacked:
                        fetch(b, address, AHEAD, unit_bytes)
                    offset = b.mul(index, int64(4))
                    _add_unit(b, code, address, zero_points, [b.add(line, offset) for line in lines], parts)
                scale = _load_panel(b, b.add(scales, of_segment)) if has_scales else None
                for row, half in totals.places:
                    part = parts[row, half]
                    if scale is not None:
                        part = b.fmul(part, scale[half], flags=CONTRACT)
                    totals[row, half] = b.fadd(totals[row, half], part, flags=CONTRACT)
            totals.write(sums)
            return context.get_dummy_value()

        return types.void(parameters, x, weights, scales, zeros, sums), generate

    return multiply


def _load_panel(b: Any, address: Any) -> list[Any]:
    return [load_floats(b, address, V * half, V) for half in HALVES]


def _add_unit(b: Any, code: int, address: Any, zeros: list[Any], lines: list[Any], parts: TileSums) -> None:
    """Add a unit's products with the rows' float32 at `lines`, column by column."""
    halves = [load_half(b, code, address, half) for half in HALVES]
    for column in range(unit_sizes(code)[0]):
        if column:
            keep_order(b)
        vectors = [column_of(b, code, half, column, zero) for half, zero in zip(halves, zeros, strict=True)]
        for row, line in enumerate(lines):
            factor = broadcast(b, load(b, line, 4 * column, F32, 4), V)
            for half in HALVES:
                product = b.fmul(factor, vectors[half], flags=CONTRACT)
                parts[row, half] = b.fadd(parts[row, half], product, flags=CONTRACT)


@intrinsic
def unpack(typingctx, parameters, weights, zeros, out):
    """Write the codes of a panel, less their zeros, as float32 [columns, PANEL]."""
    format_code = field_length(parameters, "of_format")
    has_zeros = field_length(parameters, "of_zeros") > 1

    def generate(context, b, signature, arguments):
        p, weights, zeros, out = arguments
        unit, unit_bytes = unit_sizes(format_code)
        step = load_field(b, parameters, p, "scale_step")
        with each_segment(b, parameters, p) as (first, stop, number):
            of_segment = b.mul(number, step)
            with cgutils.for_range_slice(b, first, stop, int64(unit), I64) as (index, _):
                address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
                fetch(b, address, AHEAD, unit_bytes)
                line = b.add(out, b.mul(index, int64(4 * PANEL)))
                for half in HALVES:
                    zero = load_floats(b, b.add(zeros, of_segment), V * half, V) if has_zeros else None
                    loaded = load_half(b, format_code, address, half)
                    for column in range(unit):
                        value = column_of(b, format_code, loaded, column, zero)
                        store(b, value, line, 4 * (PANEL * column + V * half), 4)
        return context.get_dummy_value()

    return types.void(parameters, weights, zeros, out), generate


multiply_1, multiply_2, multiply_3, multiply_4 = (_multiplying(rows) for rows in range(1, 5))
unpacked_1, unpacked_2, unpacked_3, unpacked_4, unpacked_5, unpacked_6 = (
    _multiplying(rows, unpacked=True) for rows in range(1, 7)
)
