"""Logs, metrics and traces: their set-up in every process."""
