"""The life of `loraplex up`: start, register, upload, ready, demo, stay, stop."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from loraplex_client import AsyncStoreClient, LoraplexError

from artifacts.base_model import BaseModel
from clients.cli.adapter_tree import AdapterDirectory
from clients.cli.demo import DEMO_PROMPT, run_demo
from clients.cli.failures import explain
from clients.cli.models import registered
from clients.cli.options import TENANT
from clients.cli.terminal import Activity, CommandError, out
from deploy.local.cluster import ClusterSettings, LaunchError, LocalCluster

T = TypeVar("T")

# Loading a large model from a slow disk takes its time; whoever has none presses Ctrl-C.
LOADING_S = 3600.0


@dataclass(frozen=True)
class Plan:
    """What to start and what to fill it with; all of it has been checked. `once` implies `demo`."""

    settings: ClusterSettings
    model: BaseModel
    adapters: tuple[AdapterDirectory, ...]
    demo: bool
    once: bool


async def launch(plan: Plan) -> None:
    """Run the cluster until SIGINT or SIGTERM, then stop it in order. Raises CommandError."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The first one unwinds and drains; a second one cancels the draining, which then kills.
        loop.add_signal_handler(number, task.cancel)
    try:
        await _serve(plan)
    except asyncio.CancelledError:
        return


async def _serve(plan: Plan) -> None:
    with Activity() as activity:
        many = f"{plan.settings.workers} workers" if plan.settings.workers > 1 else "worker"
        activity.step(f"starting store, router, {many}")
        exit_code = 2  # until it serves, what fails is what was asked for
        try:
            async with LocalCluster(plan.settings) as cluster:
                try:
                    await _make_ready(plan, cluster, activity)
                    exit_code = 1
                    await _stay(plan, cluster)
                finally:
                    activity.step("stopping")
        except LaunchError as error:
            raise CommandError(str(error), exit_code) from error


async def _make_ready(plan: Plan, cluster: LocalCluster, activity: Activity) -> None:
    """Returns when requests are served. Raises CommandError, LaunchError."""
    await _fill(plan, cluster.store, activity)
    activity.step(f"loading model {plan.model.name}")
    await cluster.wait_serving(timeout_s=LOADING_S)
    activity.stop()
    print(f"ready router={cluster.router} store={cluster.store}", flush=True)


async def _stay(plan: Plan, cluster: LocalCluster) -> None:
    """The demo, if asked for; then, unless that was all, until a process fails. Raises CommandError, LaunchError."""
    if plan.demo:
        await cluster.unless_failed(run_demo(cluster.router, plan.adapters))
    if not plan.once:
        _say_what_next(plan, cluster)
        raise await cluster.wait_failed()


async def _fill(plan: Plan, store: str, activity: Activity) -> None:
    """Register the model and upload the adapters, while the workers load. Raises CommandError."""
    async with AsyncStoreClient(store, TENANT) as client:
        activity.step(f"registering model {plan.model.name}")
        try:
            await client.register_model(registered(plan.model), plan.model.files)
        except LoraplexError as error:
            raise CommandError(f"--model {plan.settings.model}: {explain(error, 'store', store)}") from error
    for tenant, owned in groupby(plan.adapters, key=lambda adapter: adapter.tenant):
        async with AsyncStoreClient(store, tenant) as client:
            for adapter in owned:
                activity.step(f"uploading adapter {tenant}/{adapter.name}")
                try:
                    await client.push(adapter.directory, adapter.name, base_model=plan.model.name)
                except LoraplexError as error:
                    raise CommandError(f"--adapters: {adapter.directory}: {explain(error, 'store', store)}") from error


def _say_what_next(plan: Plan, cluster: LocalCluster) -> None:
    """For people: at a terminal, and after the demo."""
    if not (plan.demo or out().is_terminal):
        return
    whose = "".join(f" --tenant {one.tenant} --adapter {one.name}" for one in plan.adapters[:1])
    out().print(f"\nThe router listens on {cluster.router}, the adapter store on {cluster.store}. Try:", markup=False)
    command = f'{_program()} generate "{DEMO_PROMPT}"{whose} --router {cluster.router}'
    out().print(f"\n  {command}\n", markup=False, soft_wrap=True, style="bold")
    out().print("Ctrl-C stops everything.", markup=False)


def _program() -> str:
    """How to call `loraplex` from here: by its name where that is this one, else by its path."""
    here = Path(sys.executable).parent / "loraplex"
    if shutil.which("loraplex") == str(here):
        return "loraplex"
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)
