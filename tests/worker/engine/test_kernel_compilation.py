"""Kernels that numba keeps on disk: each in a file of its own."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import FunctionCache

from loraplex.kernels import compilation, weight_vectors


def _kernel(p):
    numba.carray(p, 1)


def test_kernels_of_two_types_are_kept_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that compile for two types must not write one file; nor must changed pieces find the old one."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for made_for in (2, 4):
        compilation.compile_kernel(_kernel, {"of_kind": made_for}, "x", emitting=(weight_vectors,))
    indexes = [path.name for path in tmp_path.rglob("*.nbi")]
    assert len(indexes) == 2, indexes


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    begun, others = threading.Event(), []

    def begin(*arguments: object, **options: object) -> object:
        if not begun.is_set():
            begun.set()
            other.start()
            waits.wait(60)
        return numba.cfunc(*arguments, **options)

    def wait(_: float) -> None:
        waits.set()

    waits = threading.Event()
    other = threading.Thread(
        target=lambda: others.append(compilation.compile_kernel(_kernel, {}, "x", emitting=(weight_vectors,)))
    )
    monkeypatch.setattr(f"{compilation.__name__}.cfunc", begin)
    monkeypatch.setattr(f"{compilation.__name__}.time.sleep", wait)
    first = compilation.compile_kernel(_kernel, {}, "x", emitting=(weight_vectors,))
    other.join()
    assert (first.compiled.cache_hits, others[0].compiled.cache_hits) == (0, 1)
    assert not list(tmp_path.rglob("*.lock"))


def test_a_kernel_is_compiled_while_a_stopped_process_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "_WAIT_S", 0.0)
    named = compilation._named(_kernel, np.dtype([("x", "i8")]), (weight_vectors,))
    path = Path(FunctionCache(named).cache_path) / f"{named.__name__}.lock"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert compilation.compile_kernel(_kernel, {}, "x", emitting=(weight_vectors,)).address
