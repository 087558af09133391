"""Shared parts of the compiled CPU kernels: vector instructions, compilation, threads, scratch memory."""
