"""The demo of `loraplex up`: streams answers of several tenants' adapters and of the base model at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loraplex_client import AsyncClient, LoraplexError
from loraplex_client.endpoint import DEFAULT_TENANT

from clients.cli.adapter_tree import AdapterDirectory
from clients.cli.answer_timer import AnswerTimer, format_figure
from clients.cli.failures import explain
from clients.cli.terminal import CommandError, out, print_rows, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

DEMO_PROMPT = "Return a list of"
DEMO_TOKENS = 48
DEMO_ADAPTERS = 3
_COLOURS = ("cyan", "magenta", "yellow", "green")


class _Answer:
    """A streaming answer. `adapter` is empty for the plain base model."""

    def __init__(self, tenant: str, adapter: str, colour: str) -> None:
        self.tenant = tenant
        self.adapter = adapter
        self.colour = colour
        self.text = ""
        self.timer = AnswerTimer()

    @property
    def label(self) -> str:
        return f"{self.tenant}/{self.adapter}" if self.adapter else "base model"

    async def follow(self, router: str, changed: Callable[[], None]) -> None:
        """Stream the answer, calling `changed` after each message. Raises CommandError."""
        try:
            async with AsyncClient(router, self.tenant) as client:
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

    def panel(self) -> RenderableType:
        """Render the partial answer."""
        from rich.panel import Panel
        from rich.text import Text

        text = Text.assemble((DEMO_PROMPT, "dim"), (self.text, self.colour))
        return Panel(text, title=Text(self.label), title_align="left", border_style=self.colour)


async def run_demo(router: str, adapters: Sequence[AdapterDirectory]) -> None:
    """Stream up to three adapters' answers and the base model's at once, then their figures. Raises CommandError."""
    chosen = [(adapter.tenant, adapter.name) for adapter in choose(adapters)] + [(DEFAULT_TENANT, "")]
    answers = [_Answer(tenant, name, colour) for (tenant, name), colour in zip(chosen, _COLOURS, strict=False)]
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
