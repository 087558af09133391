"""The command line that all benchmarks share: `python -m bench.NAME [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.report import Report
from bench.tables import rewrite


def run_command(name: str, description: str, measure: Callable[[bool], Report], page: Path | None = None) -> Report:
    """Read the arguments, call `measure`, print the tables, write the JSON file; return the report.

    With a `page` of the docs there is an argument to write its tables again, and to draw its plots.
    """
    parser = command_parser(name, description)
    if page is not None:
        parser.add_argument(
            "--write-docs", action="store_true", help=f"write figures and plots into docs/results/{page.name}"
        )
    return run_parsed(parser, lambda arguments: measure(arguments.quick), page)


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all benchmarks share, for a benchmark that adds its own."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repeats, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def run_parsed(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Report], page: Path | None = None
) -> Report:
    """Do what run_command does, with `measure` of all arguments."""
    arguments = parser.parse_args()
    # Checked before the measurement, which takes minutes.
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        parser.error(f"--json: {arguments.json.parent} is not a directory")
    if page is not None and arguments.write_docs and arguments.quick:
        parser.error("--write-docs: not with --quick, whose figures are not for the page")
    report = measure(arguments)
    report.show()
    if arguments.json:
        report.write(arguments.json)
    if page is not None and arguments.write_docs:
        page.write_text(rewrite(page.read_text(), report.to_json()))
        if report.draw is not None:
            report.draw()
    return report
