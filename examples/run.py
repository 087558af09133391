"""Starts the cluster of `make run`: the real model with three adapters, or, where it cannot be had, the shipped one.

Flags are those of `loraplex up`; with --model it starts that model, and no adapters but those of --adapters.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from examples.real import ADAPTERS, ROOT, Unavailable, real_model

SHIPPED = ("--model", str(ROOT / "examples" / "model"), "--adapters", str(ROOT / "examples" / "adapters"))


def model_flags(flags: list[str]) -> list[str]:
    """Return the flags with those of a model, where they name none."""
    if "--model" in flags:
        return flags
    try:
        model = ["--model", str(real_model()), "--adapters", str(ADAPTERS)]
    except Unavailable as error:
        print(f"{error}; starting the shipped model, which writes nonsense", file=sys.stderr, flush=True)
        model = list(SHIPPED)
    return [*model, *flags]


def main() -> None:
    """Become `loraplex up`."""
    command = str(Path(sys.executable).parent / "loraplex")
    os.execv(command, [command, "up", "--demo", *model_flags(sys.argv[1:])])


if __name__ == "__main__":
    main()
