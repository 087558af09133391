"""Anthropic's protocol: messages, and the count of their tokens."""
