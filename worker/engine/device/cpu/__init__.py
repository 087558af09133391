"""What the compiled CPU kernels share: vector operations, compilation, threads."""
