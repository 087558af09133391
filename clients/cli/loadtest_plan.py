"""The plan of `loraplex loadtest`: a file's values, and the flags that override them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.cli.terminal import CommandError

if TYPE_CHECKING:
    from clients.loadtest.plan import Plan


def check_positive(flags: Mapping[str, float | None]) -> None:
    for flag, value in flags.items():
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"{flag}: {value:g} must be a number greater than 0")


def read_arrivals(rate: float | None, concurrency: int | None) -> dict[str, Any] | None:
    if rate is not None and concurrency is not None:
        raise CommandError("--rate is an open loop and --concurrency a closed one: give one of them")
    if rate is not None:
        return {"kind": "poisson", "rate_per_s": rate}
    return None if concurrency is None else {"kind": "closed", "concurrency": concurrency}


def read_sweep(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise CommandError(f"--sweep: {text!r} is not a list of numbers such as 1,2,4,8") from None


def build_plan(
    file: Path | None,
    flags: Mapping[str, Any],
    arrivals: dict[str, Any] | None,
    sweep: Sequence[float],
    tenant: str,
) -> Plan:
    """Return the file's plan, overridden by the flags."""
    from clients.loadtest.plan_file import load_toml, read_plan

    values = load_toml(file) if file is not None else {}
    given = {key: value for key, value in flags.items() if value is not None}
    if "requests" in given or "duration_s" in given:  # A flag replaces either, with its warm-up.
        for key in ("requests", "duration_s", "warm_up_requests", "warm_up_s"):
            values.pop(key, None)
    values |= given
    if arrivals is not None:
        values["arrivals"] = arrivals
        values.pop("sweep", None)
    if "arrivals" not in values and not sweep:
        raise CommandError("nothing to run: give a load-test file, --rate or --concurrency")
    if sweep:
        values.setdefault("arrivals", {"kind": "closed", "concurrency": 1})
        closed = isinstance(values["arrivals"], dict) and values["arrivals"].get("kind") == "closed"
        whole = [int(value) if value.is_integer() else value for value in sweep]
        values["sweep"] = {"concurrency": whole} if closed else {"rate_per_s": list(sweep)}
    if "requests" not in values and "duration_s" not in values and file is None:
        values["duration_s"] = 10.0
    return read_plan(values, str(file or "flags"), file.parent if file else Path(), tenant=tenant)
