"""The steps of `loraplex up`: start, register, upload, ready, demo, wait, stop."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loraplex_client import AlreadyExistsError, AsyncClient, AsyncStoreClient, LoraplexError
from loraplex_client.endpoint import DEFAULT_TENANT

from artifacts.base_model import BaseModel
from clients.cli.generate import AnswerTimer, format_figure
from clients.cli.models import registered
from clients.cli.options import ROUTER, STORE
from clients.cli.service import explain
from clients.cli.tenants import TenantSpec, key_file, set_up
from clients.cli.terminal import Activity, CommandError, out, print_error, print_rows, printable
from clients.cli.upload_tree import AdapterDirectory, AdapterTree, upload_tree
from deploy.local import FIRST_KEY, ClusterSettings, LocalCluster
from rpc.children.process import LaunchError
from rpc.settings import check_installed

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

# Timeout in seconds for loading a model: large models on slow disks take minutes, and Ctrl-C ends it sooner.
LOADING_S = 3600.0
# Interval in seconds between looks at the workers' logs, and the end of the line there that reports a dead engine.
LOOK_S = 1.0
ENGINE_DEATH = "; starting another"
DEMO_PROMPT = "Return a list of"
DEMO_TOKENS = 48
DEMO_ADAPTERS = 3
_COLOURS = ("cyan", "magenta", "yellow", "green")


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
    if name != "sglang":
        raise CommandError(f"--engine-protocol {name}: only sglang is known", 2)
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
        await cluster.unless_failed(run_demo(cluster.router, _demo_answers(plan)))
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
                    print_error(f"{path.stem}: {line.rpartition('worker.io.app: ')[2]}")
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
    if plan.tenants:
        activity.step("setting up tenants")
        await asyncio.to_thread(set_up, store, plan.tenants, plan.keys_dir)
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
    if plan.settings.credentials is None:
        adapters = plan.tree.adapters[:1]
        flags = "".join(f" --tenant {adapter.tenant} --adapter {adapter.name}" for adapter in adapters)
        return f'generate "{DEMO_PROMPT}"{flags}'
    ca = f"--ca {plan.credentials / 'ca.pem'}"
    answers = _demo_answers(plan)
    if not answers:
        key = plan.credentials / FIRST_KEY
        return f"{ca} --api-key-file {key} tenants create acme --keys-dir {plan.keys_dir} --store {cluster.operators}"
    adapter = f" --adapter {answers[0].adapter}" if answers[0].adapter else ""
    return f'{ca} --api-key-file {answers[0].key_file} generate "{DEMO_PROMPT}"{adapter}'


def _program() -> str:
    """Return `loraplex` if that is this installation on PATH, else its path."""
    here = Path(sys.executable).parent / "loraplex"
    if shutil.which("loraplex") == str(here):
        return "loraplex"
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


class _Answer:
    """A streaming answer. `adapter` is empty for the plain base model; the API key's file says who asks, if any."""

    def __init__(self, tenant: str, adapter: str, colour: str, key_file: Path | None = None) -> None:
        self.tenant = tenant
        self.adapter = adapter
        self.colour = colour
        self.key_file = key_file
        self.text = ""
        self.timer = AnswerTimer()

    @property
    def label(self) -> str:
        if self.adapter:
            return f"{self.tenant}/{self.adapter}"
        return "base model" if self.key_file is None else self.tenant

    async def follow(self, router: str, changed: Callable[[], None]) -> None:
        """Stream the answer, calling `changed` after each message. Raises CommandError."""
        try:
            key = None if self.key_file is None else self.key_file.read_text(encoding="utf-8").strip()
            async with AsyncClient(router, self.tenant if key is None else "", api_key=key) as client:
                self.timer = AnswerTimer()
                stream = client.generate_stream(
                    DEMO_PROMPT, adapter_id=self.adapter or None, max_tokens=DEMO_TOKENS, temperature=0.0
                )
                async for piece in stream:
                    self.timer.record(len(piece.token_ids))
                    self.text += printable(piece.text)
                    changed()
        except LoraplexError as error:
            raise CommandError(f"{self.label}: {explain(error, 'router', router)}", 1) from error
        except OSError as error:
            raise CommandError(f"{self.label}: {error.filename}: {error.strerror}", 1) from error

    def panel(self) -> RenderableType:
        """Render the partial answer."""
        from rich.panel import Panel
        from rich.text import Text

        text = Text.assemble((DEMO_PROMPT, "dim"), (self.text, self.colour))
        return Panel(text, title=Text(self.label), title_align="left", border_style=self.colour)


def _demo_answers(plan: LaunchPlan) -> list[_Answer]:
    """Return the demo's answers: of three adapters and of the base model, or of the tenants that have an API key."""
    if plan.settings.credentials is None:
        return adapter_answers(plan.tree.adapters)
    asking = [spec for spec in plan.tenants if spec.keys]
    return [
        _Answer(
            spec.name,
            next((adapter.name for adapter in spec.adapters), ""),
            colour,
            key_file(plan.keys_dir, spec.name, spec.keys[0].label),
        )
        for spec, colour in zip(asking, _COLOURS, strict=False)
    ]


def adapter_answers(adapters: Sequence[AdapterDirectory]) -> list[_Answer]:
    """Return the answers of up to three adapters and of the base model."""
    chosen = [(adapter.tenant, adapter.name) for adapter in choose(adapters)] + [(DEFAULT_TENANT, "")]
    return [_Answer(tenant, name, colour) for (tenant, name), colour in zip(chosen, _COLOURS, strict=False)]


async def run_demo(router: str, answers: Sequence[_Answer]) -> None:
    """Stream the answers at once, then their figures. Raises CommandError."""
    try:
        await (_stream_live if out().is_terminal else _stream_plain)(router, answers)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    print_rows(
        ("adapter", "tenant", "TTFT ms", "tokens", "tokens/s"),
        (
            (
                answer.adapter or "(base model)",
                answer.tenant,
                format_figure(answer.timer.ttft_ms, 0),
                answer.timer.tokens,
                format_figure(answer.timer.tokens_per_s),
            )
            for answer in answers
        ),
    )
    sys.stdout.flush()


def choose(adapters: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
    """Choose at most DEMO_ADAPTERS: one of each tenant first, then second ones."""
    seen: dict[str, int] = {}
    ranked = []
    for adapter in adapters:
        seen[adapter.tenant] = seen.get(adapter.tenant, 0) + 1
        ranked.append((seen[adapter.tenant], adapter))
    ranked.sort(key=lambda pair: pair[0])
    return [adapter for _, adapter in ranked[:DEMO_ADAPTERS]]


async def _stream_live(router: str, answers: Sequence[_Answer]) -> None:
    from rich.console import Group
    from rich.live import Live

    def render() -> RenderableType:
        return Group(*(answer.panel() for answer in answers))

    with Live(render(), console=out(), refresh_per_second=15) as live:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(answer.follow(router, lambda: live.update(render())))


async def _stream_plain(router: str, answers: Sequence[_Answer]) -> None:
    """Print each answer when it is complete, its lines prefixed with tenant and adapter."""
    sys.stdout.write(f"{DEMO_PROMPT} ...\n")

    async def follow(answer: _Answer) -> None:
        await answer.follow(router, lambda: None)
        lines = answer.text.splitlines() or [""]
        sys.stdout.write("".join(f"[{answer.label}] {line}\n" for line in lines))
        sys.stdout.flush()

    async with asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(follow(answer))
