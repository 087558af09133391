"""`make batches`: a batch runs while every kind of process is killed, and again beside interactive calls.

python -m tests.trials.batches --lines 10000 --kills 50 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from tests.trials.batches.arena import Arena, Verdict


async def trial(directory: Path, lines: int, kills: int, seed: int) -> tuple[Verdict, tuple[float, float]]:
    """Return how a batch with kills ended, and the interactive p95 in seconds alone and beside a batch."""
    async with Arena.open(directory, seed) as arena:
        beside = await arena.interactive_p95(lines)
        return await arena.run(lines, kills), beside


def main() -> None:
    """Run the trial; exit with 1 where a line was lost, doubled, wrong or wrongly charged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batches-") as folder:
        verdict, (alone, beside) = asyncio.run(trial(Path(folder), arguments.lines, arguments.kills, arguments.seed))
    print(verdict)
    print(
        f"interactive p95: {alone * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms beside a batch: {beside / alone:.2f} times"
    )
    raise SystemExit(0 if verdict.is_right else 1)


if __name__ == "__main__":
    main()
