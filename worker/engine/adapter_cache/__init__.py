"""Which adapters are in host memory and in device slots, and when they are swapped. Pure Python, no torch."""
