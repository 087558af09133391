"""Decides what runs in the next step: sequences, KV blocks, adapters in slots, grammars. Pure Python, no torch."""
