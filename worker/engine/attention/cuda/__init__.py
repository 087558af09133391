"""Paged attention on CUDA: Triton kernels for decodes and prefills."""
