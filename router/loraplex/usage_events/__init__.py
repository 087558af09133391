"""Usage events of charges, sent to a collector and written to a file. A router loads `log` by its name."""
