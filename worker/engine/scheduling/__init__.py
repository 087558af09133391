"""Decides what runs in the next step: sequences, KV blocks, admission. Pure Python, no torch."""
