"""`loraplex plan`: what a model takes and how much fits. The worker knows; it is asked as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from clients.cli.options import JsonOption


def plan(
    model: Annotated[str, typer.Option(help="A transformers directory.")],
    context: Annotated[int, typer.Option(help="Tokens of prompt and answer together.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 32,
    adapters: Annotated[int, typer.Option(help="Adapters on the device at once.")] = 64,
    rank: Annotated[int, typer.Option(help="The rank of each, on every linear layer.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    memory: Annotated[str, typer.Option(help="The device's, such as 80GiB; this machine's if not given.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Weights, KV cache and adapter slots of a model, and how many sequences fit, without loading it."""
    flags = [f"--model={model}", f"--context={context}", f"--batch={batch}", f"--adapters={adapters}"]
    flags += [f"--rank={rank}", f"--dtype={dtype}", f"--memory={memory}", *(["--json"] if as_json else [])]
    raise typer.Exit(subprocess.run([sys.executable, "-P", "-m", "worker", "plan", *flags], check=False).returncode)
