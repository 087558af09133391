"""What the engine's own kernels on the CPU have in common: their pieces, how they are compiled, who runs them."""
