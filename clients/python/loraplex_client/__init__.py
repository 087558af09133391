"""Python client of Loraplex."""
