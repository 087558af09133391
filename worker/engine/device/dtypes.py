"""The names of dtypes, in settings, messages and the kernels' KINDS."""

from __future__ import annotations

from functools import cache

import torch


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
