"""Checkpoints that are not a family's own: text models beside towers, and GGUF files; contracts load it by its name."""
