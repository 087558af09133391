"""Long files first, each in one process of `make test`, so that all cores are busy until all processes end together.

A plugin of the test suite (see conftest.py). A folder whose tests share what takes long to start is one file here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

# Folders whose tests share a cluster.
TOGETHER = ("tests/e2e/answers/", "tests/e2e/gateway/", "tests/weeks/")
# Files and folders that take seven seconds or more, longest first; of a folder, its files. Each begins while others are
# left, so that at the end no process is alone with a long one.
LONGEST = (
    "tests/e2e/test_tutorial.py",
    "tests/real/test_gguf.py",
    "tests/real/test_chats.py",
    "tests/e2e/test_decisions_at_scale.py",
    "tests/e2e/gateway/",
    "tests/e2e/test_cells.py",
    "tests/e2e/test_content_hooks.py",
    "tests/worker/engine/decoder/test_decoder_steps.py",
    "tests/adapter_store/test_shared_catalog.py",
    "tests/e2e/test_shipped_model.py",
    "tests/e2e/test_releases.py",
    "tests/worker/engine/test_interpreted_kernels.py",
    "tests/e2e/test_rolling_restart.py",
    "tests/worker/engine/test_cuda_steps.py",
    "tests/e2e/test_loadtest.py",
    "tests/short_trials/test_batches.py",
    "tests/weeks/",
    "tests/clients/test_adapter_directories.py",
    "tests/e2e/test_pins.py",
    "tests/worker/engine/test_company.py",
    "tests/e2e/test_worker_loss.py",
    "tests/e2e/test_poison.py",
    "tests/e2e/test_rerankers.py",
    "tests/deploy/test_cluster.py",
    "tests/worker/io/test_stall.py",
    "tests/clients/test_up_command.py",
    "tests/worker/engine/linear/",
    "tests/e2e/test_resume.py",
    "tests/clients/test_cli.py",
    "tests/worker/io/test_worker_process.py",
    "tests/clients/test_gguf_models.py",
    "tests/e2e/answers/",
    "tests/e2e/test_generation_config.py",
    "tests/e2e/test_base_rollout.py",
    "tests/e2e/test_activated_adapters.py",
    "tests/worker/engine/test_engine.py",
    "tests/e2e/test_canaries.py",
    "tests/deploy/test_edge_proxy.py",
    "tests/worker/io/adapters/test_fetch.py",
    "tests/adapter_store/test_batches.py",
    "tests/simulation/test_simulation.py",
    "tests/e2e/test_router_processes.py",
    "tests/e2e/",
    "tests/bench/test_scaling.py",
    "tests/clients/gateway/test_sign_in.py",
    "tests/bench/test_prompts.py",
    "tests/worker/engine/test_cpu_attention.py",
    "tests/broker/test_connection.py",
    "tests/clients/loadtest/test_command.py",
    "tests/router/generation/test_call_formats.py",
    "tests/deploy/test_chart.py",
    "tests/worker/engine/model/test_architectures.py",
    "tests/router/dispatch/test_relay.py",
    "tests/deploy/test_chart_values.py",
    "tests/adapter_store/releases/test_webhooks.py",
)


def unit(nodeid: str) -> str:
    """Return the folder or file that the test runs with."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


def place(nodeid: str) -> int:
    """Return the place of the test's file in LONGEST, or one after all."""
    return next((at for at, path in enumerate(LONGEST) if nodeid.startswith(path)), len(LONGEST))


def ordered(nodeids: Iterable[str]) -> list[str]:
    """Return the units of the tests, the longest first.

    Others by the names of their files: so engines, which compute, take turns with stores and queues, which wait.
    """
    return sorted(set(map(unit, nodeids)), key=lambda one: (place(one), Path(one).name, one))


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
