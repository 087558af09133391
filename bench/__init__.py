"""Benchmarks against other engines and against the machine's limits; `python -m bench` runs all of them."""
