"""`loraplex plan`: how much memory a model takes and what fits. A worker process computes it."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from clients.cli.options import JsonOption, KvCacheOption, QuantizeOption


def plan(  # noqa: PLR0913, PLR0917  # one parameter a flag
    model: Annotated[str, typer.Option(help="A transformers directory.")],
    context: Annotated[int, typer.Option(help="Maximum tokens of prompt and answer together.")] = 4096,
    batch: Annotated[int, typer.Option(help="Concurrent sequences.")] = 32,
    adapters: Annotated[int, typer.Option(help="Adapters on the device.")] = 64,
    rank: Annotated[int, typer.Option(help="Rank of each adapter, on every linear layer.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantize: QuantizeOption = "",
    kv_cache_dtype: KvCacheOption = "",
    memory: Annotated[str, typer.Option(help="The device's memory, such as 80GiB; this machine's by default.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Compute a model's weights, KV cache and adapter slots, and how many sequences fit, without loading it."""
    flags = [f"--model={model}", f"--context={context}", f"--batch={batch}", f"--adapters={adapters}"]
    flags += [
        f"--rank={rank}",
        f"--dtype={dtype}",
        f"--quantize={quantize}",
        f"--kv-cache-dtype={kv_cache_dtype}",
        f"--memory={memory}",
        *(["--json"] if as_json else []),
    ]
    raise typer.Exit(subprocess.run([sys.executable, "-P", "-m", "worker", "plan", *flags], check=False).returncode)
