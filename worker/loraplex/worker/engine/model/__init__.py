"""Loads a transformers model, lays out batches for it and runs its forward pass."""
