"""Attention over the paged KV cache: the interface to transformers, and plans for CPU and CUDA."""
