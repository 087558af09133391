"""Which threads may use more than one core for an operator of torch: the one that steps, and no other."""

from __future__ import annotations

import torch


def keep_to_one_core() -> None:
    """For a thread beside the steps: its operators start no threads of their own.

    With more OpenMP threads in the process than cores, libgomp no longer lets any of them spin while it waits, so that
    every operator of every step takes some 50 us longer. Torch sets the number for the calling thread, and for those
    that have not asked yet: who steps sets its own afterwards. Asking makes the setting stick.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
