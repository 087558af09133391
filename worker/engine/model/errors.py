"""Why a model can't be served. Imports no torch, so that every part of the worker can name it."""

from __future__ import annotations


class ModelUnusableError(Exception):
    """The model can't be served here; one line that says why and what to do."""
