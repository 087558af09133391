"""`make forged`: forged hellos, frames, jobs, commands, tokens and grants against a real cluster with credentials."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.forged.run import attack


def main() -> int:
    """Make the tries; print how many of each kind were accepted, and how many the audit logs have."""
    parser = argparse.ArgumentParser(prog="python -m tests.forged", description=__doc__)
    parser.add_argument("--tries", type=int, default=1_000, help="number of tries in all (default 1000)")
    parser.add_argument("--seed", type=int, default=16, help="number that the draws come from (default 16)")
    given, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forged-") as directory:
        result = asyncio.run(attack(Path(directory), given.tries, given.seed))
    for name, (tries, accepted) in result.attacks.items():
        print(f"{tries:>6} {name}: {accepted} accepted")
    tries, accepted = result.tries, result.accepted
    print(
        f"{tries} tries, {accepted} accepted, {result.audited} in the audit logs, in {time.monotonic() - began:.0f} s"
    )
    return 0 if accepted == 0 and result.audited >= tries else 1


if __name__ == "__main__":
    sys.exit(main())
