"""The command line that all benchmarks share: `python -m bench.NAME [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.report import Report


def run_command(name: str, description: str, measure: Callable[[bool], Report]) -> Report:
    """Read the arguments, call `measure`, print the tables, write the JSON file; return the report."""
    return run_parsed(command_parser(name, description), lambda arguments: measure(arguments.quick))


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all benchmarks share, for a benchmark that adds its own."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repeats, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def run_parsed(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Report]) -> Report:
    """Do what run_command does, with `measure` of all arguments."""
    arguments = parser.parse_args()
    # Checked before the measurement, which takes minutes.
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        parser.error(f"--json: {arguments.json.parent} is not a directory")
    report = measure(arguments)
    report.show()
    if arguments.json:
        report.write(arguments.json)
    return report
