"""Sends the audit log's records to a collector; processes load it by its name where `--audit otlp` asks for it."""
