"""Limits on the cores of torch operators: all cores in the thread that runs steps, one in every other thread."""

from __future__ import annotations

import torch

# Number of threads that torch uses by default; read at import, since an engine that was built earlier may set fewer.
_CORES = torch.get_num_threads()
# Maximum number of parameters of a model that computes on one thread by default. With 5 M parameters one thread made
# 250 tokens/s and two threads 27 on a busy machine, because each waits for the other; with 28 M two are twice as fast.
_ONE_CORE_PARAMETERS = 16_000_000


def step_threads(parameters: int, threads: int) -> int:
    """Return the number of threads that compute steps of a model with so many parameters; `threads`: 0, or chosen."""
    return threads or (1 if parameters < _ONE_CORE_PARAMETERS else _CORES)


def keep_to_one_core() -> None:
    """Limit torch operators in the calling thread to one core. For threads beside the one that runs steps.

    With more OpenMP threads in the process than cores, libgomp's threads no longer spin while they wait, and every
    operator of every step takes some 50 us longer. torch.set_num_threads sets the number for the calling thread and for
    threads that have not read it yet, so the thread that runs steps sets its own afterwards; get_num_threads makes the
    setting permanent for the calling thread.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
