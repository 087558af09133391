"""Callers: how they prove who they are, what they may do and use, and what the audit log has of them."""
