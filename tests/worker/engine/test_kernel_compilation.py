"""Kernels that numba keeps on disk: each in a file of its own."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from worker.engine.device.cpu import compilation
from worker.engine.lora.cpu import intrinsics


def _kernel(p):
    numba.carray(p, 1)


def test_kernels_of_two_types_are_kept_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that compile for two types must not write one file; nor must changed pieces find the old one."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for made_for in (2, 4):
        compilation.compile_kernel(_kernel, compilation.parameter_dtype(["x"], [], {"of_kind": made_for}), intrinsics)
    indexes = [path.name for path in tmp_path.rglob("*.nbi")]
    assert len(indexes) == 2, indexes
