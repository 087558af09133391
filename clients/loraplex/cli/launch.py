"""The steps of `loraplex up`: start, register, upload, ready, demo, wait, stop."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from loraplex.cli.demo import DEMO_PROMPT, DemoQuestion, Scene, adapter_scenes, run_demo, tenant_scenes
from loraplex.cli.local import FIRST_KEY, ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.cli.options import ROUTER, STORE
from loraplex.cli.service import explain
from loraplex.cli.tenants import TenantSpec, set_up
from loraplex.cli.terminal import Activity, CommandError, out, print_error
from loraplex.cli.upload_tree import AdapterTree, upload_tree
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.plans import Prices
from loraplex.runtime.rpc.children.process import LaunchError
from loraplex.runtime.rpc.settings import check_installed
from loraplex_client import AlreadyExistsError, AsyncStoreClient, LoraplexError
from loraplex_client.endpoint import DEFAULT_TENANT

# Timeout in seconds for loading a model: large models on slow disks take minutes, and Ctrl-C ends it sooner.
LOADING_S = 3600.0
# Interval in seconds between looks at the workers' logs, and the end of the line there that reports a dead engine.
LOOK_S = 1.0
ENGINE_DEATH = "; starting another"


@dataclass(frozen=True)
class LaunchPlan:
    """The cluster to start, its model, adapters and tenants, all validated. `once` implies `demo`.

    `tenants` are of a cluster with credentials, whose environment has those of an operator.
    """

    settings: ClusterSettings
    model: BaseModel
    tree: AdapterTree
    update: bool
    demo: bool
    once: bool
    tenants: tuple[TenantSpec, ...] = ()
    prices: Prices | None = None
    questions: tuple[DemoQuestion, ...] = ()

    @property
    def credentials(self) -> Path:
        """Return the directory of the credentials."""
        assert self.settings.credentials is not None
        return self.settings.credentials

    @property
    def keys_dir(self) -> Path:
        """Return the directory of the tenants' API keys."""
        return self.credentials / "keys"


def check_engine_protocol(name: str) -> None:
    """Raise CommandError where routers would not start with this engine protocol."""
    if not name:
        return
    if unknown := sorted({*name.split(",")} - {"sglang", "vllm"}):
        raise CommandError(f"--engine-protocol {unknown[0]}: only sglang, vllm are known", 2)
    try:
        check_installed("--engine-protocol", "smg_grpc_proto")
    except ValueError as error:
        raise CommandError(str(error), 2) from error


async def launch(plan: LaunchPlan) -> None:
    """Run the cluster until SIGINT or SIGTERM, then stop it in order. Raises CommandError."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The first signal drains and stops. A second one cancels the draining, which then kills.
        loop.add_signal_handler(number, task.cancel)
    try:
        await _serve(plan)
    except asyncio.CancelledError:
        return


async def _serve(plan: LaunchPlan) -> None:
    with Activity() as activity:
        many = f"{plan.settings.workers} workers" if plan.settings.workers > 1 else "worker"
        activity.step(f"starting store, router, {many}")
        exit_code = 2  # A failure before it serves is caused by the arguments.
        try:
            async with LocalCluster(plan.settings) as cluster:
                try:
                    await _make_ready(plan, cluster, activity)
                    exit_code = 1
                    await _run_until_failure(plan, cluster)
                finally:
                    activity.step("stopping")
        except LaunchError as error:
            raise CommandError(str(error), exit_code) from error


async def _make_ready(plan: LaunchPlan, cluster: LocalCluster, activity: Activity) -> None:
    """Register, upload, and wait until requests are served. Raises CommandError, LaunchError."""
    await _fill(plan, cluster.operators, activity)
    activity.step(f"loading model {plan.model.name}")
    await cluster.wait_serving(timeout_s=LOADING_S)
    activity.stop()
    http = f" http={cluster.http}" if cluster.http else ""
    operators = f" operators={cluster.operators}" if plan.settings.credentials else ""
    print(f"ready router={cluster.router} store={cluster.store}{http}{operators}", flush=True)
    for line in await _places(plan, cluster):
        print(line, flush=True)


async def _run_until_failure(plan: LaunchPlan, cluster: LocalCluster) -> None:
    """Run the demo if requested; then, unless `once`, wait until a process fails. Raises CommandError, LaunchError."""
    if plan.demo:
        await cluster.unless_failed(run_demo(cluster.router, _scenes(plan)))
    if not plan.once:
        _print_next_command(plan, cluster)
        await cluster.unless_failed(_report_engine_deaths(cluster))


async def _report_engine_deaths(cluster: LocalCluster) -> None:
    """Print a line for each engine that dies; never returns."""
    read: dict[Path, int] = {}
    while True:
        for path in sorted((cluster.data_dir / "logs").glob("worker-*.log")):
            with path.open("rb") as log:
                log.seek(read.setdefault(path, path.stat().st_size))
                lines = log.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            read[path] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line.endswith(ENGINE_DEATH):
                    print_error(f"{path.stem}: {line.rpartition('loraplex.worker.io.app: ')[2]}")
        await asyncio.sleep(LOOK_S)


async def _places(plan: LaunchPlan, cluster: LocalCluster) -> list[str]:
    """Return lines that say where metrics, operators' ports, logs and data are, and whether the data stays."""
    served = {name: await process.wait_ready() for name, process in cluster.processes.items() if process.is_ready}
    metrics = " ".join(f"{name}={ready['metrics']}" for name, ready in sorted(served.items()) if "metrics" in ready)
    ports = " ".join(f"{name}={ready['operators']}" for name, ready in sorted(served.items()) if "operators" in ready)
    operators = [f"operators {ports}"] if ports else []
    lifetime = "kept" if plan.settings.data_dir else "removed at the end; --data-dir DIR keeps adapters and logs"
    return [
        f"metrics {metrics}",
        *operators,
        f"logs {cluster.data_dir / 'logs'}",
        f"data {cluster.data_dir}, {lifetime}",
    ]


async def _fill(plan: LaunchPlan, store: str, activity: Activity) -> None:
    """Register the model and upload the adapters, while the workers load. Raises CommandError."""
    async with AsyncStoreClient(store, DEFAULT_TENANT) as client:
        activity.step(f"registering model {plan.model.name}")
        try:
            await client.register_model(registered(plan.model), plan.model.files)
        except LoraplexError as error:
            other = isinstance(error, AlreadyExistsError)
            hint = "; give this one another name with --name, or another directory with --data-dir" if other else ""
            raise CommandError(f"--model {plan.settings.model}: {explain(error, 'store', store)}{hint}") from error
    if plan.tenants or plan.prices:
        activity.step("setting up tenants")
        await asyncio.to_thread(set_up, store, plan.tenants, plan.keys_dir, plan.prices)
    of_tenants = (adapter for spec in plan.tenants for adapter in spec.adapters)
    tree = AdapterTree((*plan.tree.adapters, *of_tenants), plan.tree.faults)
    try:
        await upload_tree(store, tree, plan.model.name, update=plan.update, step=activity.step)
    except LoraplexError as error:
        raise explain(error, "store", store) from error


def _print_next_command(plan: LaunchPlan, cluster: LocalCluster) -> None:
    """Print a command to try next, at a terminal or after the demo."""
    if not (plan.demo or out().is_terminal):
        return
    out().print(f"\nThe router listens on {cluster.router}, the adapter store on {cluster.store}. Try:", markup=False)
    lines = []
    if (cluster.router, cluster.store) != (ROUTER, STORE):
        lines += [f"export LORAPLEX_ADDRESS={cluster.router}", f"export LORAPLEX_STORE_ADDRESS={cluster.store}"]
    lines.append(f"{_program()} {_next_command(plan, cluster)}")
    out().print("".join(f"\n  {line}" for line in lines) + "\n", markup=False, soft_wrap=True, style="bold")
    if cluster.http:
        scheme = "https" if plan.settings.credentials else "http"
        out().print(f"{scheme}://{cluster.http}/ shows the cluster, and has a playground.", markup=False)
    out().print("Ctrl-C stops everything.", markup=False)


def _next_command(plan: LaunchPlan, cluster: LocalCluster) -> str:
    """Return the words after `loraplex` of a command that works with this cluster."""
    scenes = _scenes(plan)
    if plan.settings.credentials is None:
        first = scenes[0].answers[0]
        flags = f" --tenant {first.tenant} --adapter {first.adapter}" if first.adapter else ""
        chat = " --chat" if scenes[0].is_chat else ""
        return f"generate {_quoted(scenes[0].prompt)}{chat}{flags}"
    ca = f"--ca {plan.credentials / 'ca.pem'}"
    if not scenes:
        key = plan.credentials / FIRST_KEY
        return f"{ca} --api-key-file {key} tenants create acme --keys-dir {plan.keys_dir} --store {cluster.operators}"
    first = scenes[0].answers[0]
    adapter = f" --adapter {first.adapter}" if first.adapter else ""
    return f'{ca} --api-key-file {first.key_file} generate "{DEMO_PROMPT}"{adapter}'


def _quoted(prompt: str) -> str:
    """Return a prompt as one line of a shell, its line breaks as spaces."""
    words = " ".join(prompt.split())
    return f'"{words}"' if not set(words) & set('"$`\\!') else shlex.quote(words)


def _program() -> str:
    """Return `loraplex` if that is this installation on PATH, else its path."""
    here = Path(sys.executable).parent / "loraplex"
    if shutil.which("loraplex") == str(here):
        return "loraplex"
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


def _scenes(plan: LaunchPlan) -> list[Scene]:
    """Return the demo's prompts and who answers them."""
    if plan.settings.credentials is None:
        return adapter_scenes(plan.tree.adapters, plan.questions)
    return tenant_scenes(plan.tenants, plan.keys_dir)
