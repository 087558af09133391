"""Sampling: from logits to token ids and log probabilities."""
