"""The formats of weights in panels, and the width of a panel on this processor."""

from __future__ import annotations

from functools import cache

# Codes of the formats, for kernels compiled for one of them.
FORMATS = {"float32": 1, "bfloat16": 2, "int8": 3, "int4": 4}
# Consecutive columns of one output that are stored side by side, or, in float32, that one pass of the loop takes.
UNIT_COLUMNS = {"float32": 2, "bfloat16": 2, "int8": 2, "int4": 8}
# Bytes of a unit of one output.
UNIT_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2, "int4": 4}
# Parameters of both kernels that differ from call to call, and, behind them, those of a layer; then come each kernel's
# own. `scratch` is memory of the threads; `scale_panel` and `scale_step` are the bytes from one panel's scales to the
# next, and from one segment's.
CALL_INTEGERS = "x rows y counters tasks scratch"
LAYER_INTEGERS = (
    "columns segment weights panel_bytes panels outputs scales zeros scale_panel scale_step bias y_bytes y_size x_bytes"
)
# Number that the upper int16 of a sum of q counts. The fixed-point kernel multiplies zero points, at most 128 in size,
# with sums of up to panels.SEGMENT_COLUMNS int16, as two int16 each.
ZERO_STEP = 128
# Vectors of a panel: with fewer, each activation that is loaded would serve too few products.
PANEL_VECTORS = 2


@cache
def vector_lanes() -> int:
    """Return the number of float32 in a vector register, as numba's settings say (NUMBA_CPU_FEATURES)."""
    from numba.core.registry import cpu_target  # numba is there only where the CPU computes

    return 16 if "+avx512f" in _features(cpu_target) else 8


@cache
def panel_outputs() -> int:
    """Return the number of outputs of a panel: PANEL in the comments."""
    return PANEL_VECTORS * vector_lanes()


def fixed_point_compiles() -> bool:
    """Tell whether the processor has the instruction of fixed_tiles.py; LLVM ends the process where it has not."""
    from numba.core.registry import cpu_target

    return ("+avx512bw" if vector_lanes() == 16 else "+avx2") in _features(cpu_target)


def _features(target: object) -> tuple[str, ...]:
    _, _, features = target.target_context.codegen().magic_tuple()  # type: ignore[attr-defined]
    return tuple(str(features).split(","))
