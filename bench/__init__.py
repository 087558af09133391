"""Benchmarks against peers and against what the machine can do; `python -m bench` runs them all."""
