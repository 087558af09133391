"""Limits on the cores of torch operators: all cores in the thread that runs steps, one in every other thread."""

from __future__ import annotations

import torch


def keep_to_one_core() -> None:
    """Limit torch operators in the calling thread to one core. For threads beside the one that runs steps.

    With more OpenMP threads in the process than cores, libgomp's threads no longer spin while they wait, and every
    operator of every step takes some 50 us longer. torch.set_num_threads sets the number for the calling thread and for
    threads that have not read it yet, so the thread that runs steps sets its own afterwards; get_num_threads makes the
    setting permanent for the calling thread.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
