"""Paged attention on the CPU: a compiled kernel for short rows, torch for long chunks."""
