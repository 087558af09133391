"""Measures a quantized base model against the original: its weights, its logits, and adapters on it."""
