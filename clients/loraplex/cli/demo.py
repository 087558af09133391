"""The demo of `loraplex up`: answers of tenants' adapters beside those of the base model, all streamed at once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.generate import AnswerTimer, format_figure
from loraplex.cli.service import explain
from loraplex.cli.tenants import TenantSpec, key_file
from loraplex.cli.terminal import CommandError, out, print_rows, printable
from loraplex.cli.upload_tree import AdapterDirectory
from loraplex_client import AsyncClient, LoraplexError
from loraplex_client.endpoint import DEFAULT_TENANT

if TYPE_CHECKING:
    from rich.console import RenderableType

DEMO_PROMPT = "Return a list of"
# Maximum tokens of an answer: a base model that was not trained for a question talks on.
DEMO_TOKENS = 48
DEMO_ADAPTERS = 3
# File beside the adapters with the demo's questions, an object a line.
QUESTIONS_FILE = "questions.jsonl"
_COLOURS = ("cyan", "magenta", "yellow", "green")


@dataclass(frozen=True)
class DemoQuestion:
    """A user's message for a tenant's adapter; the base model is asked the same."""

    tenant: str
    adapter: str
    text: str


def read_questions(root: Path | None) -> tuple[DemoQuestion, ...]:
    """Read the questions beside the adapters; none where there is no such file. Raises CommandError."""
    if root is None or not (file := root / QUESTIONS_FILE).is_file():
        return ()
    try:
        return tuple(DemoQuestion(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"{file}: {error}; a line is an object of tenant, adapter and text") from error


@dataclass
class DemoAnswer:
    """An answer as it streams. `adapter` is empty for the base model; the API key's file says who asks, if any."""

    tenant: str
    adapter: str
    colour: str
    key_file: Path | None = None
    text: str = ""
    timer: AnswerTimer = field(default_factory=AnswerTimer)

    @property
    def label(self) -> str:
        """Return tenant and adapter."""
        if self.adapter:
            return f"{self.tenant}/{self.adapter}"
        return "base model" if self.key_file is None else self.tenant

    async def follow(self, router: str, scene: Scene, changed: Callable[[], None]) -> None:
        """Stream the answer, calling `changed` after each message. Raises CommandError."""
        messages = [{"role": "user", "content": scene.prompt}] if scene.is_chat else None
        try:
            key = None if self.key_file is None else self.key_file.read_text(encoding="utf-8").strip()
            async with AsyncClient(router, self.tenant if key is None else "", api_key=key) as client:
                self.timer = AnswerTimer()
                stream = client.generate_stream(
                    None if scene.is_chat else scene.prompt,
                    messages=messages,
                    adapter_id=self.adapter or None,
                    max_tokens=DEMO_TOKENS,
                    temperature=0.0,
                )
                async for piece in stream:
                    self.timer.record(len(piece.token_ids))
                    self.text += printable(piece.text)
                    changed()
        except LoraplexError as error:
            raise CommandError(f"{self.label}: {explain(error, 'router', router)}", 1) from error
        except OSError as error:
            raise CommandError(f"{self.label}: {error.filename}: {error.strerror}", 1) from error


@dataclass(frozen=True)
class Scene:
    """A prompt, sent as text to continue or as a user's message, and its answers."""

    prompt: str
    answers: tuple[DemoAnswer, ...]
    is_chat: bool = False

    async def follow(self, router: str, changed: Callable[[], None]) -> None:
        """Stream the answers at once. Raises an ExceptionGroup of CommandErrors."""
        async with asyncio.TaskGroup() as group:
            for answer in self.answers:
                group.create_task(answer.follow(router, self, changed))

    def panel(self) -> RenderableType:
        """Render prompt and partial answers."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for answer in self.answers:
            table.add_row(Text(answer.label, f"bold {answer.colour}"), Text(answer.text.strip(), answer.colour))
        return Panel(Group(Text(self.prompt, "dim"), "", table), border_style="dim")


def adapter_scenes(adapters: Sequence[AdapterDirectory], questions: Iterable[DemoQuestion] = ()) -> list[Scene]:
    """Return the questions, each for its adapter and the base model; without any a prompt for three adapters and it."""
    names = {(adapter.tenant, adapter.name) for adapter in adapters}
    scenes = [
        Scene(
            question.text,
            (DemoAnswer(question.tenant, question.adapter, colour), DemoAnswer(DEFAULT_TENANT, "", "white")),
            is_chat=True,
        )
        for question, colour in zip(questions, _COLOURS, strict=False)
        if (question.tenant, question.adapter) in names
    ]
    chosen = [(adapter.tenant, adapter.name) for adapter in choose(adapters)] + [(DEFAULT_TENANT, "")]
    return scenes or [
        Scene(DEMO_PROMPT, tuple(DemoAnswer(*name, colour) for name, colour in zip(chosen, _COLOURS, strict=False)))
    ]


def tenant_scenes(specs: Iterable[TenantSpec], keys_dir: Path) -> list[Scene]:
    """Return one prompt for the tenants that have an API key; nothing where none has."""
    asking = [spec for spec in specs if spec.keys]
    answers = tuple(
        DemoAnswer(
            spec.name,
            next((adapter.name for adapter in spec.adapters), ""),
            colour,
            key_file(keys_dir, spec.name, spec.keys[0].label),
        )
        for spec, colour in zip(asking, _COLOURS, strict=False)
    )
    return [Scene(DEMO_PROMPT, answers)] if answers else []


def choose(adapters: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
    """Choose at most DEMO_ADAPTERS: one of each tenant first, then second ones."""
    seen: dict[str, int] = {}
    ranked = []
    for adapter in adapters:
        seen[adapter.tenant] = seen.get(adapter.tenant, 0) + 1
        ranked.append((seen[adapter.tenant], adapter))
    ranked.sort(key=lambda pair: pair[0])
    return [adapter for _, adapter in ranked[:DEMO_ADAPTERS]]


async def run_demo(router: str, scenes: Sequence[Scene]) -> None:
    """Stream all answers at once, then print their figures. Raises CommandError."""
    try:
        await (_stream_live if out().is_terminal else _stream_plain)(router, scenes)
    except ExceptionGroup as group:
        raise _first(group) from None
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
            for scene in scenes
            for answer in scene.answers
        ),
    )
    sys.stdout.flush()


def _first(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


async def _stream_live(router: str, scenes: Sequence[Scene]) -> None:
    from rich.console import Group
    from rich.live import Live

    def render() -> RenderableType:
        return Group(*(scene.panel() for scene in scenes))

    with Live(render(), console=out(), refresh_per_second=15) as live:
        async with asyncio.TaskGroup() as group:
            for scene in scenes:
                group.create_task(scene.follow(router, lambda: live.update(render())))


async def _stream_plain(router: str, scenes: Sequence[Scene]) -> None:
    """Print each prompt with its answers when these are complete, each line after tenant and adapter."""

    async def follow(scene: Scene) -> None:
        await scene.follow(router, lambda: None)
        sys.stdout.write(f"{scene.prompt}\n" if scene.is_chat else f"{scene.prompt} ...\n")
        for answer in scene.answers:
            lines = [line for line in answer.text.splitlines() if line] or [""]
            sys.stdout.write("".join(f"[{answer.label}] {line}\n" for line in lines))
        sys.stdout.write("\n" if scene.is_chat else "")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as group:
        for scene in scenes:
            group.create_task(follow(scene))
