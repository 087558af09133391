"""The CPU's kernels, compiled with numba for torch's threads: attention, LoRA, linear layers, rows between them, masks.

They take addresses and numbers, and import nothing of the rest of Loraplex.
"""
