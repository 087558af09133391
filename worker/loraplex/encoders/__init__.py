"""Encoders: texts computed whole, joined in one batch without padding, each with its own adapter."""
