"""The report of `loraplex quantize --report`: a quantized model against the original, over a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.cli.terminal import Activity, print_fields, print_rows
from clients.cli.worker_command import ask_worker


def report(model: str, quantized: str, text: Path, json_file: Path | None, kv_cache_dtype: str = "") -> None:
    """Compare a model with its quantized form, a scheme or a directory; print tables, or write a JSON file.

    Raises CommandError, OSError.
    """
    form = " with a KV cache of ".join(filter(None, (quantized or "the weights as given", kv_cache_dtype)))
    flags = {"kv-cache-dtype": kv_cache_dtype} if kv_cache_dtype else {}
    with Activity() as activity:
        activity.step(f"comparing {model} with {form} over {text}")
        figures = ask_worker("report", model=model, quantized=quantized, text=str(text), **flags)
    figures = {"model": model, "quantized": form, "file": str(text), **figures}
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print_report(figures)


def print_report(figures: Mapping[str, Any]) -> None:
    """Print the figures: sizes, errors of the weights, effect on the text, and the text before and after."""
    sizes, text, continued = figures["weight_bytes"], figures["text"], figures["continuation"]
    kept = figures["kv_bytes_per_token"]
    print_fields((("model", figures["model"]), ("quantized", figures["quantized"]), ("text", figures["file"])))
    if figures["weight_errors"]:
        print_rows(
            ("layers", "number", "weights", "max error", "mean error", "relative"),
            (
                (
                    error["kind"],
                    error["layers"],
                    error["weights"],
                    f"{error['max']:.6f}",
                    f"{error['mean']:.6f}",
                    f"{error['relative']:.4f}",
                )
                for error in figures["weight_errors"]
            ),
        )
    before, after = text["perplexity"]["original"], text["perplexity"]["quantized"]
    print_rows(
        ("figure", "original", "quantized", "change"),
        (
            ("MiB of weights", *_pair(sizes["original"] / 2**20, sizes["quantized"] / 2**20, ".1f")),
            ("KiB of KV per token", *_pair(kept["original"] / 2**10, kept["quantized"] / 2**10, ".2f")),
            ("perplexity", *_pair(before, after, ".3f")),
        ),
    )
    print_fields(
        (
            ("tokens compared", text["tokens"]),
            ("same best token", f"{text['agreement']:.2%}"),
            ("mean divergence", f"{text['mean_kl']:.6f} nats"),
            ("largest divergence", f"{text['max_kl']:.4f} nats"),
            ("prompt", _one_line(continued["prompt"])),
            ("before", _one_line(continued["original"])),
            ("after", _one_line(continued["quantized"])),
        )
    )


def _pair(before: float, after: float, form: str) -> tuple[str, str, str]:
    return format(before, form), format(after, form), f"{after / before - 1:+.2%}"


def _one_line(text: str) -> str:
    """Return a text with its line breaks written out, so that a line of a pipe stays a line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
