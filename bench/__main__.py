"""Runs every benchmark, each in a process of its own, and rewrites the tables in docs/results.

python -m bench [--quick]        --quick: small runs that show that every benchmark works; the pages stay unchanged
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.plots import BENCHMARKS_PAGE
from bench.report import progress
from bench.tables import rewrite

NAMES = (
    "engine",
    "interference",
    "fairness",
    "relay",
    "gateway",
    "overload",
    "structured",
    "json_lists",
    "kernels",
    "quantized",
    "llama",
    "speculation",
    "prompts",
    "quotas",
    "secured",
    "store",
    "timing",
)
# Benchmarks that write their tables themselves where they are asked to, and draw their plots.
_OTHERS = ("lora_layer", "adapters", "scaling", "cells", "placement", "calls", "fan_in", "autoscaling")


def main() -> int:
    """Run all benchmarks; return exit code 0, or 1 if a benchmark failed. A failure does not stop the others."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="smaller models and fewer repeats; the page stays as it is"
    )
    arguments = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        for name in (*NAMES, *_OTHERS):
            progress(f"bench.{name}")
            file = Path(directory) / f"{name}.json"
            flags = ["--json", str(file), *(["--quick"] if arguments.quick else ["--write-docs"] * (name in _OTHERS))]
            if subprocess.run([sys.executable, "-m", f"bench.{name}", *flags], check=False).returncode:
                failed.append(name)
            elif not arguments.quick and name in NAMES and file.exists():  # One that cannot be run here writes none.
                BENCHMARKS_PAGE.write_text(rewrite(BENCHMARKS_PAGE.read_text(), json.loads(file.read_text())))
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
