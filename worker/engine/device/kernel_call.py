"""A launch of a Triton kernel as a value, which can be run, or only compiled, as the tests do without a GPU.

Does not import Triton, which may be absent on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel launch: `arguments` and compile-time `constants` by parameter name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    stages: int

    def launch(self) -> None:
        """Queue the launch on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)
