"""Keeps answers to their grammars: compiles them beside the steps, and gives each row the ids that may come next."""
