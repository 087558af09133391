"""A benchmark's report: tables for people on stdout, JSON for programs, progress on stderr."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.tables import cell

# Columns of a table that is piped: rich's 80 leave no room for the widest one.
_PIPED_WIDTH = 200
# Packages whose versions a report names.
_PACKAGES = ("loraplex", "torch", "transformers", "peft", "grpcio", "redis")


@dataclass(frozen=True)
class Aim:
    """The value that a ratio must reach; `at_most` if lower is better. Without either, the ratio is only reported."""

    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "reported" if self.at_most is None else f"<= {self.at_most:g}"

    def reached(self, value: float) -> bool:
        """Return whether a value reaches the aim."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def describe_machine() -> dict[str, Any]:
    """Return the properties of the machine that the figures depend on."""
    return {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the figures depend on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@dataclass(frozen=True)
class Figures:
    """Rows and ratios of a part of a report."""

    rows: Sequence[Mapping[str, Any]]
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A benchmark's result. `rows` are flat and may differ in their keys; `aims` has a key for each of `ratios`.

    `page_rows` are the rows of the docs where all would be too many, none where a plot or the ratios say it; `draw`
    draws the plots of the docs.
    """

    name: str
    command: str
    quick: bool
    setup: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    ratios: Mapping[str, float]
    aims: Mapping[str, Aim]
    machine: Mapping[str, Any] = field(default_factory=describe_machine)
    versions: Mapping[str, str] = field(default_factory=describe_versions)
    page_rows: Sequence[Mapping[str, Any]] | None = None
    draw: Callable[[], None] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values = asdict(self) | {"aims": {key: str(aim) for key, aim in self.aims.items()}}
        del values["draw"]
        return values

    def write(self, path: Path) -> None:
        """Write the JSON file atomically."""
        unfinished = path.with_name(path.name + ".new")
        unfinished.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        unfinished.replace(path)

    def show(self) -> None:
        """Print the tables."""
        # A machine with a device may have nothing but what the engine needs.
        from rich import box
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        quick = ", quick: not the figures to quote" if self.quick else ""
        console.print(f"bench.{self.name}{quick}; {self.machine['processor']}, {self.machine['threads']} threads")
        keys = list(dict.fromkeys(key for row in self.rows for key in row))
        table = Table(*keys, box=box.SIMPLE_HEAD)
        for row in self.rows:
            table.add_row(*(cell(row.get(key, "")) for key in keys))
        console.print(table)
        ratios = Table("ratio", "value", "aim", "", box=box.SIMPLE_HEAD)
        for key, value in self.ratios.items():
            aim = self.aims[key]
            ratios.add_row(key, cell(value), str(aim), "" if aim.reached(value) else "short")
        console.print(ratios)


def progress(message: str) -> None:
    """Print the current activity as a line on stderr."""
    print(message, file=sys.stderr, flush=True)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
