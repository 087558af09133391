"""Keeps adapters in host memory and in device slots, and decides when they are swapped. Pure Python, no torch."""
