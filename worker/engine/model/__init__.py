"""A transformers model: loading it, laying out a batch, running the forward pass."""
