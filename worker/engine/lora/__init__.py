"""Reads LoRA adapters and applies a different one to every row of a step."""
