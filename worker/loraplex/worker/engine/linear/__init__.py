"""Linear layers of a model on the CPU: layouts of their weights, and the kernel for few rows."""
