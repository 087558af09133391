"""`make throttled`: a worker of the real model gets a share of a core, then shares its cores with busy processes.

    python -m tests.trials.throttled --tokens 2000 --shares 0.12 0.4 --busy 8

A long prompt, and short ones beside it, are answered at the worker's own speed and then throttled. Both times they get
the same ids; throttled no job is given back, none is refused, and the time is at most 1.3 times what the processor time
allows. The limits are those of control groups, which root alone may make.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.real import real_model
from tests.e2e.conftest import Cluster, running_cluster

CONTROL_GROUPS = Path("/sys/fs/cgroup")
# Maximum time, and processor time, of throttled work, relative to what its processor time alone allows.
LIMIT = 1.3
# Tokens of the short prompts and of each answer, and the number of short prompts.
SHORT, ANSWER, BESIDE = 20, 8, 3
_PERIOD_US = 100_000


@contextlib.contextmanager
def cpu_limit(pids: Sequence[int], share: float) -> Iterator[None]:
    """Give the processes, all together, this share of one core."""
    unified = (CONTROL_GROUPS / "cgroup.controllers").exists()
    root = CONTROL_GROUPS if unified else CONTROL_GROUPS / "cpu"
    group, quota = root / f"throttled-{os.getpid()}", round(share * _PERIOD_US)
    group.mkdir()
    try:
        if unified:
            (root / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in pids:
            (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep the machine busy with so many processes."""
    with contextlib.ExitStack() as running:
        for _ in range(count):
            running.callback(running.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])).kill)
        yield


def processor_s(pids: Sequence[int]) -> float:
    """Return the seconds of processor time that the processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    # In user mode and in the kernel.
    return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Work:
    """Answers of the worker: their token ids, the seconds that they took, and their processor time."""

    ids: list[tuple[int, ...]]
    wall_s: float
    used_s: float


async def answer(cluster: Cluster, pids: Sequence[int], tokens: int, seed: str) -> Work:
    """Let the cluster answer a long prompt and short ones beside it. Raises RuntimeError where a job was given back."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(size)] for size in (tokens, *[SHORT] * BESIDE)]
    began, used = time.monotonic(), processor_s(pids)
    calls = [cluster.client.generate(token_ids=ids, max_tokens=ANSWER, timeout_s=3600) for ids in prompts]
    answers = await asyncio.gather(*calls)
    if any(one.continuations or one.usage.cached_tokens > tokens / 5 for one in answers):
        raise RuntimeError(f"jobs were given back, or blocks were not dropped: {answers}")
    return Work([tuple(one.token_ids) for one in answers], time.monotonic() - began, processor_s(pids) - used)


async def main(tokens: int, shares: Sequence[float], busy: int) -> int:
    """Run all forms of throttling; return 1 if one of them failed."""
    right, model = True, str(real_model())
    # The blocks of one run take the place of those of the run before it: next to nothing is cached.
    blocks = (tokens + BESIDE * SHORT) // 16 + 2 * (1 + BESIDE)
    with TemporaryDirectory(prefix="throttled-") as directory:
        async with running_cluster(Path(directory), model, {}, worker_flags=("--kv-blocks", f"{blocks}")) as cluster:
            [worker] = await cluster.workers()
            pids = (worker.pid, worker.engine_pid)
            for share in [*shares, *[0.0] * (busy > 0)]:
                form = f"{share:g} of a core" if share else f"beside {busy} busy processes"
                await answer(cluster, pids, tokens, f"before {form}")  # in the first steps of all the engine compiles
                free = await answer(cluster, pids, tokens, form)
                await answer(cluster, pids, tokens, f"between {form}")
                with cpu_limit(pids, share) if share else busy_processes(busy):
                    work = await answer(cluster, pids, tokens, form)
                factor = work.wall_s / (free.used_s / share) if share else work.used_s / free.used_s
                print(f"{form}: {factor:.2f} times what the processor allows\n  free {free}\n  then {work}", flush=True)
                right &= factor <= LIMIT and work.ids == free.ids
    return 0 if right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.trials.throttled", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.12, 0.4], help="shares of a core")
    parser.add_argument("--busy", type=int, default=8, help="number of busy processes; 0: leave this form out")
    sys.exit(asyncio.run(main(**vars(parser.parse_args()))))
