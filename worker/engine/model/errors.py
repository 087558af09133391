"""The error of a model that can't be served; imports no torch, so that the engine process can catch it without."""

from __future__ import annotations


class ModelUnusableError(Exception):
    """The model can't be served here; one line that says why and what to do."""
