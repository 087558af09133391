"""Long files first, each in one process of `make test`, so that all cores are busy until all processes end together.

A plugin of the test suite (see conftest.py). A folder whose tests share what takes long to start is one file here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

# Folders whose tests share a cluster.
TOGETHER = ("tests/e2e/answers/", "tests/e2e/gateway/", "tests/weeks/")
# Files and folders that take ten seconds or more, longest first. Others begin last, where a long one would run alone.
COMPUTING = (
    "tests/e2e/test_tutorial.py",
    "tests/real/",
    "tests/e2e/test_decisions_at_scale.py",
    "tests/e2e/test_shipped_model.py",
    "tests/worker/engine/test_company.py",
    "tests/e2e/test_rerankers.py",
    "tests/worker/engine/test_cuda_steps.py",
    "tests/worker/engine/test_interpreted_kernels.py",
    "tests/worker/engine/decoder/test_decoder_steps.py",
    "tests/worker/engine/model/test_architectures.py",
    "tests/worker/engine/test_cpu_attention.py",
    "tests/worker/engine/evaluation/",
    "tests/worker/engine/quantized/test_quantized_families.py",
    "tests/worker/engine/test_engine.py",
    "tests/simulation/",
    "tests/worker/engine/test_engine_sampling.py",
    "tests/worker/engine/",
    "tests/bench/",
)
# Their clusters and clients wait for most of their time.
WAITING = (
    "tests/short_trials/",
    "tests/e2e/gateway/",
    "tests/e2e/answers/",
    "tests/weeks/",
    "tests/e2e/",
    "tests/deploy/test_cluster.py",
    "tests/clients/",
    "tests/deploy/",
    "tests/worker/io/test_stall.py",
    "tests/worker/io/test_worker_process.py",
)


def unit(nodeid: str) -> str:
    """Return the folder or file that the test runs with."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


def place(nodeid: str, folders: Sequence[str]) -> int:
    """Return the place of the test's file in the list, or one after all."""
    return next((at for at, path in enumerate(folders) if nodeid.startswith(path)), len(folders))


def ordered(nodeids: Iterable[str]) -> list[str]:
    """Return the units of the tests: one that computes and one that waits in turn, so that all cores are busy."""
    units = sorted(set(map(unit, nodeids)))
    computing = [one for one in units if place(one, COMPUTING) < len(COMPUTING)]
    waiting = [one for one in units if one not in computing and place(one, WAITING) < len(WAITING)]
    computing.sort(key=lambda one: place(one, COMPUTING))
    waiting.sort(key=lambda one: place(one, WAITING))
    turns = (one for pair in zip_longest(computing, waiting) for one in pair if one)
    return list(dict.fromkeys((*turns, *units)))


def rotated(paths: Sequence[str], number: int, of: int) -> list[str]:
    """Return the paths, for a folder those in it, from the first one of the process's share on."""
    entries = [entry for path in paths for entry in (_entries(Path(path)) if Path(path).is_dir() else [path])]
    first = len(entries) * number // of
    return entries[first:] + entries[:first]


def _entries(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.iterdir()) if path.is_dir() or path.match("test_*.py")]


def pytest_configure(config: pytest.Config) -> None:
    """Let each process import other modules first, so that it finds compiled by others what it imports later."""
    if hasattr(config, "workerinput"):
        number, of = (int(os.environ[f"PYTEST_XDIST_WORKER{name}"].removeprefix("gw")) for name in ("", "_COUNT"))
        config.args = rotated(config.args, number, of)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests where several processes share them."""
    if hasattr(config, "workerinput"):
        places = {one: at for at, one in enumerate(ordered(item.nodeid for item in items))}
        # By file too: a folder that is one unit may be given as an argument, whose entries each process rotates.
        items.sort(key=lambda item: (places[unit(item.nodeid)], item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Give each process a unit when it has at most two tests left, in the tests' order; with --dist loadfile alone."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    scheduler = import_module("xdist.scheduler").LoadFileScheduling(config, log)  # xdist has no types
    scheduler._split_scope = unit
    return scheduler
