"""Renders chat templates in child processes, which anybody's template may bring down."""
