"""The command line that all benchmarks share: `python -m bench.NAME [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.report import Report


def run_command(name: str, description: str, measure: Callable[[bool], Report]) -> Report:
    """Read the arguments, measure (quickly or not), print the tables, write the file; returns what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repeats, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    # Minutes of measuring must not end in a path that can't be written.
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        parser.error(f"--json: {arguments.json.parent} is not a directory")
    report = measure(arguments.quick)
    report.show()
    if arguments.json:
        report.write(arguments.json)
    return report
