"""Long files first, each in one process of `make test`, so that all processes end together.

A plugin of the test suite (see conftest.py). A folder whose tests share what takes long to start is one file here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

# Folders whose tests share a cluster.
TOGETHER = ("tests/e2e/answers/", "tests/e2e/gateway/")
# Files and folders that take ten seconds or more, longest first. Others begin last, where a long one would run alone.
LONGEST = (
    "tests/e2e/test_shipped_model.py",
    "tests/chaos/",
    "tests/e2e/gateway/",
    "tests/worker/engine/decoder/test_decoder_steps.py",
    "tests/e2e/answers/",
    "tests/worker/engine/test_cuda_engine.py",
    "tests/worker/engine/model/test_architectures.py",
    "tests/worker/engine/test_lora_kernels.py",
    "tests/worker/engine/test_triton_attention.py",
    "tests/worker/engine/evaluation/",
    "tests/worker/engine/test_engine.py",
    "tests/worker/engine/test_cpu_attention.py",
    "tests/e2e/",
    "tests/forged/",
    "tests/hostile/",
    "tests/deploy/test_cluster.py",
    "tests/worker/engine/test_engine_sampling.py",
    "tests/worker/engine/",
    "tests/simulation/",
    "tests/bench/",
    "tests/clients/",
    "tests/deploy/",
)


def unit(nodeid: str) -> str:
    """Return the folder or file that the test runs with."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


def place(item: pytest.Item) -> int:
    """Return the place of the test's file in LONGEST, or one after all."""
    return next((at for at, path in enumerate(LONGEST) if item.nodeid.startswith(path)), len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests where several processes share them."""
    if hasattr(config, "workerinput"):
        items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Give each process a unit when it has at most two tests left, in the tests' order; with --dist loadfile alone."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    scheduler = import_module("xdist.scheduler").LoadFileScheduling(config, log)  # xdist has no types
    scheduler._split_scope = unit
    return scheduler
