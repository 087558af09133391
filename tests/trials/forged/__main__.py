"""`make forged`: forged hellos, frames, jobs, commands, tokens and grants against a real cluster with credentials."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.trials.forged.run import attack


def main() -> int:
    """Make the tries; print how many of each kind were accepted, and how many the audit logs have."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials.forged", description=__doc__)
    parser.add_argument("--tries", type=int, default=1_000, help="number of tries in all (default 1000)")
    parser.add_argument("--seed", type=int, default=16, help="number that the draws come from (default 16)")
    given, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forged-") as directory:
        result = asyncio.run(attack(Path(directory), given.tries, given.seed))
    for name, (tries, accepted) in result.attacks.items():
        print(f"{tries:>6} {name}: {accepted} accepted")
    logs = ", ".join(f"{count} in the {name}'s audit log" for name, count in result.audited.items())
    print(f"{result.tries} tries, {result.accepted} accepted, {logs}, in {time.monotonic() - began:.0f} s")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
