"""Turns credentials into principals, and admits or refuses these by a table of permissions."""
