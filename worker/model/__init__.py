"""A transformers model over a paged KV cache: what loads, how it attends, how a batch runs through it."""
