"""Calls of tools: one reader and one grammar for every format that contracts.artifacts.chat_formats declares."""

from __future__ import annotations

from loraplex.tool_calls.grammar import forget_tools, free_parts, tool_grammar
from loraplex.tool_calls.reader import CallReader
from loraplex.tool_calls.values import types_of

__all__ = ["CallReader", "forget_tools", "free_parts", "tool_grammar", "types_of"]
