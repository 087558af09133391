"""`loraplex quantize`: writes a quantized copy of a model, and reports what that does to a text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from clients.cli.options import KvCacheOption
from clients.cli.quantization_report import report as print_report
from clients.cli.terminal import CommandError


def quantize(  # one parameter a flag
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A transformers directory.")],
    out: Annotated[str, typer.Argument(metavar="[OUT]", help="New directory for the copy.")] = "",
    to: Annotated[
        str,
        typer.Option(
            metavar="SCHEME",
            help="int8, int8-zero-point, int4, int4-64, int4-128 or fp8, each also with +embeddings; "
            "with --report, '' leaves the weights as they are.",
        ),
    ] = "int8",
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with the original over this text; OUT may be left out."),
    ] = None,
    kv_cache_dtype: KvCacheOption = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report to a JSON file.")
    ] = None,
) -> None:
    """Write a quantized copy of a model, whose adapters are the original's.

    [bold]loraplex quantize ./Qwen2-0.5B ./Qwen2-0.5B-int4 --to int4 --report article.txt[/]
    """
    if not out and report is None:
        raise CommandError("give OUT, the new directory, or --report FILE")
    if kv_cache_dtype and report is None:
        raise CommandError("--kv-cache-dtype is for --report FILE: a copy has no KV cache, its workers take the flag")
    if out:
        flags = [f"--model={model}", f"--out={out}", f"--to={to}"]
        # -P: a folder of the working directory called worker would be run instead.
        done = subprocess.run([sys.executable, "-P", "-m", "worker", "quantize", *flags], check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
    if report is not None:
        print_report(model, out or to, report, json_file, kv_cache_dtype)
