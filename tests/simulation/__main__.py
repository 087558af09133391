"""Runs many seeds: `python -m tests.simulation [--seeds 5000] [--first 0] [--processes 2]`.

Prints what every seed that failed did, then a table of what happened in all of them. Exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.seed_report import report_seed


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    began, failed = time.perf_counter(), 0
    ends, fired, numbers = Counter[str](), Counter[str](), Counter[str]()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    # A process that can't even start ends all of it, where a multiprocessing.Pool would start others for ever.
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        for report in pool.map(report_seed, seeds, chunksize=10):
            if report.wrong:
                failed += 1
                print(report.wrong, flush=True)
            ends.update(report.ends)
            fired.update(report.fired)
            numbers.update(report.numbers)
    for title, counts in (("requests", ends), ("faults", fired), ("in all", numbers)):
        print(f"{title}: " + ", ".join(f"{count:g} {name}" for name, count in sorted(counts.items())))
    print(f"{len(seeds)} seeds, {failed} failed, {time.perf_counter() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
