"""Logging set-up; metrics and traces will join it."""
